"""AdamW (Loshchilov & Hutter 2019), in PyTorch's order of operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.optimizers.contract import OptimizerSpec, Parameter, Tensor, UpdateRule, flag, require


@dataclass(frozen=True)
class AdamConfig:
    """Settings of ``--optimizer adam``, with Megatron's names and defaults."""

    adam_beta1: float = flag(0.9, "decay beta1 of the running mean of the gradients")
    """Decay of the running mean of the gradients, in [0, 1)."""
    adam_beta2: float = flag(0.999, "decay beta2 of the running mean of the squared gradients")
    """Decay of the running mean of the squared gradients, in [0, 1)."""
    adam_eps: float = flag(1e-8, "epsilon added to the root of the mean squared gradient")
    """Epsilon added to the root of the mean squared gradient."""

    def __post_init__(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            require(self, name, 0 <= getattr(self, name) < 1, "must lie in [0, 1)")
        require(self, "adam_eps", 1e-38 <= self.adam_eps <= 3e38, "must be a positive number that float32 holds")


def numbers(config: AdamConfig, lr: float, step: int) -> tuple[float, ...]:
    """Return step size, root of the bias correction of the second moment, 1 - beta1 and 1 - beta2."""
    # (computed here because 1 - 0.999 has a relative error of 1e-5 in a float32 graph)
    corrections = lr / (1 - config.adam_beta1**step), (1 - config.adam_beta2**step) ** 0.5
    return (*corrections, 1 - config.adam_beta1, 1 - config.adam_beta2)


def change(
    config: AdamConfig, gradient: Tensor, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the amount to subtract from the weights, and the two moments."""
    step_size, root_of_correction, newest, newest_square = numbers
    exp_avg = state[0] + newest * (gradient - state[0])
    exp_avg_sq = config.adam_beta2 * state[1] + newest_square * gradient * gradient
    return step_size * exp_avg / (exp_avg_sq.sqrt() / root_of_correction + config.adam_eps), exp_avg, exp_avg_sq


def pytorch(config: AdamConfig) -> tuple[str, dict[str, Any]]:
    """Return name and settings of PyTorch's fused AdamW."""
    return "AdamW", {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, "fused": True}


RULE = UpdateRule(("exp_avg", "exp_avg_sq"), change, numbers, pytorch=pytorch)


def rule_of(config: AdamConfig, parameter: Parameter) -> UpdateRule:
    """Return AdamW's rule, the same for every parameter."""
    return RULE


ADAM = OptimizerSpec(AdamConfig, rule_of)
