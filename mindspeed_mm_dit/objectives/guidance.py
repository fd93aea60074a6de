"""Guidance of sampling, away from the unconditional prediction or a weaker network's; and REPA's alignment loss.

REPA (Yu et al. 2024) aligns projected tokens with the features of teachers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from mindspeed_mm_dit.configs.limits import BYTES, MAX_GUIDANCE, number, shorten_repr
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.registry import ModelFn

Tensor = Any
Network = Callable[..., Tensor]
"""(x_t (B, C, ...), time (B,), *condition, each (B, ...)) -> output (B, C or 2C, ...)."""

GuidedChannels = Literal["3", "all"]
Rescale = Literal["token", "sample"]


@dataclass(frozen=True)
class Guidance:
    """Strength, channels and interval of guidance.

    Raises ConfigError if the scale is negative, very large or not a number, or the interval is empty.
    """

    scale: float = 1.0
    """1: no guidance. The guided prediction is without + scale * (with - without the condition). With autoguidance it
    is weaker + scale * (network - weaker), both with the condition."""
    channels: GuidedChannels = "all"
    """Channels of the prediction that are guided: the first "3" as in the published DiT, or "all"."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Noise levels that are guided, from ``low`` to ``high`` (Kynkaanniemi et al. 2024): t / T for a Gaussian process,
    1 - t for a flow."""
    rescale: Rescale | None = None
    """Give the guided prediction of an image the norm of the one with the condition: at each patch of 2 x 2 latent
    pixels ("token", Qwen-Image), or of the whole "sample" where it is longer (Z-Image). None: leave it as it is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", number("--cfg-scale", self.scale, 0.0, MAX_GUIDANCE))
        if not isinstance(self.channels, str) or self.channels not in get_args(GuidedChannels):
            raise ConfigError(f"--cfg-channels = {shorten_repr(self.channels)} must be '3' or 'all'.")
        if self.rescale is not None and self.rescale not in get_args(Rescale):
            raise ConfigError(f"--cfg-rescale = {shorten_repr(self.rescale)} must be 'token' or 'sample'.")
        try:
            low, high = (
                number("--cfg-interval", end, 0.0, 1.0) for end in self.interval if not isinstance(self.interval, BYTES)
            )
        except (TypeError, ValueError, ConfigError):
            low, high = 1.0, 0.0
        if low > high:
            raise ConfigError(
                f"--cfg-interval = {shorten_repr(self.interval)} must be two numbers with 0 <= low <= high <= 1."
            )
        object.__setattr__(self, "interval", (low, high))

    def applies_at(self, noise: float) -> bool:
        """Return whether the prediction is guided at the noise level ``noise``, from 0 (data) to 1."""
        low, high = self.interval
        return self.scale != 1.0 and low <= noise <= high

    def combine(self, labelled: Tensor, unlabelled: Tensor, prediction_channels: int) -> Tensor:
        """Guide the first ``channels`` of ``labelled`` (B, C or 2C, H, W); the other channels stay as they are.

        unlabelled: the prediction to push away from, of the same shape.
        prediction_channels: C, the number of channels that are prediction and not variance.
        """
        guided = prediction_channels if self.channels == "all" else min(3, prediction_channels)
        with_label, without = labelled[:, :guided], unlabelled[:, :guided]
        pushed = without + self.scale * (with_label - without)
        if self.rescale is not None:
            pushed = _rescaled(pushed, with_label, self.rescale)
        return ops.cat([pushed, labelled[:, guided:]], 1)


def _rescaled(x: Tensor, like: Tensor, by: Rescale) -> Tensor:
    """Return ``x`` (B, C, H, W) with the norm of ``like``, by patch of 2 x 2, or by sample where that is smaller."""
    if by == "sample":
        factor = ops.clamp((ops.mean_per_sample(like * like) / ops.mean_per_sample(x * x)) ** 0.5, None, 1.0)  # (B,)
        return x * factor[:, None, None, None]
    (B, C, H, W), patched = x.shape, (x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3] // 2, 2)

    def squares(x: Tensor) -> Tensor:
        x = ops.permute(ops.reshape(x * x, patched), (0, 2, 4, 1, 3, 5))  # (B, h, w, C, 2, 2)
        x = ops.mean_per_sample(ops.reshape(x, (B * (H // 2) * (W // 2), 4 * C)))
        return ops.reshape(x, (B, 1, H // 2, 1, W // 2, 1))

    factor = (squares(like) / squares(x)) ** 0.5
    return ops.reshape(ops.reshape(x, patched) * factor, (B, C, H, W))


def guided_network(
    network: Network,
    condition: Sequence[Tensor],
    unconditional: Sequence[Tensor],
    guidance: Guidance,
    weaker: Network | None = None,
) -> ModelFn:
    """Return model_fn(x_t, t, noise): the guided output for ``condition``; one network runs both halves in one batch.

    condition, unconditional: tensors (B, ...) as the network takes them. ``noise`` is the noise level of x_t: a number,
    or an array (B,) if the samples' times differ. weaker: a network to call with the condition, instead of using
    ``unconditional``.
    """
    both = [ops.cat([conditional, negative], 0) for conditional, negative in zip(condition, unconditional)]

    def both_outputs(x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if weaker is not None:
            return ops.to_float32(network(x_t, t, *condition)), ops.to_float32(weaker(x_t, t, *condition))
        output = ops.to_float32(network(ops.cat([x_t, x_t], 0), ops.cat([t, t], 0), *both))
        labelled, unlabelled = ops.chunk(output, 2, 0)
        return labelled, unlabelled

    def model_fn(x_t: Tensor, t: Tensor, noise: float | np.ndarray) -> Tensor:
        guided = np.array([guidance.applies_at(level) for level in np.atleast_1d(noise).tolist()])
        if not guided.any():
            return ops.to_float32(network(x_t, t, *condition))
        labelled, unlabelled = both_outputs(x_t, t)
        combined = guidance.combine(labelled, unlabelled, x_t.shape[1])
        if guided.all():
            return combined
        return ops.where(ops.tensor(guided.reshape(-1, *(1 for _ in x_t.shape[1:]))), combined, labelled)

    return model_fn


def switch_experts(boundary: float, high: ModelFn, low: ModelFn) -> ModelFn:
    """Return the ``ModelFn`` of two experts: ``high`` at noise levels from ``boundary`` on, ``low`` below it."""

    def model_fn(x_t: Tensor, t: Tensor, noise: float | np.ndarray) -> Tensor:
        return (high if np.min(noise) >= boundary else low)(x_t, t, noise)

    return model_fn


def projection_loss(projected: Sequence[Tensor], features: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the negative weighted cosine similarity, mean over tokens and teachers, (B,) (Yu et al. 2024, eq. 8).

    projected, features: one (B, N, width) float32 per teacher; weights: one per teacher's cosine.
    """
    assert len(projected) == len(features) == len(weights) > 0
    total = sum(
        weight * ops.mean_per_sample(ops.cosine_similarity(ours, theirs, -1))
        for ours, theirs, weight in zip(projected, features, weights)
    )
    return -total / len(projected)
