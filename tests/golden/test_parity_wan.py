"""mm-dit parity on the reference values of Wan 2.2, of Wan 2.1 from an image, and of adapters."""

import shutil

import numpy as np
import pytest

from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from tests.conftest import FRAMEWORK, GOLDEN
from tests.golden.conftest import without

VAES = {"wan22_i2v_tiny": "wan_vae_tiny", "wan21_i2v_tiny": "wan_vae_tiny", "wan22_ti2v_tiny": "wan22_vae_tiny"}
COUNTS = {"wan22_t2v_tiny": 17, "wan22_i2v_tiny": 111, "wan22_ti2v_tiny": 97, "wan21_i2v_tiny": 106}
"""Quantities of each file that need no autoencoder."""
FOLDER, WAN = GOLDEN / "wan_lora_tiny", GOLDEN / "wan_tiny.pt"
FILE = FOLDER / "lora_values.npz"


@pytest.mark.parametrize("name", COUNTS)
def test_values_of_experts_images_and_times_are_reproduced(compare, name):
    left_out = {}
    findings = compare(GOLDEN / f"{name}.npz", GOLDEN / name, 1e-5, 1e-12, {}, left_out.__setitem__)
    assert len(findings) == COUNTS[name] and [f for f in findings if not f.good] == []
    assert set(left_out) <= {"condition", "condition_with_last_image"}


@pytest.mark.pytorch  # the autoencoder is one of diffusers
def test_values_of_the_autoencoder_of_patches_are_reproduced(compare):
    vae = GOLDEN / "wan22_vae_tiny"
    findings = compare(f"{vae}.npz", vae, 1e-5, 1e-12)
    assert len(findings) == 14 and [f for f in findings if not f.good] == []


@pytest.mark.mindspore
def test_operator_that_mindspore_lacks_is_named(compare):
    with pytest.raises(PlatformError, match="conv3d of MindSpore is for Ascend"):
        compare(GOLDEN / "wan22_vae_tiny.npz", GOLDEN / "wan22_vae_tiny", 1e-5, 1e-12)


def test_values_of_the_adapters_of_each_expert_are_reproduced(compare):
    folder = GOLDEN / "wan22_lora_tiny"
    findings = compare(folder / "lora_values.npz", GOLDEN / "wan22_t2v_tiny", 1e-5, 1e-12, {"--lora": folder})
    assert len(findings) == 56 and [f for f in findings if not f.good] == []
    assert {"loaded/transformer", "loaded/transformer_2", "loaded/sample/result"} <= {f.name for f in findings}


@pytest.mark.pytorch  # the autoencoder is one of diffusers
@pytest.mark.parametrize("name", VAES)
def test_latents_of_given_frames_are_reproduced(compare, name, tmp_path):
    other = ("tap/", "train/", "sample", "(transformer(_2)?/)?output", "model_in")
    part = without(GOLDEN / f"{name}.npz", tmp_path, *other)
    findings = compare(part, GOLDEN / name, 1e-5, 1e-12, {"--vae": GOLDEN / VAES[name]})
    assert {f.name for f in findings} >= {"condition"} and all(f.good for f in findings)


def test_values_of_adapters_of_other_programs_are_reproduced(compare):
    findings = compare(FILE, WAN, 1e-5, 1e-12, {"--lora": FOLDER})
    assert len(findings) == 110 and [f for f in findings if not f.good] == []
    assert all(f.tolerance <= (3e-5 if "grad_norm" in f.name else 1e-5) for f in findings)
    assert {f.name for f in findings if f.name.startswith("loaded/")} == {
        "loaded/wan_lora", "loaded/wan_lora_no_metadata", "loaded/kohya", "loaded/native", "loaded/wan_adapter",
        "loaded/dit_lora",
    }  # fmt: skip


@pytest.mark.extended if FRAMEWORK == "mindspore" else pytest.mark.pytorch  # there a further network of the same
def test_values_of_adapters_of_an_image_model_are_reproduced(compare):
    folder = GOLDEN / "flux_lora_tiny"
    findings = compare(folder / "lora_values.npz", GOLDEN / "flux_tiny", 1e-5, 1e-12, {"--lora": folder})
    assert len(findings) == 114 and [f for f in findings if not f.good] == []
    assert sum(f.name.startswith("loaded/") for f in findings) == 5 and max(f.tolerance for f in findings) < 2e-4


@pytest.mark.pytorch
def test_a_strength_that_is_lost_is_found(compare, tmp_path):
    """The metadata of a file says alpha; without it the adapters count half."""
    folder = tmp_path / "lora"
    shutil.copytree(FOLDER, folder)
    shutil.copytree(folder / "wan_lora_no_metadata", folder / "wan_lora", dirs_exist_ok=True)
    with np.load(FILE) as file:
        kept = {name: file[name] for name in file if name.startswith(("wan/", "loaded/wan_lora", "wan_lora/output"))}
    np.savez(tmp_path / "part.npz", **kept)
    findings = {f.name: f for f in compare(tmp_path / "part.npz", WAN, 1e-5, 1e-12, {"--lora": folder})}
    assert not findings["loaded/wan_lora"].good and not findings["wan_lora/output_fused"].good
    assert findings["loaded/wan_lora_no_metadata"].good and findings["wan/output_base"].good


@pytest.mark.pytorch
def test_folder_without_the_adapters_of_the_file_is_refused(compare, tmp_path):
    for given, words in (({}, "--lora"), ({"--lora": tmp_path}, "wan_lora")):
        with pytest.raises(CheckpointError, match=words):
            compare(FILE, WAN, 1e-5, 1e-12, given)
