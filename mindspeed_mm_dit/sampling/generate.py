"""Generate images or videos. The noise of a sample depends on (seed, sample number), not on the batch size."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.configs.limits import MOST_GUIDANCE, number, short_repr, switch, whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.conditions import encoded, request_arrays, unconditional_arrays
from mindspeed_mm_dit.data.order import Stream, normals
from mindspeed_mm_dit.errors import ConfigError, ConvergenceError, DataError, flag_of
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.models.autoencoder import to_pixels
from mindspeed_mm_dit.models.frames import insert_frames
from mindspeed_mm_dit.objectives.guidance import Guidance, GuidedChannels, Rescale, by_noise_level, guided_network
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of, sampler_options
from mindspeed_mm_dit.sampling.load import ONE_NETWORK, Experts
from mindspeed_mm_dit.sampling.request import SampleRequest, check_request
from mindspeed_mm_dit.terminal import progress

Arrays = Mapping[str, np.ndarray]
DECODED_PIXELS = 8 * 512**2
"""Pixels decoded at a time; the autoencoder of Stable Diffusion needs some 6 GiB for them in float32."""


@dataclass(frozen=True)
class SampleSettings:
    """How samples are generated."""

    sampler: str = "ddpm"
    """A sampler of the model's objective."""
    steps: int = 250
    """Sampling steps."""
    guidance: Guidance = field(default_factory=Guidance)
    """Classifier-free guidance."""
    seed: int = 0
    """Seed of all noise."""
    batch_size: int = 64
    """Samples generated together; changes memory and speed, not the samples (up to rounding)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the sampler, by name."""
    bf16: bool = False
    """Run the network's matrix products in bfloat16; the sampling loop itself stays in float32."""
    weaker: Callable[[], Any] | None = None
    """Loads the network that guidance leads away from, once (``load.weaker_network``); None: unconditional guidance."""
    experts: Experts | None = None
    """The low-noise expert (``load.experts``); the model is then the high-noise expert."""
    low_scale: float | None = None
    """Guidance of the low-noise expert; None: that of the other."""

    @property
    def words(self) -> str:
        """The settings that determine the samples, as a caption."""
        return f"{self.sampler}, {self.steps} steps, guidance {self.guidance.scale:g}, seed {self.seed}"

    @property
    def low_noise_scale(self) -> float:
        """Guidance of the low-noise expert, if there is one."""
        return self.guidance.scale if self.low_scale is None else self.low_scale

    def __post_init__(self) -> None:
        for name, low in (("seed", 0), ("steps", 1), ("batch_size", 1)):
            value = whole_number(flag_of(name), getattr(self, name), low)
            object.__setattr__(self, name, value)
        switch("--bf16", self.bf16)
        if self.low_scale is not None:
            if self.experts is None:
                raise ConfigError(f"--low-noise-cfg-scale = {short_repr(self.low_scale)}", *ONE_NETWORK)
            number("--low-noise-cfg-scale", self.low_scale, 0.0, MOST_GUIDANCE)
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options = {short_repr(self.options)}", "must be a mapping", 'write {"eta": 0.5}')
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in self.options.items()}
        object.__setattr__(self, "options", plain)


def settings_for(
    config: ModelConfig,
    *,
    sampler: str | None = None,
    steps: int | None = None,
    scale: float | None = None,
    usual_scale: float = 4.0,
    channels: GuidedChannels | None = None,
    interval: tuple[float, float] = (0.0, 1.0),
    rescale: Rescale | None = None,
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> SampleSettings:
    """Return the settings to sample a model of ``config``; None means the model's default.

    usual_scale: default of ``scale`` for networks without embedded guidance. others: fields of SampleSettings.

    Raises:
        ConfigError: there is no such sampler, it does not take these steps or options, or the guidance is impossible.
        PlatformError: the framework does not support ``bf16`` here.
    """
    labelled = config.predictor.conditions.items == ("label",)
    default: GuidedChannels = "3" if labelled and others.get("weaker") is None else "all"
    scale = config.predictor.cfg_scale(usual_scale) if scale is None else scale
    first_sampler = next(iter(objective_of(config.diffusion).samplers))
    default_sampler, default_steps = config.predictor.published_sampler or (
        first_sampler,
        50 if len(config.sample_size) == 3 else 250,
    )
    guidance = Guidance(scale, default if channels is None else channels, interval, rescale)
    if rescale is not None and len(config.latent_shape) != 3:
        raise ConfigError(f"--cfg-rescale = {rescale}", "is for images, and this model makes videos", "drop the flag")
    if channels == "3" and config.predictor.latent_channels < 3:
        reason = f"the latents of this model have {config.predictor.latent_channels}"
        raise ConfigError("--cfg-channels = 3", reason, "use all, or drop the flag")
    settings = SampleSettings(
        sampler=default_sampler if sampler is None else sampler,
        steps=default_steps if steps is None else steps,
        guidance=guidance,
        options={} if options is None else options,
        **others,
    )
    runtime.low_precision(settings.bf16)  # raises if bfloat16 is not supported here
    options = sampler_options(config.diffusion, settings.sampler, settings.options)
    find_sampler(config.diffusion, settings.sampler).check(config.diffusion, settings.steps, options)
    check_guidance(settings, config)
    return settings


def generate(
    model: Any,
    config: ModelConfig,
    request: SampleRequest,
    settings: SampleSettings,
    on_step: Callable[[int], object] = lambda samples: None,
) -> np.ndarray:
    """Generate the requested samples.

    Args:
        model: the composite (ae, text_encoders, diffusion, predictor).
        on_step: called after every sampling step with the number of samples it worked on.

    Returns:
        Images (N, H, W, 3 or 1) or videos (N, F, H, W, 3 or 1), uint8, of the size in ``config``.
    """
    return generate_path(model, config, request, settings, 1, on_step)[:, -1]


def generate_path(
    model: Any,
    config: ModelConfig,
    request: SampleRequest,
    settings: SampleSettings,
    points: int,
    on_step: Callable[[int], object] = lambda samples: None,
) -> np.ndarray:
    """Generate the requested samples, with ``points`` states of the trajectory from noise.

    Returns what ``generate`` does with one more axis, (N, points, ...); the last states are the samples.
    """
    check_request(request, config)
    check_guidance(settings, config)
    with ops.no_grad():
        guided = config.predictor.conditions.guided
        unconditional = _encode_conditions(
            model, guided, unconditional_arrays(guided, request.instead, _tokenizers(model))
        )
        batches = [
            _generate_batch(model, config, request.at(rows), unconditional, settings, points, on_step)
            for rows in batches_of(len(request), settings.batch_size)
        ]
    return np.moveaxis(np.concatenate(batches), 2, -1)


def _tokenizers(model: Any) -> list[Any]:
    return [encoder.tokenizer for encoder in model.text_encoders]


def _encode_conditions(model: Any, conditions: Conditions, arrays: Arrays) -> Arrays:
    """Return the conditions (B, ...) as the network takes them, by name."""
    tensors = {name: ops.tensor(array) for name, array in arrays.items()}
    values = encoded(conditions, tensors, model)
    return {name: ops.numpy(tensor) for name, tensor in zip(conditions.names, values)}


def batches_of(count: int, batch_size: int) -> list[np.ndarray]:
    """Return the numbers 0 ... count - 1 in batches of about the same size, none larger than ``batch_size``."""
    return np.array_split(np.arange(count), max(1, -(-count // batch_size)))


def check_guidance(settings: SampleSettings, config: ModelConfig) -> None:
    """Raise ConfigError for guidance if the model has no unconditional input and there is no weaker network."""
    guidance = settings.guidance
    if (
        {guidance.scale, settings.low_noise_scale} != {1.0}
        and settings.weaker is None
        and not config.predictor.conditions.has_unconditional
    ):
        raise ConfigError(
            f"--cfg-scale = {guidance.scale}",
            "this model was trained without dropped labels: it has no null class",
            "use --cfg-scale 1",
        )


def _generate_batch(
    model: Any,
    config: ModelConfig,
    request: SampleRequest,
    unconditional: Arrays,
    settings: SampleSettings,
    points: int,
    on_step: Callable[[int], object],
) -> np.ndarray:
    """Return ``points`` states of the trajectory, the last of which are the samples, (B, points, C, ...) uint8."""
    numbers = request.first_number + np.arange(len(request))
    conditions = config.predictor.conditions
    condition = _encode_conditions(model, conditions, request_arrays(conditions, request.values, _tokenizers(model)))
    unconditional_rows = {name: np.repeat(row, len(request), 0) for name, row in unconditional.items()}
    trajectory: list[Any] = []
    for state in states(model, config, condition, numbers, settings, unconditional_rows):
        trajectory = [*trajectory, state] if points > 1 else [state]
        on_step(len(request))
    chosen = np.linspace(0, len(trajectory) - 1, points).round().astype(int)
    images = np.stack([decode(model.ae, trajectory[index], math.prod(config.sample_size)) for index in chosen], 1)
    if not np.isfinite(images).all():
        raise ConvergenceError(
            f"samples with --cfg-scale {settings.guidance.scale:g}",
            "are not finite numbers",
            "use a smaller --cfg-scale, or --clip if the sampler has it; the weights may be of a run that diverged",
        )
    return to_pixels(images)


def decode(autoencoder: Any, latents: Any, pixels: int) -> np.ndarray:
    """Return the images or videos (N, C, ...) float32 of scaled latents (N, c, ...), decoded in batches.

    pixels: number of pixels of one image or video, to which the decoder's memory is proportional.
    """
    batch_size = max(1, DECODED_PIXELS // pixels)
    parts = [latents[start : start + batch_size] for start in range(0, latents.shape[0], batch_size)]
    return np.concatenate([ops.numpy(autoencoder.decode(part)) for part in parts])


def states(
    model: Any,
    config: ModelConfig,
    condition: Arrays,
    numbers: np.ndarray,
    settings: SampleSettings,
    unconditional: Arrays | None = None,
) -> Iterator[Any]:
    """Yield the states of the trajectory for the samples ``numbers``; ``condition`` has a row for each.

    unconditional: what guidance leads away from; None: the predictor's default. The last state is the scaled latents.
    """
    sampler = find_sampler(config.diffusion, settings.sampler)
    options = sampler_options(config.diffusion, settings.sampler, settings.options)
    names = config.predictor.conditions.names
    unconditional_arrays = (
        config.predictor.conditions.unconditional(len(numbers)) if unconditional is None else unconditional
    )
    conditional, negative = (
        [ops.tensor(side[name]) for name in names] for side in (condition, {**condition, **unconditional_arrays})
    )

    def precise(network: Any) -> Any:
        def forward(*inputs: Any) -> Any:
            with runtime.low_precision(settings.bf16):
                return network(*inputs)

        return forward

    weaker = precise(settings.weaker()) if settings.weaker else None
    if settings.experts is None:
        model_fn = guided_network(precise(model.predictor), conditional, negative, settings.guidance, weaker)
    else:
        networks = map(precise, settings.experts.networks(model.predictor))
        guidances = settings.guidance, replace(settings.guidance, scale=settings.low_noise_scale)
        model_fns = (
            guided_network(expert, conditional, negative, guidance) for expert, guidance in zip(networks, guidances)
        )
        model_fn = by_noise_level(settings.experts.boundary, *model_fns)
    shape = config.latent_shape
    start = ops.tensor(normals(settings.seed, Stream.SAMPLE_START, numbers, shape))

    def noise_at(step: int) -> Any:
        return ops.tensor(normals(settings.seed, Stream.SAMPLE_NOISE, numbers, shape, block=step))

    trajectory = sampler.trajectory(model.diffusion, model_fn, start, noise_at, settings.steps, options)
    frames = config.predictor.conditions.frames
    if frames is None or frames.mask_channels > 1:
        return trajectory
    return (insert_frames(state, conditional[names.index("frames")]) for state in trajectory)


def rank_batches(count: int, batch_size: int) -> list[np.ndarray]:
    """Return the sample numbers that this rank generates, batch by batch."""
    return batches_of(count, batch_size)[runtime.rank() :: runtime.world_size()]


def generate_spread(
    folder: Path, model: tuple[Any, ModelConfig], request: SampleRequest, settings: SampleSettings
) -> np.ndarray | None:
    """Generate samples on all ranks; return them on the first, as ``generate`` does, and None on others.

    folder: a new one, on a disk that all ranks share; it is removed afterwards. Every rank must call this. A bar
    shows the progress of the first rank of a machine.

    Raises:
        DataError: a part from another rank is missing.
    """
    batches = rank_batches(len(request), settings.batch_size)
    steps = settings.steps * sum(map(len, batches))
    with progress("sampling", total=steps, unit="sample-step") as bar:
        if runtime.world_size() == 1:
            return generate(*model, request, settings, bar.update)
        if runtime.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        runtime.barrier()
        for numbers in batches:
            np.save(_part_file(folder, int(numbers[0])), generate(*model, request.at(numbers), settings, bar.update))
    runtime.barrier()
    return _join_parts(folder, len(request), settings.batch_size) if runtime.rank() == 0 else None


def _part_file(folder: Path, first: int) -> Path:
    return folder / f"{first:09d}.npy"


def _join_parts(folder: Path, count: int, batch_size: int) -> np.ndarray:
    parts = [_part_file(folder, int(numbers[0])) for numbers in batches_of(count, batch_size)]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        cure = "use an --output on a disk that all machines share"
        raise DataError(str(missing[0]), "was generated by another rank and is not here", cure)
    images = np.concatenate([np.load(part, allow_pickle=False) for part in parts])
    shutil.rmtree(folder, ignore_errors=True)
    return images
