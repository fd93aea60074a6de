"""mm-dit parity on the reference values of adapters, and on folders that are not quite those."""

import shutil

import numpy as np
import pytest

from mindspeed_mm_dit.errors import CheckpointError
from tests.conftest import FRAMEWORK, GOLDEN

FOLDER, WAN = GOLDEN / "wan_lora_tiny", GOLDEN / "wan_tiny.pt"
FILE = FOLDER / "lora_values.npz"


def test_values_of_adapters_of_other_programs_are_reproduced(compare):
    findings = compare(FILE, WAN, 1e-5, 1e-12, {"--lora": FOLDER})
    assert len(findings) == 110
    assert [f for f in findings if not f.good] == []
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
    with pytest.raises(CheckpointError, match="--lora: is missing"):
        compare(FILE, WAN, 1e-5, 1e-12, {})
    with pytest.raises(CheckpointError, match="has neither wan_lora"):
        compare(FILE, WAN, 1e-5, 1e-12, {"--lora": tmp_path})
