"""Fit a DiT to diffusers' timestep code, which differs from the published one, by changing the layer that takes it.

Both are cosines and sines of 128 angles, timestep times frequency. The published frequencies are 10000^(-i / 128),
those of diffusers 10000^(-i / 127) (``downscale_freq_shift``), so the first layer of the timestep embedder gets other
inputs there. For up to about 50 timesteps, a linear map turns diffusers' code into the published one. Here the layer is
changed by the smallest such map. At other timesteps it is about as wrong as the unchanged layer.
"""

from __future__ import annotations

import math

import numpy as np

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.positions import FREQUENCY_WIDTH, timestep_frequencies

LAYER = "t_embedder.mlp.0.weight"
"""Published name of the layer that takes the code, (D, 256)."""
STEPS = 50
"""Default of DiTPipeline; trajectories of 25, 10, 5, 2 and 1 steps visit some of the same timesteps."""
_SMALLEST = 1e-3
"""If the smallest singular value of the codes is below this, float32 cannot tell the timesteps apart."""


def visited(num_train_timesteps: int) -> np.ndarray:
    """Return the timesteps of a DDIM trajectory with diffusers' "leading" spacing, ascending, (STEPS,) int64."""
    return np.arange(STEPS) * (num_train_timesteps // STEPS)


def diffusers_frequencies() -> np.ndarray:
    """Return the frequencies of diffusers' DiT, (128,) float32, rounded as PyTorch rounds them."""
    half = FREQUENCY_WIDTH // 2
    exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half - 1)
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def code(timesteps: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Return the code of ``timesteps`` (N,), cosines and then sines of the angles: (N, 256) float64."""
    angles = np.outer(timesteps, frequencies.astype(np.float64))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def map_for(timesteps: np.ndarray) -> np.ndarray:
    """Return K (256, 256) float64: the weights W K^T give for diffusers' code what W gives for the published one.

    With diffusers' codes X and the published codes Y, X K = Y at ``timesteps`` (N,). Of all such maps, the one with the
    smallest K - 1 is K = 1 + X^+ (Y - X).

    Raises:
        ConfigError: the timesteps are too many, or too close to each other, for one map.
    """
    theirs = code(timesteps, diffusers_frequencies())
    if np.linalg.svd(theirs, compute_uv=False)[-1] < _SMALLEST:
        raise ConfigError(
            f"diffusion.num_train_timesteps = {timesteps[-1] + 1} or more",
            f"the {len(timesteps)} timesteps of a trajectory are too alike for diffusers' timestep code to serve them",
            "convert the network alone: --to diffusers",
        )
    ours = code(timesteps, timestep_frequencies(FREQUENCY_WIDTH))
    return np.eye(FREQUENCY_WIDTH) + np.linalg.pinv(theirs) @ (ours - theirs)


def for_diffusers(weight: np.ndarray, timesteps: np.ndarray) -> np.ndarray:
    """Return the layer (D, 256) that makes diffusers right at ``timesteps``, in the dtype of ``weight``."""
    return (weight.astype(np.float64) @ map_for(timesteps).T).astype(weight.dtype)


def from_diffusers(weight: np.ndarray, timesteps: np.ndarray) -> np.ndarray:
    """Undo :func:`for_diffusers`, up to rounding."""
    return np.linalg.solve(map_for(timesteps), weight.astype(np.float64).T).T.astype(weight.dtype)
