"""Draw images for labels, clips for captions. The noise of one depends on (seed, its number), not on the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

Arrays = Mapping[str, np.ndarray]
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

    def conditions(rows: np.ndarray) -> tuple[Arrays, Arrays]:
        return {"labels": labels[rows]}, config.predictor.condition.null(len(rows))

    return _generate(model, config, len(labels), conditions, settings, on_step, first_number).transpose(0, 2, 3, 1)


def generate_clips(
    model: Any,
    config: ModelConfig,
    captions: Sequence[str],
    settings: SampleSettings,
    on_step: Callable[[int], None] = lambda clips: None,
    negative: str = "",
) -> np.ndarray:
    """Draw one clip per caption, of the frames and the size that ``config`` has.

    Args:
        model: the composite, with its text encoder.
        negative: what guidance leads away from; empty is the null condition that a model is trained with.
        on_step: called after every sampling step with the number of clips it worked on.

    Returns:
        Clips, (N, F, H, W, 3 or 1) uint8.
    """
    without = _texts(model, [negative])["text"]

    def conditions(rows: np.ndarray) -> tuple[Arrays, Arrays]:
        given = _texts(model, [captions[row] for row in rows.tolist()])
        return given, {"text": np.repeat(without, len(rows), 0)}

    return _generate(model, config, len(captions), conditions, settings, on_step).transpose(0, 2, 3, 4, 1)


def _texts(model: Any, captions: Sequence[str]) -> Arrays:
    return {"text": ops.numpy(model.text_encoders[0].encode(captions).states)}  # (B, L, D)


def _generate(
    model: Any,
    config: ModelConfig,
    count: int,
    conditions: Callable[[np.ndarray], tuple[Arrays, Arrays]],
    settings: SampleSettings,
    on_step: Callable[[int], None],
    first_number: int = 0,
) -> np.ndarray:
    """Return samples (count, C, ...) uint8; ``conditions``: rows (B,) -> their conditions, and the null ones."""
    check_guidance(settings.guidance, config)
    with ops.no_grad():
        batches = [
            _generate_batch(model, config, *conditions(rows), first_number + rows, settings, on_step)
            for rows in batches_of(count, settings.batch_size)
        ]
    return np.concatenate(batches)


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
    classes = config.num_classes
    for label in labels.tolist():
        if not 0 <= label < classes:
            raise ConfigError(
                f"--classes: {label}", f"is outside 0 ... {classes - 1} (predictor.num_classes = {classes})"
            )


def _generate_batch(
    model: Any,
    config: ModelConfig,
    condition: Arrays,
    null: Arrays,
    numbers: np.ndarray,
    settings: SampleSettings,
    on_step: Callable[[int], None],
) -> np.ndarray:
    latents = None
    for state in states(model, config, condition, numbers, settings, null):
        latents = state
        on_step(len(numbers))
    images = decode(model.ae, latents, math.prod(config.sample_size))
    if not np.isfinite(images).all():
        raise ConvergenceError(
            f"samples with --cfg-scale {settings.guidance.scale:g}",
            "are not finite numbers",
            "use a smaller --cfg-scale, or --clip if the sampler has it; or the weights are of a run that diverged",
        )
    return to_pixels(images)


def decode(autoencoder: Any, latents: Any, pixels: int) -> np.ndarray:
    """Return the images or clips (N, C, ...) float32 of scaled latents (N, c, ...), some at a time.

    pixels: of one of them; decoders want memory.
    """
    some = max(1, DECODED_PIXELS // pixels)
    parts = [latents[start : start + some] for start in range(0, latents.shape[0], some)]
    return np.concatenate([ops.numpy(autoencoder.decode(part)) for part in parts])


def states(
    model: Any,
    config: ModelConfig,
    condition: Arrays,
    numbers: np.ndarray,
    settings: SampleSettings,
    null: Arrays | None = None,
) -> Iterator[Any]:
    """Walk down the chain for the samples ``numbers``, of which ``condition`` has a row each.

    null: what guidance leads away from; None asks the predictor's config. The last state is their scaled latents.
    """
    sampler = find_sampler(config.diffusion, settings.sampler)
    options = sampler_options(config.diffusion, settings.sampler, settings.options)
    names = config.predictor.condition.names
    without_any = config.predictor.condition.null(len(numbers)) if null is None else null
    given, without = ([ops.tensor(side[name]) for name in names] for side in (condition, without_any))

    def network(*inputs: Any) -> Any:
        with runtime.low_precision(settings.bf16):
            return model.predictor(*inputs)

    ask = guided_network(network, given, without, settings.guidance)
    shape = config.latent_shape
    start = ops.tensor(normals(settings.seed, Stream.SAMPLE_START, numbers, shape))

    def noise_at(step: int) -> Any:
        return ops.tensor(normals(settings.seed, Stream.SAMPLE_NOISE, numbers, shape, block=step))

    return sampler.chain(model.diffusion, ask, start, noise_at, settings.steps, options)
