"""mm-dit sample with two experts, one for high noise and one for low."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import safetensors
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.models.on_paper import parameters_of
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import FRAMEWORK

pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="the text encoder runs on PyTorch")
HIGH, LOW, WHOLE = [0.6, 1.0], [0.0, 0.6], [0.0, 1.0]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    place = tmp_path_factory.mktemp("clips")
    clip_configs(place / "config", write_clips(place), "wan")
    return place, json.loads((place / "config/model.json").read_text())


def expert(clips, name, window, **predictor):
    """A file of random weights that remembers its model.json."""
    place, model = clips
    diffusion = {**model["diffusion"], "timestep_window": window}
    model = {**model, "diffusion": diffusion, "predictor": {**model["predictor"], **predictor}}
    shapes = parameters_of(model_config_from_mapping(model, name).predictor).shapes()
    draw = np.random.default_rng(len(name))
    weights = {n: draw.normal(0, 0.3, shape).astype(np.float32) for n, shape in shapes.items()}
    safetensors.write(place / f"{name}.safetensors", State({"model": weights}, {"model": model}))
    return str(place / f"{name}.safetensors")


def sampled(tmp_path, *flags):
    output = tmp_path / "clips.npz"
    asked = ("--prompt", "a seven moves left", "--num-per-prompt", "2", "--steps", "5", "--sampler", "unipc")
    assert main(["sample", *flags, *asked, "--output", str(output)]) == 0
    return np.load(output)["arr_0"]


def test_each_expert_answers_in_its_own_window_whatever_the_batches(clips, tmp_path):
    high, low = expert(clips, "high", HIGH), expert(clips, "low", LOW)
    both = ("--checkpoint", high, "--low-noise-checkpoint", low)
    found = sampled(tmp_path, *both)
    alone = [sampled(tmp_path, "--checkpoint", one) for one in (high, low)]
    assert all((found != one).mean() > 0.1 for one in alone)
    assert (sampled(tmp_path, *both, "--batch-size", "1") == found).mean() > 0.999
    assert (sampled(tmp_path, *both, "--boundary", "0") == alone[0]).all()
    assert (sampled(tmp_path, *both, "--boundary", "1") == alone[1]).all()
    guided = sampled(tmp_path, *both, "--boundary", "1", "--low-noise-cfg-scale", "1")
    assert (guided == sampled(tmp_path, "--checkpoint", low, "--cfg-scale", "1")).all()


@pytest.mark.parametrize(
    ("first", "second", "flags", "words"),
    [
        (("a", LOW), ("b", HIGH), (), "it is the expert of high noise\n    Cure: swap the two"),
        (("a", HIGH), ("b", HIGH), (), "is an expert of the same noise levels as --checkpoint, 0.6 to 1"),
        (("a", HIGH), ("b", [0.0, 0.5]), (), "--boundary: is needed"),
        (("a", WHOLE), ("b", WHOLE), (), "--boundary: is needed"),
        (("a", HIGH), ("b", LOW), ("--boundary", "2"), "--boundary = 2.0"),
        (("a", HIGH), ("b", LOW), ("--low-noise-cfg-scale", "-1"), "--low-noise-cfg-scale = -1"),
        (("a", HIGH), None, ("--boundary", "0.5"), "--boundary = 0.5: is for two experts"),
    ],
)
def test_experts_that_do_not_belong_together_are_named_before_weights_are_read(
    clips, capsys, first, second, flags, words
):
    both = (
        "--checkpoint",
        expert(clips, *first),
        *(("--low-noise-checkpoint", expert(clips, *second)) if second else ()),
    )
    assert main(["sample", *both, *flags, "--prompt", "a", "--output", "unused.npz"]) == 2
    assert words in capsys.readouterr().err


def test_experts_of_different_configs_are_refused(clips, capsys):
    both = (
        "--checkpoint",
        expert(clips, "high", HIGH),
        "--low-noise-checkpoint",
        expert(clips, "other", LOW, ffn_dim=25),
    )
    assert main(["sample", *both, "--prompt", "a", "--output", "unused.npz"]) == 2
    assert "is of another model than --checkpoint: predictor.ffn_dim is 25, and there 24" in capsys.readouterr().err
