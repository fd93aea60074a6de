"""A pipeline for diffusers: plain DiTPipeline draws from it what is drawn here, and what it would not is refused."""

import shutil

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import FORMATS, format_of_source
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.data.order import Stream, normals
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.integrations.formats.convert import PIPELINE_CAVEAT, convert
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import timestep_frequencies
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.generate import generate, with_defaults
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.checkpoint_fixtures import needs_diffusers

CLASSES = ["tench, Tinca tinca", "goldfish \udce9"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model.json of 1000 classes with a small autoencoder."""
    vae = write_folder(tmp_path_factory.mktemp("vae"), SMALL | {"scaling_factor": 0.5}, our_shapes(SMALL))
    return {
        "ae": {"model_id": "autoencoder_kl", "from_pretrained": str(vae)},
        "diffusion": {"model_id": "gaussian_diffusion"},
        "predictor": {"model_id": "dit", "input_size": 8, "num_classes": 1000, "hidden_size": 32, "num_layers": 2,
                      "num_heads": 2},
    }  # fmt: skip


def weights_of(model):
    """Initial weights with all that begins at zero moved away from it, so far that the timestep matters."""
    drawn = initial_weights(parameters_of(model_config_from_mapping(model, "test").predictor), 3)
    draw = np.random.default_rng(0)
    far = {name: 0.3 if "adaLN" in name or "t_embedder" in name else 0.05 for name in drawn}
    moved = {name: array + draw.normal(0, far[name], array.shape).astype(np.float32) for name, array in drawn.items()}
    return moved | {"pos_embed": drawn["pos_embed"]}


def saved(folder, model, **facts):
    """Those weights in a file that knows its model.json."""
    path = folder / "source.safetensors"
    FORMATS["safetensors"].write(path, State({"model": weights_of(model)}, {"model": model, **facts}))
    return path


@pytest.fixture
def source(model, tmp_path):
    return saved(tmp_path, model, classes=CLASSES)


def test_layer_answers_alike_at_the_timesteps_of_its_chain():
    weight = np.random.default_rng(1).standard_normal((16, 256))
    visited, every = diffusers_folder.ddim_timesteps(1000), np.arange(1000)
    assert visited[:3].tolist() == [0, 20, 40] and len(visited) == 50
    weights = {diffusers_folder.LAYER: weight, diffusers_folder.TABLE: np.zeros((3, 2))}
    changes = diffusers_folder.Changes(tuple(visited.tolist()), 2)
    changed = diffusers_folder.convert_for_pipeline(weights, changes)[diffusers_folder.LAYER]
    ours, theirs = timestep_frequencies(256), diffusers_folder.diffusers_frequencies()
    wanted = diffusers_folder.sinusoids(every, ours) @ weight.T
    found, as_it_is = (diffusers_folder.sinusoids(every, theirs) @ own.T for own in (changed, weight))
    np.testing.assert_allclose(found[visited], wanted[visited], atol=1e-10)
    assert np.linalg.norm(found - wanted) < np.linalg.norm(as_it_is - wanted)
    back = np.linalg.solve(diffusers_folder.conversion_matrix(visited), changed.T).T
    np.testing.assert_allclose(back, weight, atol=1e-10)


def drawn(path, conditions, adapters=(), **asked):
    """The samples (B, H, W, C) of 8 bits that are drawn here."""
    described = describe(ModelRequest(path, lora=adapters))
    request = with_defaults(SampleRequest(**asked), described.config)
    return generate(load_model(described), described.config, SampleConditions(conditions), request).astype(int)


def drawn_here(source, labels, steps):
    return drawn(source, {"label": labels}, sampler="ddim", steps=steps, guidance=4.0, channels="all", seed=5)


def drawn_there(folder, labels, monkeypatch, **steps):
    """What DiTPipeline draws, the noise of its start being ours."""
    import diffusers
    import torch
    from diffusers.pipelines.dit import pipeline_dit

    def ours(shape, **_):
        return torch.tensor(normals(5, Stream.SAMPLE_START, np.arange(shape[0]), tuple(shape[1:])))

    monkeypatch.setattr(pipeline_dit, "randn_tensor", ours)
    pipeline = diffusers.DiTPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, (pipeline(labels, guidance_scale=4.0, output_type="np", **steps).images * 255).round().astype(int)


@needs_diffusers
@pytest.mark.pytorch
def test_diffusers_draws_from_it_what_is_drawn_here(source, tmp_path, framework, monkeypatch):
    summary = convert(source, tmp_path / "pipeline", "pipeline")
    assert PIPELINE_CAVEAT in summary.notes
    labels = [0, 1, 999]
    pipeline, there = drawn_there(tmp_path / "pipeline", labels, monkeypatch)  # 50 steps, its default
    assert pipeline.get_label_ids(["Tinca tinca", CLASSES[1]]) == [0, 1] and pipeline.labels["999"] == 999
    assert there.std() > 20  # of pictures that are not one grey
    assert np.abs(there - drawn_here(source, labels, 50)).max() <= 1  # of 255: rounding
    _, there = drawn_there(tmp_path / "pipeline", labels, monkeypatch, num_inference_steps=10)
    assert np.abs(there - drawn_here(source, labels, 10)).max() <= 1
    convert(source, tmp_path / "network", "diffusers")  # as it is, which diffusers' frequencies make another
    shutil.copytree(tmp_path / "network", tmp_path / "pipeline" / "transformer", dirs_exist_ok=True)
    _, there = drawn_there(tmp_path / "pipeline", labels, monkeypatch)
    assert np.abs(there - drawn_here(source, labels, 50)).max() > 20


@needs_diffusers
@pytest.mark.pytorch
@pytest.mark.parametrize(("diffusion", "num_classes"), [
    ({"noise_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}, 1000),
    ({"num_train_timesteps": 500, "prediction_type": "sample"}, 2),  # the null class fills the table
])  # fmt: skip
def test_pipeline_of_other_objectives_and_classes_draws_the_same(
    model, tmp_path, framework, monkeypatch, diffusion, num_classes
):
    predictor = model["predictor"] | {"num_classes": num_classes}
    model = model | {"diffusion": model["diffusion"] | diffusion, "predictor": predictor}
    path = saved(tmp_path, model, classes=CLASSES)
    convert(path, tmp_path / "pipeline", "pipeline")
    _, there = drawn_there(tmp_path / "pipeline", [1, 0], monkeypatch)
    assert np.abs(there - drawn_here(path, [1, 0], 50)).max() <= 1 and there.std() > 20
    convert(tmp_path / "pipeline", tmp_path / "back", "diffusers")  # with the rows and the config.json of its own
    back, table = FORMATS["diffusers"].read(tmp_path / "back"), "y_embedder.embedding_table.weight"
    np.testing.assert_array_equal(back.weights[table], weights_of(model)[table])
    assert back.config["num_embeds_ada_norm"] == num_classes


def test_it_is_read_back_to_rounding(source, model, tmp_path):
    convert(source, tmp_path / "pipeline", "pipeline")
    assert format_of_source(tmp_path / "pipeline") == "pipeline"
    for folder in (tmp_path / "pipeline", tmp_path / "pipeline" / "transformer"):
        back = FORMATS[format_of_source(folder)].read(folder).weights
        for name, array in weights_of(model).items():
            if name == diffusers_folder.LAYER:
                np.testing.assert_allclose(back[name], array, atol=1e-6)
            else:
                np.testing.assert_array_equal(back[name], array)


KL = {"model_id": "autoencoder_kl", "from_pretrained": "not read", "latent_channels": 3}


@pytest.mark.parametrize(("changes", "message"), [
    ({"predictor": {"num_classes": 1001}}, "class 1000"),
    ({"predictor": {"class_dropout_prob": 0.0}}, "unconditional class"),
    ({"diffusion": {"model_id": "flow_matching"}}, "'flow_matching'"),
    ({"ae": {"model_id": "pixel", "channels": 3}}, "ae.model_id = 'pixel'"),
    ({"ae": KL | {"shift_factor": 0.1}}, "ae.shift_factor = 0.1"),
    ({"ae": KL | {"latents_std": [1.0, 2.0, 1.0]}}, "ae.latents_mean and ae.latents_std"),
])  # fmt: skip
def test_model_that_diffusers_would_draw_otherwise_is_refused(model, tmp_path, changes, message):
    predictor = model["predictor"] | changes.get("predictor", {}) | ({"in_channels": 3} if "ae" in changes else {})
    model = model | changes | {"predictor": predictor}
    refused = pytest.raises(ConfigError, convert, saved(tmp_path, model), tmp_path / "pipeline", "pipeline")
    refused.match(message)
    assert not (tmp_path / "pipeline").exists()


def test_pipeline_needs_model_json_network_and_autoencoder(model, tmp_path):
    bare = tmp_path / "bare.safetensors"
    FORMATS["safetensors"].write(bare, State({"model": weights_of(model)}))
    convert(bare, tmp_path / "pipeline", "pipeline", description=model)
    gone = model | {"ae": model["ae"] | {"from_pretrained": str(tmp_path / "gone")}}
    for source, description, kind, words in (
        (bare, None, ConfigError, "--model"),
        (bare, gone, CheckpointError, r"ae\.from_pretrained"),
        (model["ae"]["from_pretrained"], None, ConfigError, "SOURCE.*autoencoder"),
    ):
        pytest.raises(kind, convert, source, tmp_path / "other", "pipeline", description=description).match(words)
    refused = pytest.raises(ConfigError, diffusers_folder.conversion_matrix, diffusers_folder.ddim_timesteps(100))
    refused.match("diffusion.num_train_timesteps is too small")
