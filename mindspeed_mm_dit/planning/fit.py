"""Checks whether a run fits into the memory of the machine it is about to start on, according to the plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning.memory import Memory, Placement, memory

GIB = 2**30
BLOCK_BYTES = 36_000
"""Bytes that the objects of one transformer block take, without its weights, when it is built (measured on PyTorch
2.13)."""


@dataclass(frozen=True)
class MemoryLimit:
    """A memory that a model must fit into."""

    name: str
    """Its name in errors."""
    num_bytes: int
    """Its size."""
    sharers: int = 1
    """Number of ranks that share it."""


def check_model_fits(model: ModelConfig, limit: MemoryLimit) -> None:
    """Raise ConfigError unless the unsharded float32 weights of all ranks fit into ``limit``."""
    need = limit.sharers * host_bytes(model.predictor)
    _check(model.predictor, need, "the weights of {} parameters need {}", limit)


def check_state_fits(model: ModelConfig, placement: Placement, limit: MemoryLimit) -> None:
    """Raise ConfigError unless weights, gradients, optimizer state and EMA of all ranks fit into ``limit``.

    The plan is exact about these, so a run that is refused could not have worked.
    """
    need = limit.sharers * state_bytes(memory(model, placement))
    _check(model.predictor, need, "weights, gradients, optimizer state and average of {} parameters need {}", limit)


def tight_step(
    model: ModelConfig, placement: Placement, micro_batch_size: int, online_vae: bool, limit: MemoryLimit
) -> str | None:
    """Return a warning if the plan estimates that a step needs more than ``limit`` has, else None."""
    plan = memory(model, placement, online_vae)
    need = limit.sharers * plan.total(micro_batch_size)
    if need <= limit.num_bytes:
        return None
    largest = plan.largest_micro_batch(limit.num_bytes / limit.sharers)
    advice = f"a micro-batch of {largest} fits" if largest else "no micro-batch fits"
    return (
        f"warning: --micro-batch-size = {micro_batch_size}: a step may need {_gib(need)}, and {limit.name} has "
        f"{_gib(limit.num_bytes)}; by the plan {advice} (mm-dit plan)"
    )


def host_bytes(predictor: PredictorConfig) -> int:
    """Return the bytes that a network takes when it is built: weights, and the objects that hold them."""
    parameters = parameters_of(predictor)
    return 4 * parameters.num_elements() + BLOCK_BYTES * len(parameters.blocks)


def state_bytes(plan: Memory) -> int:
    """Return the bytes that persist from step to step."""
    return plan.weights + plan.gradients + plan.optimizer + plan.ema


def _check(predictor: PredictorConfig, need: int, sentence: str, limit: MemoryLimit) -> None:
    if need > limit.num_bytes:
        name = dominant_setting(predictor)
        shared = f", which {limit.sharers} ranks share" if limit.sharers > 1 else ""
        raise ConfigError(
            f"predictor.{name} = {getattr(predictor, name)}",
            f"{sentence.format(f'{parameters_of(predictor).num_elements():,}', _gib(need))}, and {limit.name} has "
            f"{_gib(limit.num_bytes)}{shared}",
            f"use a smaller {name}, or more devices (mm-dit plan says how many)",
        )


def dominant_setting(predictor: PredictorConfig) -> str:
    """Return the setting that makes a network large: resetting it to its ordinary value saves the most memory."""
    config: Any = predictor
    ordinary = predictor.settings_of_size()
    needed = {name: host_bytes(dataclasses.replace(config, **values)) for name, values in ordinary.items()}
    return min(needed, key=lambda name: needed[name], default="model_id")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
