"""A dry run lets nothing pass that the first step refuses."""

from __future__ import annotations

import dataclasses

import pytest

from mindspeed_mm_dit.configs.model import DIFFUSION_CONFIGS
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import OBJECTIVES, register_objective
from mindspeed_mm_dit.training.pytorch import rehearsal
from mindspeed_mm_dit.training.pytorch.rehearsal import rehearse
from tests.outside.objective import DENOISE, DenoiseConfig
from tests.parts import models, name_of


@pytest.fixture(params=["numbers", "shapes"])
def place(request, monkeypatch, framework):
    """Small steps are taken with numbers; here with shapes alone too."""
    if request.param == "shapes":
        monkeypatch.setattr(rehearsal, "SMALL_ELEMENTS", 0)


@pytest.mark.parametrize("config", models(), ids=lambda config: name_of(config.predictor, config.diffusion))
def test_every_predictor_with_every_objective_takes_its_first_step(place, config):
    rehearse(config, 4)


def build_for_images(config):
    """A process whose coefficients have the axes of images, whatever they multiply."""
    process = DENOISE.build(config)
    process.noised = lambda x, times, noise: x + times.reshape(-1, 1, 1, 1) * noise
    return process


def test_an_objective_that_ends_a_step_of_clips_is_named(place):
    register_objective("denoise", DENOISE._replace(build=build_for_images))
    try:
        clips = next(config for config in models() if len(config.latent_shape) == 4)
        config = dataclasses.replace(clips, diffusion=DenoiseConfig())
        with pytest.raises(ConfigError, match=r"'denoise': the first step, of 4 samples, ends with RuntimeError"):
            rehearse(config, 2)
    finally:
        del OBJECTIVES["denoise"], DIFFUSION_CONFIGS["denoise"]
