"""An objective from outside the package: named in a model.json, trained and sampled with no change anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mindspeed_mm_dit.configs.model import DIFFUSION_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.data.draws import Stream, generator, normals
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.contract import NoOptions, Objective, Sampler
from mindspeed_mm_dit.objectives.registry import OBJECTIVES, draw_of, register_objective


@dataclass(frozen=True)
class DenoiseConfig:
    """Noise of one strength, taken away in one step."""

    strength: float = 0.5
    model_id: str = "denoise"
    kept_tensors = 4

    def check_output(self, in_channels: int, out_channels: int) -> None:
        if in_channels != out_channels:
            raise ConfigError("predictor.learn_sigma", "a denoiser has no variance")


def build(config):
    from mindspeed_mm_dit.framework import nn, ops

    class Denoise(nn.Module):
        draw_names = ("times", "noise")

        def noised(self, x, times, noise):
            return x + config.strength * noise

        def loss(self, output, x, noised, times, noise):
            return ops.mean_per_sample((output - x) * (output - x))

    return Denoise()


def draws(config, seed, positions, shape):
    return draws_at(
        config,
        np.array([generator(seed, Stream.TIMESTEP, p).random() for p in positions.tolist()]),
        normals(seed, Stream.NOISE, positions, shape),
    )


def draws_at(config, shares, noise):
    return {"times": shares.astype(np.float32), "noise": noise}


def chain(process, ask, start, noise_at, steps, options):
    from mindspeed_mm_dit.framework import ops

    for _ in range(steps):
        start = ask(start, ops.tensor(np.ones(start.shape[0], np.float32)), 1.0)
        yield start


DENOISE = Objective(DenoiseConfig, build, draws, draws_at, {"once": Sampler(chain, NoOptions)}, "once")


@pytest.fixture
def config(model_json):
    register_objective("denoise", DENOISE)
    yield model_config_from_mapping(model_json | {"diffusion": {"model_id": "denoise", "strength": 0.25}}, "model.json")
    del OBJECTIVES["denoise"], DIFFUSION_CONFIGS["denoise"]


def test_it_is_trained_and_sampled(framework, config):
    from mindspeed_mm_dit.framework import optim, runtime
    from mindspeed_mm_dit.models.composite import DiTModel
    from mindspeed_mm_dit.sampling.generate import SampleSettings, generate

    model = DiTModel(config)
    runtime.load_arrays(model.predictor, model.initial_weights(0))
    batch = draw_of(config.diffusion)(0, np.arange(4), config.latent_shape)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), np.uint8)
    given = runtime.to_device({"labels": np.arange(4), "pixels": pixels, **batch})

    def losses():
        return model(**given)

    first, _ = optim.gradients(model.predictor, losses)
    for _ in range(5):
        optim.adamw_step(model.predictor, losses, 1e-3)
    last, _ = optim.gradients(model.predictor, losses)
    assert last.mean() < 0.9 * first.mean()
    images = generate(model, config, np.array([1, 2]), SampleSettings("once", 1))
    assert images.shape == (2, 8, 8, 1)


def test_what_it_has_is_checked_by_its_own_words(config, model_json):
    with pytest.raises(ConfigError, match="a denoiser has no variance"):
        predictor = {**model_json["predictor"], "learn_sigma": True}
        model_config_from_mapping(
            model_json | {"diffusion": {"model_id": "denoise"}, "predictor": predictor}, "model.json"
        )
    with pytest.raises(ConfigError, match="is registered already"):
        register_objective("denoise", DENOISE._replace(quick_sampler="other"))


def test_it_is_planned(config):
    from mindspeed_mm_dit.planning.memory import Layout, memory

    assert memory(config, Layout()).activations_per_image > 0
