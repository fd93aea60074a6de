"""A dry run lets nothing pass that the first step refuses."""

import dataclasses

import pytest

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import OBJECTIVES, register_objective
from tests.conftest import FRAMEWORK
from tests.external.objective import DENOISE, DenoiseConfig
from tests.parts import models, name_of


@pytest.fixture(params=[pytest.param("as it is", marks=pytest.mark.extended), "too large"])
def rehearse(request, monkeypatch, framework):
    """Small steps are taken as they are; here as large ones are too: on shapes alone, on MindSpore narrowed."""
    from mindspeed_mm_dit.training import dry_run

    if request.param == "too large":
        monkeypatch.setattr(dry_run, "SMALL_ELEMENTS", 0)
    return dry_run.rehearse


def tried():
    """Return every model; `make test` and MindSpore take one of each pair of a predictor and an objective."""
    pairs = {(config.predictor.model_id, config.diffusion.model_id): config for config in models()}
    if FRAMEWORK == "mindspore":  # a derivative along the network's inputs is PyTorch's alone
        return [config for pair, config in pairs.items() if pair[1] != "mean_flow"]
    first = list(pairs.values())
    return [pytest.param(each, marks=[] if each in first else pytest.mark.extended) for each in models()]


@pytest.mark.parametrize("config", tried(), ids=lambda config: name_of(config.predictor, config.diffusion))
def test_every_predictor_with_every_objective_takes_its_first_step(rehearse, config):
    rehearse(config, 4)


def build_for_images(config):
    """A process whose coefficients have the axes of images, whatever they multiply."""
    process = DENOISE.build(config)
    process.add_noise = lambda x, times, noise: x + times.reshape(-1, 1, 1, 1) * noise
    return process


def test_an_objective_that_ends_a_step_of_clips_is_named(rehearse):
    register_objective("denoise", DENOISE._replace(build=build_for_images))
    try:
        clips = next(config for config in models() if len(config.latent_shape) == 4)
        config = dataclasses.replace(clips, diffusion=DenoiseConfig())
        with pytest.raises(ConfigError, match=r"'denoise' of model.json.*the first step"):
            rehearse(config, 2)
    finally:
        del OBJECTIVES["denoise"]
