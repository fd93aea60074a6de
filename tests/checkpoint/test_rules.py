"""Names and shapes in diffusers' form and in ours, and that a network converted answers the same."""

import dataclasses

import pytest

from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file
from mindspeed_mm_dit.integrations.formats.config_json import infer_vae_config, vae_shapes
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.formats.diffusers_dit import diffusers_shapes, from_diffusers, to_diffusers
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.weight_adapters import adapter_of
from tests.checkpoint_fixtures import (
    MODEL_JSON,
    TINY,
    TINY_VAE,
    assert_same,
    diffusers_dit,
    dit_arrays,
    needs_diffusers,
)
from tests.conftest import GOLDEN


def test_the_rules_use_every_tensor_once_and_undo_themselves():
    arrays = dit_arrays()
    theirs = to_diffusers(arrays, TINY)
    assert {name: array.shape for name, array in theirs.items()} == diffusers_shapes(TINY)
    assert_same(from_diffusers(theirs, TINY, "x"), arrays)
    assert_same(to_diffusers(from_diffusers(theirs, TINY, "x"), TINY), theirs)


def test_shapes_tell_the_architecture():
    assert dataclasses.replace(adapter_of(DiTConfig).of_shapes(parameters_of(TINY).shapes()), num_heads=2) == TINY
    assert infer_vae_config(vae_shapes(TINY_VAE), norm_num_groups=4) == TINY_VAE
    published = read_torch_file(GOLDEN / "dit_tiny_p2.pt")["model"]
    shapes = {name: array.shape for name, array in published.items()}
    assert parameters_of(adapter_of(DiTConfig).of_shapes(shapes)).shapes() == shapes


@needs_diffusers
def test_names_and_shapes_are_those_of_diffusers():
    from diffusers import AutoencoderKL

    theirs = {name: tuple(t.shape) for name, t in diffusers_dit().state_dict().items()}
    assert diffusers_shapes(TINY) == theirs
    vae = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4,
    )  # fmt: skip
    assert vae_shapes(TINY_VAE) == {name: tuple(t.shape) for name, t in vae.state_dict().items()}


@needs_diffusers
@pytest.mark.pytorch
@pytest.mark.parametrize("direction", ["to diffusers", "from diffusers"])
def test_outputs_equal_those_of_diffusers(tmp_path, framework, direction):
    import torch
    from diffusers import DiTTransformer2DModel
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.dit import DiT

    torch.manual_seed(0)
    if direction == "to diffusers":
        write_torch_file(tmp_path / "a.pt", dit_arrays())
        model_json = {**MODEL_JSON, "ae": {"model_id": "autoencoder_kl", "from_pretrained": "none"}}
        model_json["predictor"] = MODEL_JSON["predictor"] | {"in_channels": 4}
        convert(tmp_path / "a.pt", tmp_path / "d", "diffusers", description=model_json)
        theirs, weights = DiTTransformer2DModel.from_pretrained(tmp_path / "d").eval(), dit_arrays()
    else:
        theirs = diffusers_dit()
        shared = theirs.transformer_blocks[0].norm1.emb.state_dict()
        for block in theirs.transformer_blocks:  # the published network has one embedding for all blocks
            block.norm1.emb.load_state_dict(shared)
        theirs.save_pretrained(tmp_path / "pipeline" / "transformer")
        convert(tmp_path / "pipeline", tmp_path / "a.safetensors")
        weights = read_weights(tmp_path / "a.safetensors")
    ours = DiT(TINY).eval()
    runtime.load_arrays(ours, weights)
    for module in theirs.modules():  # diffusers spaces the 128 frequencies by 1/127, the published model by 1/128
        if hasattr(module, "downscale_freq_shift"):
            module.downscale_freq_shift = 0
    x, t, y = torch.randn(3, 4, 8, 8), torch.tensor([0, 10, 999]), torch.tensor([0, 3, 5])
    with torch.no_grad():
        a, b = ours(x, t, y), theirs(x, timestep=t, class_labels=y).sample
    assert (a - b).norm() / b.norm() < 1e-5  # float32: cosines of up to 999 rad from frequencies rounded otherwise
