"""AdamW (Loshchilov & Hutter 2019), in PyTorch's order of operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.optimizers.contract import Optimizer, Parameter, Rule, Tensor, flag, require


@dataclass(frozen=True)
class AdamConfig:
    """Settings of ``--optimizer adam``, by Megatron's names and with its defaults."""

    adam_beta1: float = flag(0.9, "decay of the mean of the gradients")
    """Share of the mean of the gradients that a step keeps."""
    adam_beta2: float = flag(0.999, "decay of the mean of their squares")
    """The same of the mean of their squares."""
    adam_eps: float = flag(1e-8, "added to the root of that mean")
    """Added to the root of that mean."""

    def __post_init__(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            require(self, name, 0 <= getattr(self, name) < 1, "must lie in [0, 1)")
        require(self, "adam_eps", 1e-38 <= self.adam_eps <= 3e38, "must be a positive number that float32 holds")


def numbers(config: AdamConfig, lr: float, step: int) -> tuple[float, ...]:
    """Return the step size, the root of the second moment's correction of its bias, and what is new in each moment."""
    # (1 - 0.999 loses 1e-5 of itself in a graph of float32)
    corrections = lr / (1 - config.adam_beta1**step), (1 - config.adam_beta2**step) ** 0.5
    return (
        *corrections,
        1 - config.adam_beta1,
        1 - config.adam_beta2,
    )


def change(
    config: AdamConfig, gradient: Tensor, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return what is taken from the weights, and the two moments."""
    step_size, root_of_correction, newest, newest_square = numbers
    exp_avg = state[0] + newest * (gradient - state[0])
    exp_avg_sq = config.adam_beta2 * state[1] + newest_square * gradient * gradient
    return step_size * exp_avg / (exp_avg_sq.sqrt() / root_of_correction + config.adam_eps), exp_avg, exp_avg_sq


def pytorch(config: AdamConfig) -> tuple[str, dict[str, Any]]:
    """Return PyTorch's fused AdamW."""
    return "AdamW", {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "fused": True}


RULE = Rule(("exp_avg", "exp_avg_sq"), change, numbers, pytorch=pytorch)


def rule_of(config: AdamConfig, parameter: Parameter) -> Rule:
    """Return the one rule there is."""
    return RULE


ADAM = Optimizer(AdamConfig, rule_of)
