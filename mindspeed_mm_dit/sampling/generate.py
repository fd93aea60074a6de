"""Draw images for labels. The noise of an image depends on (seed, its number) alone, not on the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.limits import LARGEST
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.draws import Stream, normals
from mindspeed_mm_dit.errors import ConfigError, ConvergenceError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.models.pixels import to_pixels
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network
from mindspeed_mm_dit.objectives.registry import find_sampler, sampler_options

DECODED_PIXELS = 8 * 512**2
"""Pixels decoded at a time; the autoencoder of Stable Diffusion takes some 6 GiB for them in float32."""


@dataclass(frozen=True)
class SampleSettings:
    """How images are drawn."""

    sampler: str = "ddpm"
    """A sampler of the model's objective."""
    steps: int = 250
    """Steps of the chain."""
    guidance: Guidance = field(default_factory=Guidance)
    """Classifier-free guidance."""
    seed: int = 0
    """Decides all noise."""
    batch_size: int = 64
    """Images drawn together; changes memory and speed, not the images (up to rounding)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else the sampler can be told, by name."""
    bf16: bool = False
    """Run the network's matrix products in bfloat16; the chain itself stays in float32."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= LARGEST:
            raise ConfigError(f"--seed = {self.seed}", "must lie between 0 and 2**63 - 1")


def generate(
    model: Any,
    config: ModelConfig,
    labels: np.ndarray,
    settings: SampleSettings,
    on_step: Callable[[int], None] = lambda images: None,
    first_number: int = 0,
) -> np.ndarray:
    """Draw one image per label.

    Args:
        model: the composite (ae, diffusion, predictor).
        labels: (N,) int64 in [0, num_classes).
        on_step: called after every sampling step with the number of images it worked on.
        first_number: of the first image; an image's noise depends on its number.

    Returns:
        Images, (N, H, W, 3 or 1) uint8.
    """
    check_labels(labels, config)
    check_guidance(settings.guidance, config)
    batches = [(labels[own], first_number + own) for own in batches_of(len(labels), settings.batch_size)]
    with ops.no_grad():
        return np.concatenate([_generate_batch(model, config, y, n, settings, on_step) for y, n in batches])


def batches_of(count: int, batch_size: int) -> list[np.ndarray]:
    """Return the images 0 ... count - 1 in batches of about the same size, none of them larger than ``batch_size``."""
    return np.array_split(np.arange(count), max(1, -(-count // batch_size)))


def check_guidance(guidance: Guidance, config: ModelConfig) -> None:
    """Raise ConfigError for guidance of a model that knows no null class."""
    if guidance.scale != 1.0 and not config.predictor.condition.has_null:
        raise ConfigError(
            f"--cfg-scale = {guidance.scale}",
            "this model was trained without dropped labels: it has no null class",
            "use --cfg-scale 1",
        )


def check_labels(labels: np.ndarray, config: ModelConfig) -> None:
    """Raise ConfigError for a label that is no class of the model."""
    classes = config.predictor.num_classes
    for label in labels.tolist():
        if not 0 <= label < classes:
            raise ConfigError(
                f"--classes: {label}", f"is outside 0 ... {classes - 1} (predictor.num_classes = {classes})"
            )


def _generate_batch(
    model: Any,
    config: ModelConfig,
    labels: np.ndarray,
    numbers: np.ndarray,
    settings: SampleSettings,
    on_step: Callable[[int], None],
) -> np.ndarray:
    latents = None
    for state in states(model, config, {"labels": labels}, numbers, settings):
        latents = state
        on_step(len(numbers))
    images = decode(model.ae, latents, config.image_size)
    if not np.isfinite(images).all():
        raise ConvergenceError(
            f"samples with --cfg-scale {settings.guidance.scale:g}",
            "are not finite numbers",
            "use a smaller --cfg-scale, or --clip (Gaussian only); or the weights are those of a run that diverged",
        )
    return to_pixels(images).transpose(0, 2, 3, 1)


def decode(autoencoder: Any, latents: Any, image_size: int) -> np.ndarray:
    """Return the images (N, C, H, W) float32 of scaled latents (N, c, h, w), some at a time: decoders want memory."""
    some = max(1, DECODED_PIXELS // image_size**2)
    parts = [latents[start : start + some] for start in range(0, latents.shape[0], some)]
    return np.concatenate([ops.numpy(autoencoder.decode(part)) for part in parts])


def states(
    model: Any, config: ModelConfig, condition: Mapping[str, np.ndarray], numbers: np.ndarray, settings: SampleSettings
) -> Iterator[Any]:
    """Walk down the chain for the samples ``numbers``, of which ``condition`` has a row each.

    The last state is their scaled latents.
    """
    sampler = find_sampler(config.diffusion, settings.sampler)
    options = sampler_options(config.diffusion, settings.sampler, settings.options)
    null = config.predictor.condition.null(len(numbers))
    given, without = ([ops.tensor(side[name]) for name in null] for side in (condition, null))

    def network(*inputs: Any) -> Any:
        with runtime.low_precision(settings.bf16):
            return model.predictor(*inputs)

    ask = guided_network(network, given, without, settings.guidance)
    shape = config.latent_shape
    start = ops.tensor(normals(settings.seed, Stream.SAMPLE_START, numbers, shape))

    def noise_at(step: int) -> Any:
        return ops.tensor(normals(settings.seed, Stream.SAMPLE_NOISE, numbers, shape, block=step))

    return sampler.chain(model.diffusion, ask, start, noise_at, settings.steps, options)
