"""An objective as another package brings it: noise of one strength, taken away in one step."""

from dataclasses import dataclass

import numpy as np

from mindspeed_mm_dit.data.order import Stream, normals, uniforms
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.registry import Objective, Sampler, option


@dataclass(frozen=True)
class DenoiseConfig:
    """Noise of one strength, taken away in one step."""

    strength: float = 0.5
    model_id: str = "denoise"
    saved_tensors = 4

    def check_output(self, in_channels: int, out_channels: int) -> None:
        if in_channels != out_channels:
            raise ConfigError("predictor.learn_sigma must be false: a denoiser has no variance.")


@dataclass(frozen=True)
class Passes:
    """Options of the sampler."""

    share: float = option(1.0, "part of the noise that a step takes away, below 1 a whole chain leaves some")


def build(config):
    from mindspeed_mm_dit.framework import nn, ops

    class Denoise(nn.Module):
        draw_names = ("times", "noise")

        def add_noise(self, x, times, noise):
            return x + config.strength * noise

        def loss(self, output, x, noised, times, noise):
            return ops.mean_per_sample((output - x) * (output - x))

    return Denoise()


def draws(config, seed, sample_indices, shape):
    times = uniforms(seed, Stream.TIMESTEP, sample_indices)
    return draws_at(config, times, normals(seed, Stream.NOISE, sample_indices, shape))


def draws_at(config, noise_levels, noise):
    return {"times": noise_levels.astype(np.float32), "noise": noise}


def trajectory(process, model_fn, start, noise_at, steps, options):
    from mindspeed_mm_dit.framework import ops

    for _ in range(steps):
        clean = model_fn(start, ops.tensor(np.ones(start.shape[0], np.float32)), 1.0)
        start = start + options.share * (clean - start)
        yield start


DENOISE = Objective(DenoiseConfig, build, draws, draws_at, {"once": Sampler(trajectory, Passes)}, "once")
