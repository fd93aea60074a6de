"""mm-dit parity on the reference values of Wan 2.2, and of Wan 2.1 from an image."""

import pytest

from mindspeed_mm_dit.errors import PlatformError
from tests.conftest import GOLDEN
from tests.golden.parts import without

VAES = {"wan22_i2v_tiny": "wan_vae_tiny", "wan21_i2v_tiny": "wan_vae_tiny", "wan22_ti2v_tiny": "wan22_vae_tiny"}
COUNTS = {"wan22_t2v_tiny": 17, "wan22_i2v_tiny": 111, "wan22_ti2v_tiny": 97, "wan21_i2v_tiny": 106}
"""Quantities of each file that need no autoencoder."""


@pytest.mark.parametrize("name", COUNTS)
def test_values_of_experts_images_and_times_are_reproduced(compare, name):
    left_out = {}
    findings = compare(GOLDEN / f"{name}.npz", GOLDEN / name, 1e-5, 1e-12, {}, left_out.__setitem__)
    assert len(findings) == COUNTS[name]
    assert [f for f in findings if not f.good] == []
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
    part = without(
        GOLDEN / f"{name}.npz", tmp_path, "tap/", "train/", "sample", "(transformer(_2)?/)?output", "model_in"
    )
    findings = compare(part, GOLDEN / name, 1e-5, 1e-12, {"--vae": GOLDEN / VAES[name]})
    assert {f.name for f in findings} >= {"condition"} and all(f.good for f in findings)
