import argparse
import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_weights
from mindspeed_mm_dit.checkpoint.state import check_names
from mindspeed_mm_dit.configs.dit import OPTIONS, DiTConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.formats.single_files import plain
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from tests.checkpoint_fixtures import assert_same
from tests.conftest import GOLDEN

TENSORS = {"a.weight": torch.randn(3, 2), "b.bias": torch.randn(4)}


def test_average_is_preferred_where_there_are_both(tmp_path):
    average = {name: value + 1 for name, value in TENSORS.items()}
    torch.save({"model": TENSORS, "ema": average, "opt": {}, "args": argparse.Namespace(a=1)}, tmp_path / "f.pt")
    for use_ema, tensors in ((True, average), (False, TENSORS)):
        np.testing.assert_array_equal(read_weights(tmp_path / "f.pt", use_ema)["b.bias"], tensors["b.bias"].numpy())


def below(prefix):
    return {f"{prefix}{name}": value for name, value in TENSORS.items()}


WRAPPED = {
    "torch.compile": below("_orig_mod."), "DDP": below("module."), "both": below("module._orig_mod."),
    "Lightning": {"state_dict": below("model."), "epoch": 1}, "DeepSpeed": {"module": TENSORS, "dp_world_size": 1},
    "Lightning, compiled": {"state_dict": below("model._orig_mod.")}, "state dicts": {"ema_state_dict": TENSORS},
    "a weighted average": {"n_averaged": torch.tensor(3), **below("module.")},
    "latent diffusion": below("model.diffusion_model."),
    "a compiled average": {"model": TENSORS, "ema": below("_orig_mod."), "opt": {}},
    "both in one module": {"state_dict": {**below("model."), **below("ema.")}},
}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_lose_the_prefixes_of_whatever_was_around_the_network(tmp_path, wrapper):
    torch.save(WRAPPED[wrapper], tmp_path / "f.pt")
    assert read_weights(tmp_path / "f.pt").keys() == TENSORS.keys()
    assert all(tree.keys() == TENSORS.keys() for tree in FORMATS["pt"].read(tmp_path / "f.pt").trees.values())
    if all(isinstance(value, torch.Tensor) for value in WRAPPED[wrapper].values()):
        save_file(WRAPPED[wrapper], tmp_path / "f.safetensors")
        assert read_weights(tmp_path / "f.safetensors").keys() == TENSORS.keys()


@pytest.mark.parametrize("name", ["f.pt", "f.safetensors"])
def test_bare_state_dict_is_read_bfloat16_as_float32(tmp_path, name):
    tensors = TENSORS | {"w": TENSORS["b.bias"].bfloat16()}
    (torch.save if name == "f.pt" else save_file)(tensors, tmp_path / name)
    for key, array in read_weights(tmp_path / name).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[key].float().numpy())


class Harmful:
    def __reduce__(self):
        return (print, ("code ran",))


def test_file_with_code_or_damage_or_of_an_unknown_kind_is_refused(tmp_path, capsys):
    torch.save({"model": Harmful()}, tmp_path / "f.pt")
    pytest.raises(CheckpointError, read_weights, tmp_path / "f.pt").match("print")
    assert "code ran" not in capsys.readouterr().out
    for name in ("cut.pt", "cut.safetensors", "weights.gguf"):
        (tmp_path / name).write_bytes(b"not a checkpoint")
        pytest.raises(CheckpointError, read_weights, tmp_path / name).match(name)
    pytest.raises(CheckpointError, read_weights, tmp_path).match("is a folder, but not a checkpoint")


def test_differing_tensors_are_named():
    wanted = {"a": (2, 2), **{f"layer.{number}": (1,) for number in range(9)}}
    found = {"a": (2, 3), **{f"net.{number}": (1,) for number in range(9)}}
    with pytest.raises(CheckpointError) as caught:  # names that are missing never hide those that are there
        check_names(wanted, found, "file")
    for part in ("layer.0 is missing", "net.0 is not in this model", "a is (2, 3), but (2, 2) in this model"):
        assert part in str(caught.value)


JIT = DiTConfig(
    input_size=16, num_classes=10, in_channels=3, patch_size=4, hidden_size=48, num_layers=3, num_heads=4,
    learn_sigma=False, qk_norm=True, rms_norm=True, swiglu=True, rope=True, bottleneck_dim=10, in_context_len=5,
    in_context_start=1,
)  # fmt: skip


def test_tables_of_lightningdit_are_left_out_and_others_are_refused(tmp_path):
    stored = read_torch_file(GOLDEN / "lightningdit_tiny.pt")["ema"]
    read = read_weights(GOLDEN / "lightningdit_tiny.pt")
    assert stored.keys() - read.keys() == {"feat_rope.freqs_cos", "feat_rope.freqs_sin"}
    summary = convert(GOLDEN / "lightningdit_tiny.pt", tmp_path / "bare.safetensors")
    assert summary.num_tensors == len(read) and summary.trees == ("model",)
    # A network that was trained further at another size may have positions that are no whole numbers.
    stored = read_torch_file(GOLDEN / "lightningdit_tiny.pt")["model"]
    halved = np.arccos(np.clip(stored["feat_rope.freqs_cos"], -1, 1)) / 2
    with pytest.raises(CheckpointError, match="is not the table of rotary positions of a square of patches"):
        plain({**stored, "feat_rope.freqs_cos": np.cos(halved)})


def test_jit_weights_lose_their_prefix_and_begin_other_sizes(tmp_path):
    stored = read_torch_file(GOLDEN / "jit_tiny.pt")
    for use_ema, key in ((True, "model_ema1"), (False, "model")):
        assert_same(read_weights(GOLDEN / "jit_tiny.pt", use_ema), {n[4:]: a for n, a in stored[key].items()})
    convert(GOLDEN / "jit_tiny.pt", tmp_path / "run", to="mindspore")
    assert read_weights(tmp_path / "run" / "iter_0000000", use_ema=False).keys() == parameters_of(JIT).shapes().keys()
    here = dataclasses.replace(JIT, num_classes=4, input_size=32, patch_size=8)
    source = read_source(GOLDEN / "jit_tiny.pt", here)
    found = {name: (value, how) for name, value, how in adapt_weights(source, here, [], 0)}
    assert list(found) == list(parameters_of(here).shapes())
    changed = {name for name, (_, how) in found.items() if how}
    assert changed == {"x_embedder.proj1.weight", "y_embedder.embedding_table.weight", "final_layer.linear.weight",
                       "final_layer.linear.bias"}  # fmt: skip
    assert found["in_context_posemb"][0].tobytes() == source.weights["in_context_posemb"].tobytes()


def test_projectors_of_repa_are_left_out(tmp_path):
    here = DiTConfig(8, num_classes=10, hidden_size=48, num_layers=3, num_heads=4, learn_sigma=False)
    stored, names = read_torch_file(GOLDEN / "repa_tiny.pt"), parameters_of(here).shapes().keys()
    for use_ema, key in ((True, "ema"), (False, "model")):
        assert_same(read_weights(GOLDEN / "repa_tiny.pt", use_ema), {name: stored[key][name] for name in names})
    summary = convert(GOLDEN / "repa_tiny.pt", tmp_path / "export.safetensors")
    assert "left out: 12 tensors of projectors (REPA), which no sample needs" in summary.notes
    assert read_safetensors_file(tmp_path / "export.safetensors")[0].keys() == names
    convert(GOLDEN / "repa_tiny.pt", tmp_path / "run", to="mindspore")  # to train on: nothing is left out
    convert(tmp_path / "run", tmp_path / "back", to="pytorch")
    state = FORMATS["pytorch"].read(tmp_path / "back" / "iter_0000000")
    assert_same(state.weights, stored["model"])
    source = read_source(GOLDEN / "repa_tiny.pt", here)
    assert all(not how for _, _, how in adapt_weights(source, here, [], 0)) and source.weights.keys() == names
    write_torch_file(tmp_path / "bare.pt", stored["ema"])
    assert read_weights(tmp_path / "bare.pt").keys() == names


@pytest.mark.parametrize("option", OPTIONS)
def test_option_that_diffusers_dit_lacks_is_refused(tmp_path, option):
    values = {"bottleneck_dim": 3, "in_context_len": 2, "text_dim": 8, "pooled_dim": 8}
    sizes = {"input_size": 4, "num_classes": 3, "in_channels": 4, "hidden_size": 16, "num_layers": 1, "num_heads": 2,
             "learn_sigma": option != "h_embedder", option: values.get(option, True)}  # fmt: skip
    write_torch_file(tmp_path / "source.pt", initial_weights(parameters_of(DiTConfig(**sizes)), 0))
    described = {
        "ae": {"model_id": "autoencoder_kl", "from_pretrained": "nowhere", "scaling_factor": 1.0, "latent_channels": 4,
               "downsample_factor": 8},
        "diffusion": {"model_id": "mean_flow" if option == "h_embedder" else "gaussian_diffusion"},
        "predictor": {"model_id": "dit", **sizes},
        **({"text_encoder": {"from_pretrained": "nowhere"}} if option in ("text_dim", "pooled_dim") else {}),
    }  # fmt: skip
    value = json.dumps(values.get(option, True))
    for to in ("diffusers", "pipeline"):
        with pytest.raises(ConfigError, match=f"predictor.{option} = {value}"):
            convert(tmp_path / "source.pt", tmp_path / "there", to=to, description=described)
