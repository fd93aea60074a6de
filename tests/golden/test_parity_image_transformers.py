"""mm-dit parity on the reference values of diffusers' image transformers, and on folders that are not quite that."""

import json
import shutil

import numpy as np
import pytest

from mindspeed_mm_dit.errors import CheckpointError
from tests.conftest import FRAMEWORK, GOLDEN

QUANTITIES = {"flux_tiny": 166, "flux_schnell_tiny": 118, "sd3_tiny": 100, "sd35_tiny": 108, "qwenimage_tiny": 115,
              "zimage_tiny": 96, "flux2_tiny": 82}  # fmt: skip


@pytest.fixture
def compare(compare):
    return lambda file, folder, left_out: compare(file, folder, 1e-5, 1e-12, None, left_out.__setitem__)


VARIANTS = ("flux_schnell_tiny", "sd3_tiny") if FRAMEWORK == "mindspore" else ()
NAMES = [pytest.param(name, marks=[pytest.mark.extended] if name in VARIANTS else []) for name in QUANTITIES]
"""On MindSpore one network of each family, without its variants."""


@pytest.mark.parametrize("name", NAMES)
def test_values_of_diffusers_are_reproduced(compare, name):
    left_out = {}
    findings = compare(GOLDEN / f"{name}.npz", GOLDEN / name, left_out)
    assert [f for f in findings if not f.good] == []
    assert max(f.tolerance for f in findings) < 1e-4 and len(findings) == QUANTITIES[name]
    assert set(left_out) == ({"tap"} if name == "zimage_tiny" else set())


@pytest.mark.pytorch  # the same on every framework
def test_folder_of_another_network_or_setting_is_refused(compare, tmp_path):
    shutil.copytree(GOLDEN / "flux_tiny", tmp_path / "flux")
    config = json.loads((tmp_path / "flux/config.json").read_text())
    for changed, words in (
        ({"patch_size": 2}, "flux/config.json.* patch_size = 2"),
        ({"_class_name": "UNet2DModel"}, "_class_name = 'UNet2DModel'.* FluxTransformer2DModel"),
        ({"num_layers": 3}, "config.json"),
        ({"in_channels": None}, "FluxTransformer2DModel"),
    ):
        (tmp_path / "flux/config.json").write_text(json.dumps(config | changed))
        with pytest.raises(CheckpointError, match=words):
            compare(GOLDEN / "flux_tiny.npz", tmp_path / "flux", {})
    with pytest.raises(CheckpointError, match="diffusers"):
        compare(GOLDEN / "flux_tiny.npz", tmp_path, {})


@pytest.mark.pytorch
def test_a_guidance_that_is_lost_is_found(compare, tmp_path):
    with np.load(GOLDEN / "flux_tiny.npz") as file:
        kept = {name: array for name, array in file.items() if "/" not in name or name == "train/sigma"}
    np.savez(tmp_path / "part.npz", **kept | {"guidance": kept["guidance"] + 1})
    findings = {f.name: f.good for f in compare(tmp_path / "part.npz", GOLDEN / "flux_tiny", {})}
    assert not findings["output"] and findings["packed"]
