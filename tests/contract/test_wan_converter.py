"""What MindSpeed-MM's own commands make of weights and adapters of Wan, against what is made of them here."""

import numpy as np
import torch

from mindspeed_mm_dit.integrations.formats import lora_files
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays
from tests.conftest import GOLDEN
from tests.contract.hosted import needs_trees, run_python
from tests.contract.test_real_host import good

WAN, ADAPTERS = GOLDEN / "wan_tiny.pt", GOLDEN / "wan_lora_tiny/wan_lora"
WEIGHTS = "release/mp_rank_00/model_optim_rng.pt"
THEIR_NAMES = {"to_q": "proj_q", "to_k": "proj_k", "to_v": "proj_v", "to_out.0": "proj_out"}


def wan_converter(folder, command, source, target, *more):
    """Run ``mm-convert WanConverter``, and return what it writes."""
    words = ["--cfg.source_path", source, "--cfg.target_path", target, "--cfg.target_parallel_config.pp_layers", "[]"]
    good(run_python(["-m", "checkpoint.convert_cli", "WanConverter", command, *words, *more], folder))
    return torch.load(folder / target / WEIGHTS, weights_only=True)["model"]


@needs_trees
def test_their_merge_lora_to_base_makes_what_ours_makes(tmp_path):
    """Their names of the layers are read here, and so is the alpha that their command is told."""
    base, ours = (tmp_path / folder / "diffusion_pytorch_model.safetensors" for folder in ("base", "merged"))
    for file in (base, ours):
        file.parent.mkdir()
    weights = torch.load(WAN, weights_only=True)["model"]
    write_arrays(base, {name: value.numpy() for name, value in weights.items()}, {})
    theirs: dict[str, np.ndarray] = {}
    for layer, adapter in lora_files.read(ADAPTERS).layers.items():
        name = layer.replace("attn1", "self_attn").replace("attn2", "cross_attn")
        for here, there in THEIR_NAMES.items():
            name = name.replace(here, there)
        theirs |= {f"{name}.lora_A.default.weight": adapter.down, f"{name}.lora_B.default.weight": adapter.up}
    write_arrays(tmp_path / "adapters.safetensors", theirs, {})
    location = tmp_path / "adapters" / WEIGHTS
    location.parent.mkdir(parents=True)
    torch.save({"model": {name: torch.from_numpy(np.array(value)) for name, value in theirs.items()}}, location)
    (tmp_path / "adapters/latest_checkpointed_iteration.txt").write_text("release")
    convert(base, ours, loras=[f"{tmp_path / 'adapters.safetensors'}:2"])
    wan_converter(tmp_path, "hf_to_mm", "base", "base_mm")
    scale = ("--cfg.lora_path", "adapters", "--lora_rank", "4", "--lora_alpha", "8", "--use_npu", "false")
    merged = wan_converter(tmp_path, "merge_lora_to_base", "base_mm", "merged_mm", *scale)
    expected = wan_converter(tmp_path, "hf_to_mm", "merged", "ours_mm")
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(merged[name], value, rtol=0, atol=1e-6, err_msg=name)
