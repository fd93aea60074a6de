"""What an optimizer offers: its settings, the rule that each parameter goes by, and what a rule keeps. No framework.

A rule is written once, for tensors of PyTorch and of MindSpore, and compiled by the latter: it uses operators
(``+ - * / @``) and methods that both have (``sqrt sign abs sum clamp swapaxes``). Weight decay is decoupled
(Loshchilov & Hutter 2019) and alike for every rule: weights (1 - lr decay) - change, with decay 0 for vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mindspeed_mm_dit.errors import ConfigError

Tensor = Any  # a tensor of the active framework
Shape = tuple[int, ...]

STEP = "step"
"""Name of the count of steps since the state was zero, which is kept of every parameter."""


class Parameter(Protocol):
    """What a predictor's config says of a trained tensor (``configs/predictor.py``)."""

    @property
    def shape(self) -> Shape:
        """Its axes."""

    @property
    def matrices(self) -> int:
        """How many matrices it is, one below the other; 0: none that is worth being one."""


def rate_alone(config: Any, lr: float, step: int) -> tuple[float, ...]:
    """Return the learning rate: the numbers of a rule that needs no others."""
    return (lr,)


class Rule(NamedTuple):
    """How some parameters are stepped."""

    state: tuple[str, ...]
    """Names of what is kept of a parameter from step to step, each of its shape, float32, zeros at first."""
    change: Callable[[Any, Tensor, tuple[Tensor, ...], tuple[Any, ...]], tuple[Tensor, ...]]
    """(config, gradient, state, numbers) -> (what is taken from the weights, *state); element by element."""
    numbers: Callable[[Any, float, int], tuple[float, ...]] = rate_alone
    """(config, lr, number of the step: 1, 2, ...) -> what a step is told, computed on the host in float64."""
    of_matrices: Callable[[Any, Tensor, tuple[Any, ...]], Tensor] | None = None
    """(config, change (n, rows, columns) of n whole matrices, numbers) -> what is taken from the weights instead."""
    pytorch: Callable[[Any], tuple[str, dict[str, Any]]] | None = None
    """(config) -> name in ``torch.optim`` of PyTorch's own optimizer by this rule, where it has a faster one, and its
    settings; what it keeps goes by the names of ``state``, and "step"."""


class Optimizer(NamedTuple):
    """What ``--optimizer`` chooses by name."""

    config: type
    """Frozen dataclass of its settings, made with :func:`flag`: each is the flag of its name."""
    rule_of: Callable[[Any, Parameter], Rule]
    """(config, parameter) -> how it is stepped."""


@dataclass(frozen=True)
class Chosen:
    """An optimizer and its settings: what engines, checkpoints and plans ask."""

    name: str
    config: Any
    optimizer: Optimizer

    def rule_of(self, parameter: Parameter) -> Rule:
        """Return how ``parameter`` is stepped."""
        return self.optimizer.rule_of(self.config, parameter)

    def state_of(self, parameter: Parameter) -> dict[str, Shape]:
        """Return name -> shape of what checkpoints keep of it, as ``optimizer.state.PARAMETER.NAME``."""
        return {STEP: (), **dict.fromkeys(self.rule_of(parameter).state, parameter.shape)}


def flag(default: Any, words: str, **how: Any) -> Any:
    """Return a setting, which --help explains by ``words``; ``how``: what else argparse is told, as ``choices``."""
    return field(default=default, metadata={"help": words, "how": how})


def require(config: Any, name: str, good: bool, reason: str) -> None:
    """Raise ConfigError, naming the flag of setting ``name``, unless ``good``."""
    if not good:
        raise ConfigError(f"--{name.replace('_', '-')} = {getattr(config, name)}", reason)
