"""--dry-run: describe a run that passed every check, and try its first step; and records for computing a step again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.checkpoint.store import COMMAND, relative_argument
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import active
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import most_expensive_shape
from mindspeed_mm_dit.models.meta import multiply_adds, parameters_of
from mindspeed_mm_dit.objectives.registry import training_draw

SMALL_MULTIPLY_ADDS = 1e9
"""Most multiply-adds of a small step, forward and backward: half a second of one CPU core."""
SMALL_ELEMENTS = 4_000_000
"""Most weights of a small network: 16 MB."""


def rehearse(config: ModelConfig, micro_batch_size: int) -> None:
    """Compute the loss of one micro-batch, from its latents on, and on PyTorch its gradient.

    A micro-batch of several samples is tried with one more than there are channels, so that mixed-up axes show. With an
    accelerator, MindSpore tries nothing, since it can compute only there.

    Raises:
        ConfigError: the first step would fail with this error.
    """
    on_shapes, on_cpu = framework.runtime.meta_device_context(), framework.runtime.device_type() == "cpu"
    if on_shapes is None and not on_cpu:
        return
    samples = 1 if micro_batch_size == 1 else config.predictor.latent_channels + 1
    with_numbers = on_cpu and _is_small(config, samples)
    tried = _smaller(config, samples) if on_shapes is None and not with_numbers else config
    try:
        with on_shapes if on_shapes is not None and not with_numbers else nullcontext():
            losses = _losses(tried, samples)
    except UserError:
        raise
    except Exception as error:
        if "meta tensor" in str(error):  # a third-party network that reads values
            return
        raise _misfit_error(config, samples, f"{type(error).__name__}: {error}") from error
    if tuple(losses.shape) != (samples,):
        raise _misfit_error(config, samples, f"losses of shape {tuple(losses.shape)}, not one per sample")


def example(model: DiTModel, config: ModelConfig, samples: int) -> tuple[Any, ...]:
    """Return the arguments of ``model.losses`` for a micro-batch of ``config``: latents of zeros, conditions, draws."""
    inputs = config.predictor.conditions.examples(samples)
    inputs |= training_draw(config.diffusion)(0, np.arange(samples), config.latent_shape)
    inputs |= {name: np.ones((samples, *shape), np.float32) for name, shape in config.feature_shapes.items()}
    latents = framework.ops.tensor(np.zeros((samples, *config.latent_shape), np.float32))
    return latents, *(framework.ops.tensor(np.asarray(inputs[name])) for name in model.loss_names)


def _losses(config: ModelConfig, samples: int) -> Any:
    model = framework.runtime.to_runtime_device(DiTModel(config, NoAutoencoder(config.ae)))
    losses = model.losses(*example(model, config, samples))
    if active() == "pytorch":
        losses.mean().backward()
    return losses


def _is_small(config: ModelConfig, samples: int) -> bool:
    predictor = config.predictor
    work = 3 * samples * multiply_adds(predictor)
    return work <= SMALL_MULTIPLY_ADDS and parameters_of(predictor).num_elements() <= SMALL_ELEMENTS


def _smaller(config: ModelConfig, samples: int) -> ModelConfig:
    """Return ``config`` with a narrower network and latents halved until its step is small, or as far as possible."""
    config = replace(config, predictor=config.predictor.reduced_width())
    while not _is_small(config, samples):
        channels, *sizes = config.latent_shape
        try:
            half = config.predictor.resized((channels, *(max(1, size // 2) for size in sizes)))
            if half == config.predictor:
                break
            config = replace(config, predictor=half)
        except ConfigError:  # not a whole number of patches
            break
    return config


def _misfit_error(config: ModelConfig, samples: int, problem: str) -> ConfigError:
    return ConfigError(
        f"predictor {config.predictor.model_id!r} and diffusion {config.diffusion.model_id!r} of model.json do not fit "
        f"each other: the first step, of {samples} samples, ends with {' '.join(problem.split())[:300].rstrip('.')}. "
        "Choose another predictor or diffusion, or fix your own."
    )


def plan_of_run(args: RunConfig, world_size: int, iteration: int | None, consumed_samples: int = 0) -> str:
    """Return the lines that describe a run; ``iteration``: where it starts, or None if not known yet.

    ``args``: its flags with ``args.mm``; one batch size and --train-iters may be None.
    Raises ConfigError if the first step would fail.
    """
    rehearse(
        most_expensive_shape(args.mm.model, args.mm.data.dataset_param),
        args.micro_batch_size or -(-args.global_batch_size // world_size),
    )
    lines = ["dry run: every check passed; no model is built, and nothing is trained or saved", _model(args)]
    batch = args.global_batch_size or args.micro_batch_size * world_size
    if args.train_iters is not None:
        lines.append(_length(args, batch, iteration, consumed_samples))
    every = f"every {args.save_interval} steps and " if args.save_interval else ""
    lines.append(f"  saved     {f'in {args.save}, {every}at the end' if args.save else 'nothing, without --save'}")
    return "\n".join(lines)


def _model(args: RunConfig) -> str:
    model = args.mm.model
    channels = {1: "grey", 3: "RGB"}[model.ae.channels]
    size = " x ".join(map(str, model.sample_size))
    return (
        f"  model     {model.predictor.model_id}, {parameters_of(model).num_elements():,} parameters, on {size} "
        f"{channels} {'clips' if len(model.sample_size) == 3 else 'images'}, ae {model.ae.model_id}, diffusion "
        f"{model.diffusion.model_id}"
    )


def _length(args: RunConfig, batch: int, iteration: int | None, consumed_samples: int) -> str:
    steps = max(0, args.train_iters - (iteration or 0))
    data = args.mm.data_set
    start = "" if not iteration else f", from iteration {iteration} ({consumed_samples:,} samples) on"
    flop = data.flop_per_sample() * steps * batch
    return (
        f"  length    {steps:,} steps of {batch:,} samples up to iteration {args.train_iters:,}{start}: each of "
        f"{data.num_train:,} {data.noun}s {steps * batch / data.num_train:,.1f} times, {flop / 1e12:,.4g} TFLOP"
    )


NOT_FINITE = "not_finite.json"
"""File next to the checkpoints: the step that was not finite, with the command of its run."""


def command(save: str, words: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the command of this run, with paths inside the folder that it was started in relative to that folder.

    words: its flags, if those of this process are a host's.
    If ``save``, the --save folder, is inside that folder, the folder is recorded relative to it: then both may move,
    and no machine is named.
    """
    here, there = os.getcwd(), os.path.realpath(save)
    is_inside = os.path.commonpath([here, there]) == here
    return {
        "arguments": [relative_argument(word, here) for word in (sys.argv[1:] if words is None else words)],
        "folder": os.path.relpath(here, there) if is_inside else here,
    }


def record_not_finite(save: str | None, iteration: int, loss: float, grad_norm: float) -> None:
    """Record which step was not finite, on the first rank; if the disk fails, nothing is recorded."""

    if not save or framework.runtime.rank() != 0:
        return
    facts = {"iteration": iteration, "loss": str(loss), "grad_norm": str(grad_norm), COMMAND: command(save)}
    with suppress(OSError):
        (Path(save) / NOT_FINITE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_not_finite(folder: Path) -> dict[str, Any]:
    """Return the record that ``record_not_finite`` wrote into a folder of checkpoints, or {} if all steps were finite.

    Raises CheckpointError if the file is something else.
    """
    try:
        facts = json.loads((folder / NOT_FINITE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or type(facts.get("iteration")) is not int or not is_command(facts.get(COMMAND)):
        raise CheckpointError(f"{folder / NOT_FINITE} is not a record that a run writes. Remove it.")
    return facts


def is_command(value: Any) -> bool:
    """Return whether ``value`` has the form that ``command`` returns."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("folder"), str)
        and isinstance(value.get("arguments"), list)
        and all(isinstance(word, str) for word in value["arguments"])
    )
