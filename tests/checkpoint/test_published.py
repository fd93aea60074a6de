"""Files of LightningDiT, JiT and REPA as their authors save them, and where such networks can and cannot go."""

import dataclasses
import json

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_weights
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

JIT = DiTConfig(
    input_size=16, num_classes=10, in_channels=3, patch_size=4, hidden_size=48, num_layers=3, num_heads=4,
    learn_sigma=False, qk_norm=True, rms_norm=True, swiglu=True, rope=True, bottleneck_dim=10, in_context_len=5,
    in_context_start=1,
)  # fmt: skip


def test_tables_of_lightningdit_are_left_out(tmp_path):
    stored = read_torch_file(GOLDEN / "lightningdit_tiny.pt")["ema"]
    read = read_weights(GOLDEN / "lightningdit_tiny.pt")
    assert stored.keys() - read.keys() == {"feat_rope.freqs_cos", "feat_rope.freqs_sin"}
    summary = convert(GOLDEN / "lightningdit_tiny.pt", tmp_path / "bare.safetensors")
    assert summary.num_tensors == len(read) and summary.trees == ("model",)


def test_tables_of_other_positions_are_refused():
    """A network that was trained further at another size may have positions that are no whole numbers."""
    stored = read_torch_file(GOLDEN / "lightningdit_tiny.pt")["model"]
    halved = np.arccos(np.clip(stored["feat_rope.freqs_cos"], -1, 1)) / 2
    with pytest.raises(CheckpointError, match="is not the table of rotary positions of a square of patches"):
        plain({**stored, "feat_rope.freqs_cos": np.cos(halved)})


def test_jit_weights_lose_their_prefix(tmp_path):
    stored = read_torch_file(GOLDEN / "jit_tiny.pt")
    for use_ema, key in ((True, "model_ema1"), (False, "model")):
        assert_same(read_weights(GOLDEN / "jit_tiny.pt", use_ema), {n[4:]: a for n, a in stored[key].items()})
    convert(GOLDEN / "jit_tiny.pt", tmp_path / "run", to="mindspore")
    assert read_weights(tmp_path / "run" / "iter_0000000", use_ema=False).keys() == parameters_of(JIT).shapes().keys()


def test_jit_of_other_classes_and_size_begins_with_the_weights():
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
