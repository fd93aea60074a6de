"""Weights of Wan, and of FLUX.1, as diffusers keeps them: one file or several, converted, and begun from."""

import json

import diffusers
import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, read_source
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.integrations.formats.config_json import wan_model_of
from mindspeed_mm_dit.integrations.formats.families import from_original
from mindspeed_mm_dit.integrations.formats.single_files import read_safetensors
from tests.checkpoint_fixtures import assert_same

SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "text_dim": 64, "freq_dim": 16, "ffn_dim": 24,
         "num_layers": 2, "in_channels": 1, "out_channels": 1, "patch_size": (3, 8, 8)}  # fmt: skip


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(**SIZES)


@pytest.mark.parametrize("largest", ["10GB", "20KB"], ids=["one file", "several"])
def test_folder_is_converted_tensor_by_tensor(network, tmp_path, largest, capsys):
    network.save_pretrained(tmp_path / "wan", max_shard_size=largest)
    assert (len(list((tmp_path / "wan").glob("*.safetensors"))) > 1) == (largest == "20KB")
    convert = ["convert", str(tmp_path / "wan"), str(tmp_path / "wan.safetensors")]
    assert main(convert) == 0
    assert_same(read_safetensors(tmp_path / "wan.safetensors").weights, arrays_of(network))
    if largest == "20KB":
        next((tmp_path / "wan").glob("*00001*.safetensors")).unlink()
        assert main([*convert, "--overwrite"]) == 2 and "00001-of" in capsys.readouterr().err
        index = tmp_path / "wan/diffusion_pytorch_model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
        assert main([*convert, "--overwrite"]) == 2 and "'../elsewhere.safetensors'" in capsys.readouterr().err


def arrays_of(network):
    return {name: value.numpy() for name, value in network.state_dict().items()}


IMAGE = {"in_channels": 6, "image_dim": 10, "added_kv_proj_dim": 16, "pos_embed_seq_len": 4}


@pytest.mark.parametrize("settings", [{"in_channels": 6}, IMAGE], ids=["2.2", "2.1"])
def test_text_to_video_network_begins_one_from_an_image(network, tmp_path, settings):
    from mindspeed_mm_dit.models.video_transformer import Wan

    network.save_pretrained(tmp_path / "wan")
    config = WanConfig(**{**SIZES, **settings}, latent_size=(3, 16, 16))
    ours, adapted_starter = Wan(config), adapt_weights(read_source(tmp_path / "wan", config), config, (), 0)
    ours.load_state_dict({own.name: torch.from_numpy(own.value) for own in adapted_starter})
    torch.manual_seed(1)
    x, t, text = torch.randn(2, 1, 3, 16, 16), torch.tensor([900.0, 30.0]), torch.randn(2, 5, 64)
    given = {name: torch.from_numpy(array) for name, array in config.conditions.examples(2).items() if name != "text"}
    with torch.no_grad():
        torch.testing.assert_close(ours(x, t, text, *given.values()), network(x, t, text).sample, rtol=1e-4, atol=1e-5)
    said = {own.name: own.how for own in adapted_starter if own.how}
    assert said["patch_embedding.weight"] == "zeros for the 5 channels of the conditioning frames"


def test_the_names_of_wan_s_own_code_are_read_as_diffusers_reads_them():
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    block = [f"{a}_attn.{x}" for a in ("self", "cross") for x in ("q", "k", "v", "o", "norm_q", "norm_k")]
    block += ["cross_attn.k_img", "cross_attn.v_img", "cross_attn.norm_k_img", "ffn.0", "ffn.2", "norm3"]
    ends = ("patch_embedding", "time_embedding.0", "time_embedding.2", "time_projection.1", "text_embedding.0",
            "text_embedding.2", "head.head", *(f"img_emb.proj.{number}" for number in (0, 1, 3, 4)))  # fmt: skip
    layers = [*ends, *(f"blocks.{number}.{name}" for number in (0, 11) for name in block)]
    names = [f"{layer}.{last}" for layer in layers for last in ("weight", "bias")]
    names += ["head.modulation", "blocks.0.modulation", "blocks.11.modulation"]
    theirs = convert_wan_transformer_to_diffusers({name: number for number, name in enumerate(names)})
    assert from_original({name: np.array(number) for number, name in enumerate(names)}) == theirs


@pytest.mark.parametrize(
    ("scheduler", "shift"), [({"flow_shift": 3.0}, 3.0), ({"shift": 7.0}, 7.0), ({}, 1.0), (None, 5.0)]
)
def test_shift_is_that_of_the_scheduler_or_the_published_one(tmp_path, scheduler, shift):
    files = {"model_index.json": {"_class_name": "WanPipeline"}, "transformer/config.json": {}}
    files |= {} if scheduler is None else {"scheduler/scheduler_config.json": scheduler}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    assert wan_model_of(tmp_path)["diffusion"]["shift"] == shift
