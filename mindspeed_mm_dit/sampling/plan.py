"""What a request means for a model: the size of the samples, the model's defaults, and the conditions of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.configs.limits import whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of, sampler_options
from mindspeed_mm_dit.sampling.conditions import (
    MAX_IMAGES,
    MAX_VIDEOS,
    SampleConditions,
    requested_conditions,
)
from mindspeed_mm_dit.sampling.load import NEEDS_TWO, CheckpointDescription, check_weaker
from mindspeed_mm_dit.sampling.pictures import memory_bytes
from mindspeed_mm_dit.sampling.request import CFG_SCALE, SampleRequest

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
    what = f"{flag} = {num}" + (f", path = {request.path}" if request.path > 1 else "")
    _check_amount(what, len(conditions) * num * request.path, config, output)
    return SamplePlan(config, request, conditions.each(num))


# --- size and defaults -----------------------------------------------------------------------------------------------


def resized(config: ModelConfig, frames: int | None, size: Any) -> ModelConfig:
    """Return ``config`` for samples with other ``frames`` or another ``size`` (H, W); no weight depends on them."""
    if frames is None and size is None:
        return config
    default = config.sample_size
    if frames is not None and len(default) == 2:
        raise ConfigError(f"--frames = {frames}: this model generates images, not videos. Leave it out.")
    settings = {"--frames": f"--frames = {frames}", "--size": f"--size = {'x'.join(map(str, size or ()))}"}
    target = default[-2:] if size is None else size
    if len(default) == 3:
        target = (default[0] if frames is None else frames, *target)
    try:
        predictor = config.predictor.resized(config.ae.latent_shape(target))
    except ConfigError as error:
        what = settings["--frames" if "num_frames" in str(error) or size is None else "--size"]
        raise ConfigError(f"{what}: {error}") from None
    _check_forward_fits(predictor, settings["--frames" if size is None else "--size"])
    return replace(config, predictor=predictor)


def _check_forward_fits(predictor: PredictorConfig, what: str) -> None:
    """Raise ConfigError if the tokens of one sample alone take more than this machine's memory."""
    need, available = FORWARD_TENSORS * 4 * predictor.num_tokens * int(predictor.hidden_size), host_memory_bytes()
    if need > available:
        reason = f"a sample of {predictor.num_tokens:,} tokens needs {need / 2**30:,.1f} GiB"
        raise ConfigError(f"{what}: {reason}, and this machine has {available / 2**30:,.1f}. Generate smaller samples.")


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
        reason = f"the latents of this model have {config.predictor.latent_channels}"
        raise ConfigError(f"--cfg-channels = 3: {reason}. Use all, or drop the flag.")
    if request.low_noise_guidance is not None and not two_experts:
        raise ConfigError(f"--low-noise-cfg-scale = {request.low_noise_guidance} {NEEDS_TWO}")
    if weaker is not None and two_experts:
        raise ConfigError("--guidance-checkpoint does not go with --low-noise-checkpoint. Drop one of them.")
    if weaker is not None:
        check_weaker(weaker, config)
    elif {guidance.scale, request.low_noise_guidance} - {1.0, None} and not conditions.has_unconditional:
        reason = "this model was trained without dropped labels: it has no null class"
        raise ConfigError(f"--cfg-scale = {guidance.scale}: {reason}. Use --cfg-scale 1.")
    runtime.low_precision(request.bf16)  # raises if bfloat16 is not supported here
    options = sampler_options(config.diffusion, filled.sampler, filled.options)
    find_sampler(config.diffusion, filled.sampler).check(config.diffusion, filled.steps, options)
    return replace(filled, guidance=guidance.scale, interval=guidance.interval)


def _check_amount(what: str, total: int, config: ModelConfig, output: Path) -> None:
    """Raise ConfigError, naming the setting ``what``, for more samples than one request may have."""
    videos, cure = len(config.sample_size) == 3, "Generate fewer at once, and the rest with another seed."
    most, noun = (MAX_VIDEOS, "videos") if videos else (MAX_IMAGES, "images")
    if total > most:
        raise ConfigError(f"{what}: {total:,} {noun}: at most {most:,} are generated at once. {cure}")
    need, available = 0 if videos else memory_bytes(output, total, config.sample_size), host_memory_bytes()
    if need > available:
        memory = f"this machine has {available / 2**30:,.1f} GiB"
        raise ConfigError(f"{what}: {total:,} {noun} need {need / 2**30:,.1f} GiB, and {memory}. {cure}")
