"""Plan samples: their size, the model's defaults, the conditions of each. Generate them on one rank or several.

The noise of a sample depends on (seed, sample number), not on the batch size. Ranks work on the batches of one rank, so
the samples are bit for bit the same for any number of ranks; they exchange files next to the output and nothing else.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.configs.limits import whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.data.conditions import encode_conditions, request_arrays, unconditional_arrays
from mindspeed_mm_dit.data.order import Stream, normals
from mindspeed_mm_dit.errors import ConfigError, ConvergenceError, DataError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.models.autoencoder import to_pixels
from mindspeed_mm_dit.models.frames import insert_frames
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network, switch_experts
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of, sampler_options
from mindspeed_mm_dit.sampling.conditions import (
    MAX_IMAGES,
    MAX_VIDEOS,
    SampleConditions,
    check_conditions,
    requested_conditions,
)
from mindspeed_mm_dit.sampling.load import NEEDS_TWO, CheckpointDescription, Experts, check_weaker
from mindspeed_mm_dit.sampling.pictures import memory_bytes
from mindspeed_mm_dit.sampling.request import CFG_SCALE, SampleRequest
from mindspeed_mm_dit.terminal import progress

FORWARD_TENSORS = 5
"""Least number of float32 tensors (tokens, hidden_size) in memory during a block: its input, queries, keys, values, and
the output of attention."""


class SamplePlan(NamedTuple):
    """Samples that a model can generate, all checked."""

    config: ModelConfig
    """model.json, with the size of the samples."""
    request: SampleRequest
    """The request, with the model's defaults."""
    conditions: SampleConditions
    """Of each sample."""


def plan_samples(
    request: SampleRequest,
    model: CheckpointDescription,
    tokenizers: Sequence[Any] | None = None,
    output: Path = Path("as.npz"),
) -> SamplePlan:
    """Return what ``request`` means for ``model``.

    tokenizers: of the text encoders, if they are loaded. output: its format determines the memory of the samples.

    Raises:
        ConfigError: the model cannot generate this; names the flag.
        PlatformError: the framework does not support ``bf16`` here.
    """
    config = resized(model.config, request.frames, request.size)
    request = with_defaults(request, config, model.low is not None)
    conditions = requested_conditions(request, config, model, tokenizers)
    flag = "--num-per-prompt" if "caption" in conditions.values else "--num-per-class"
    num = whole_number(flag, request.num, 1)
    what = f"{flag} = {num}" + (f" with path = {request.path}" if request.path > 1 else "")
    _check_amount(what, len(conditions) * num * request.path, config, output)
    return SamplePlan(config, request, conditions.repeat(num))


# --- size and defaults -----------------------------------------------------------------------------------------------


def resized(config: ModelConfig, frames: int | None, size: Any) -> ModelConfig:
    """Return ``config`` for samples with other ``frames`` or another ``size`` (H, W); no weight depends on them."""
    if frames is None and size is None:
        return config
    default = config.sample_size
    if frames is not None and len(default) == 2:
        raise ConfigError(f"--frames = {frames} is for videos, and this model generates images. Leave it out.")
    settings = {"--frames": f"--frames = {frames}", "--size": f"--size = {'x'.join(map(str, size or ()))}"}
    target = default[-2:] if size is None else size
    if len(default) == 3:
        target = (default[0] if frames is None else frames, *target)
    try:
        predictor = config.predictor.resized(config.ae.latent_shape(target))
    except ConfigError as error:
        what = settings["--frames" if "num_frames" in str(error) or size is None else "--size"]
        raise ConfigError(f"{what} does not fit the model: {error}") from None
    _check_forward_fits(predictor, settings["--frames" if size is None else "--size"])
    return replace(config, predictor=predictor)


def _check_forward_fits(predictor: PredictorConfig, what: str) -> None:
    """Raise ConfigError if the tokens of one sample alone take more than this machine's memory."""
    need, available = FORWARD_TENSORS * 4 * predictor.num_tokens * int(predictor.hidden_size), host_memory_bytes()
    if need > available:
        raise ConfigError(
            f"{what} makes samples of {predictor.num_tokens:,} tokens. Each needs {need / 2**30:,.1f} GiB, and this "
            f"machine has {available / 2**30:,.1f} GiB. Generate smaller samples."
        )


def with_defaults(
    request: SampleRequest, config: ModelConfig, two_experts: bool = False, cfg_scale: float = CFG_SCALE
) -> SampleRequest:
    """Return ``request`` with the defaults of a model of ``config``, which has the size of the samples.

    cfg_scale: default for networks without embedded guidance.

    Raises:
        ConfigError: the model has no such sampler, it does not take these steps or options, or the guidance is
            impossible.
        PlatformError: the framework does not support ``bf16`` here.
    """
    conditions, weaker = config.predictor.conditions, request.weaker
    first_sampler = next(iter(objective_of(config.diffusion).samplers))
    sampler, steps = config.predictor.published_sampler or (first_sampler, 50 if len(config.sample_size) == 3 else 250)
    defaults: dict[str, Any] = {
        "sampler": sampler,
        "steps": steps,
        "options": {},
        "guidance": config.predictor.cfg_scale(cfg_scale),
        "channels": "3" if conditions.items == ("label",) and weaker is None else "all",
    }
    filled = replace(request, **{name: value for name, value in defaults.items() if getattr(request, name) is None})
    guidance = Guidance(filled.guidance, filled.channels, filled.interval, filled.rescale)
    if request.rescale is not None and len(config.latent_shape) != 3:
        raise ConfigError(f"--cfg-rescale = {request.rescale} is for images, and this model makes videos. Drop it.")
    if request.channels == "3" and config.predictor.latent_channels < 3:
        raise ConfigError(
            f"--cfg-channels = 3 is more than the {config.predictor.latent_channels} channels of this model's latents. "
            "Use all, or drop the flag."
        )
    if request.low_noise_guidance is not None and not two_experts:
        raise ConfigError(f"--low-noise-cfg-scale = {request.low_noise_guidance} {NEEDS_TWO}")
    if weaker is not None and two_experts:
        raise ConfigError("--guidance-checkpoint does not go with --low-noise-checkpoint. Drop one of them.")
    if weaker is not None:
        check_weaker(weaker, config)
    elif {guidance.scale, request.low_noise_guidance} - {1.0, None} and not conditions.has_unconditional:
        raise ConfigError(
            f"--cfg-scale = {guidance.scale} needs a null class, and this model has none: it was trained without "
            "dropped labels. Use --cfg-scale 1."
        )
    runtime.autocast(request.bf16)  # raises if bfloat16 is not supported here
    options = sampler_options(config.diffusion, filled.sampler, filled.options)
    find_sampler(config.diffusion, filled.sampler).check(config.diffusion, filled.steps, options)
    return replace(filled, guidance=guidance.scale, interval=guidance.interval)


def _check_amount(what: str, total: int, config: ModelConfig, output: Path) -> None:
    """Raise ConfigError, naming the setting ``what``, for more samples than one request may have."""
    videos, hint = len(config.sample_size) == 3, "Generate fewer at once, and the rest with another seed."
    most, noun = (MAX_VIDEOS, "videos") if videos else (MAX_IMAGES, "images")
    if total > most:
        raise ConfigError(f"{what} asks for {total:,} {noun}, and at most {most:,} are generated at once. {hint}")
    need, available = 0 if videos else memory_bytes(output, total, config.sample_size), host_memory_bytes()
    if need > available:
        raise ConfigError(
            f"{what} asks for {total:,} {noun}. They need {need / 2**30:,.1f} GiB, and this machine has "
            f"{available / 2**30:,.1f} GiB. {hint}"
        )


Arrays = Mapping[str, np.ndarray]
DECODED_PIXELS = 8 * 512**2
"""Pixels decoded at a time; the autoencoder of Stable Diffusion needs some 6 GiB for them in float32."""


def generate_on_ranks(folder: Path, model: Any, plan: SamplePlan, experts: Experts | None = None) -> np.ndarray | None:
    """Generate samples on all ranks; return them on the first, as ``generate`` does, and None on others.

    folder: a new one, on a disk that all ranks share; it is removed afterwards. Every rank must call this. A bar
    shows the progress of the first rank of a machine.

    Raises:
        DataError: a part from another rank is missing.
    """
    config, request, conditions = plan
    batches = even_batches(len(conditions), request.batch_size)
    mine = batches[runtime.rank() :: runtime.world_size()]
    with progress("sampling", total=(request.steps or 0) * sum(map(len, mine)), unit="sample-step") as bar:
        request = replace(request, on_step=bar.update)
        if runtime.world_size() == 1:
            return generate(model, config, conditions, request, experts)
        if runtime.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        runtime.barrier()
        for numbers in mine:
            images = generate(model, config, conditions.at(numbers), request, experts)
            np.save(_part_file(folder, numbers), images)
    runtime.barrier()
    return _joined(folder, batches) if runtime.rank() == 0 else None


def _part_file(folder: Path, numbers: np.ndarray) -> Path:
    return folder / f"{int(numbers[0]):09d}.npy"


def _joined(folder: Path, batches: list[np.ndarray]) -> np.ndarray:
    parts = [_part_file(folder, numbers) for numbers in batches]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise DataError(
            f"{missing[0]} was generated by another rank and is not here. Use an --output on a disk that all machines "
            "share."
        )
    images = np.concatenate([np.load(part, allow_pickle=False) for part in parts])
    shutil.rmtree(folder, ignore_errors=True)
    return images


def even_batches(count: int, batch_size: int) -> list[np.ndarray]:
    """Return the numbers 0 ... count - 1 in batches of about the same size, none larger than ``batch_size``."""
    return np.array_split(np.arange(count), max(1, -(-count // batch_size)))


def generate(
    model: Any,
    config: ModelConfig,
    conditions: SampleConditions,
    request: SampleRequest,
    experts: Experts | None = None,
) -> np.ndarray:
    """Generate the requested samples.

    Args:
        model: the composite (ae, text_encoders, diffusion, predictor).
        request: how, with the model's defaults (``with_defaults``).
        experts: if there are two, and ``model`` has the network of the high-noise expert.

    Returns:
        Images (N, H, W, 3 or 1) or videos (N, F, H, W, 3 or 1), uint8, of the size in ``config``. If
        ``request.path`` is above 1, with one more axis, (N, path, ...): states of the trajectory from noise, the last
        of which are the samples.
    """
    check_conditions(conditions, config)
    guided, tokenizers = config.predictor.conditions.guided, _tokenizers(model)
    with ops.no_grad():
        unconditional = _encoded(model, guided, unconditional_arrays(guided, conditions.instead, tokenizers))
        batches = [
            _generate_batch(model, config, conditions.at(rows), unconditional, request, experts)
            for rows in even_batches(len(conditions), request.batch_size)
        ]
    samples = np.moveaxis(np.concatenate(batches), 2, -1)
    return samples if request.path > 1 else samples[:, -1]


def _tokenizers(model: Any) -> list[Any]:
    return [encoder.tokenizer for encoder in model.text_encoders]


def _encoded(model: Any, conditions: Conditions, arrays: Arrays) -> Arrays:
    """Return the conditions (B, ...) as the network takes them, by name."""
    tensors = {name: ops.tensor(array) for name, array in arrays.items()}
    values = encode_conditions(conditions, tensors, model)
    return {name: ops.numpy(tensor) for name, tensor in zip(conditions.names, values)}


def _generate_batch(
    model: Any,
    config: ModelConfig,
    conditions: SampleConditions,
    unconditional: Arrays,
    request: SampleRequest,
    experts: Experts | None,
) -> np.ndarray:
    """Return states of the trajectory, the last of which are the samples, (B, path, C, ...) uint8."""
    count, all_conditions = len(conditions), config.predictor.conditions
    condition = _encoded(model, all_conditions, request_arrays(all_conditions, conditions.values, _tokenizers(model)))
    negative = {name: np.repeat(row, count, 0) for name, row in unconditional.items()}
    trajectory: list[Any] = []
    numbers = conditions.first_number + np.arange(count)
    for state in trajectory_states(model, config, condition, numbers, request, negative, experts):
        trajectory = [*trajectory, state] if request.path > 1 else [state]
        if request.on_step is not None:
            request.on_step(count)
    chosen = np.linspace(0, len(trajectory) - 1, request.path).round().astype(int)
    images = np.stack([decode(model.ae, trajectory[index], math.prod(config.sample_size)) for index in chosen], 1)
    if not np.isfinite(images).all():
        raise ConvergenceError(
            f"The samples with --cfg-scale {request.guidance:g} are not finite numbers. Use a smaller --cfg-scale, or "
            "--clip if the sampler has it. The weights may also be of a run that diverged."
        )
    return to_pixels(images)


def decode(autoencoder: Any, latents: Any, pixels: int) -> np.ndarray:
    """Return the images or videos (N, C, ...) float32 of scaled latents (N, c, ...), decoded in batches.

    pixels: number of pixels of one image or video, to which the decoder's memory is proportional.
    """
    batch_size = max(1, DECODED_PIXELS // pixels)
    parts = [latents[start : start + batch_size] for start in range(0, latents.shape[0], batch_size)]
    return np.concatenate([ops.numpy(autoencoder.decode(part)) for part in parts])


def trajectory_states(
    model: Any,
    config: ModelConfig,
    condition: Arrays,
    numbers: np.ndarray,
    request: SampleRequest,
    unconditional: Arrays | None = None,
    experts: Experts | None = None,
) -> Iterator[Any]:
    """Yield the states of the trajectory for the samples ``numbers``; ``condition`` has a row for each.

    request: with the model's defaults. unconditional: what guidance leads away from; None: the predictor's default.
    The last state is the scaled latents.
    """
    assert request.sampler is not None and request.guidance is not None and request.channels is not None
    sampler = find_sampler(config.diffusion, request.sampler)
    options = sampler_options(config.diffusion, request.sampler, request.options)
    names = config.predictor.conditions.names
    if unconditional is None:
        unconditional = config.predictor.conditions.unconditional(len(numbers))
    conditional, negative = (
        [ops.tensor(side[name]) for name in names] for side in (condition, {**condition, **unconditional})
    )

    def with_autocast(network: Any) -> Any:
        def forward(*inputs: Any) -> Any:
            with runtime.autocast(request.bf16):
                return network(*inputs)

        return forward

    guidance = Guidance(request.guidance, request.channels, request.interval, request.rescale)
    if experts is None:
        weaker = None if request.weaker is None else with_autocast(request.weaker.predictor)
        model_fn = guided_network(with_autocast(model.predictor), conditional, negative, guidance, weaker)
    else:
        scales = guidance.scale, request.low_noise_scale
        high, low = (
            guided_network(with_autocast(network), conditional, negative, replace(guidance, scale=scale))
            for network, scale in zip(experts.networks(model.predictor), scales)
        )
        model_fn = switch_experts(experts.boundary, high, low)
    shape = config.latent_shape
    start = ops.tensor(normals(request.seed, Stream.SAMPLE_START, numbers, shape))

    def noise_at(step: int) -> Any:
        return ops.tensor(normals(request.seed, Stream.SAMPLE_NOISE, numbers, shape, block=step))

    trajectory = sampler.trajectory(model.diffusion, model_fn, start, noise_at, request.steps, options)
    frames = config.predictor.conditions.frames
    if frames is None or frames.mask_channels > 1:
        return trajectory
    return (insert_frames(state, conditional[names.index("frames")]) for state in trajectory)
