"""The interface of an optimizer: its settings, the update rule of each parameter, and the rule's state. No framework.

A rule is written once for tensors of PyTorch and MindSpore, and MindSpore compiles it. So it uses only operators
(``+ - * / @``) and methods that both have (``sqrt sign abs sum clamp swapaxes``). Weight decay is decoupled
(Loshchilov & Hutter 2019) and the same for every rule: weights (1 - lr decay) - change, with decay 0 for vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from mindspeed_mm_dit.errors import ConfigError, flag_of

Tensor = Any  # a tensor of the active framework
Shape = tuple[int, ...]

STEP = "step"
"""Name of the number of steps since the state was zero; every parameter keeps one."""


class Parameter(Protocol):
    """What a predictor's config says about a trained tensor (``configs/predictor.py``)."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    @property
    def matrices(self) -> int:
        """Number of matrices stacked in it; 0 if it is not treated as a matrix."""


class UpdateRule(NamedTuple):
    """The update rule of some parameters."""

    state: tuple[str, ...]
    """Names of the tensors kept from step to step; each has the parameter's shape, is float32, and starts at zero."""
    change: Callable[[Any, Tensor, tuple[Tensor, ...], tuple[Any, ...]], tuple[Tensor, ...]]
    """(config, gradient, state, numbers) -> (amount to subtract from the weights, *new state); elementwise."""
    numbers: Callable[[Any, float, int], tuple[float, ...]] = lambda config, lr, step: (lr,)
    """(config, lr, number of the step: 1, 2, ...) -> the ``numbers`` of a step, computed on the host in float64."""
    update_matrices: Callable[[Any, Tensor, tuple[Any, ...]], Tensor] | None = None
    """(config, change (n, rows, columns) of n whole matrices, numbers) -> amount to subtract from weights instead."""
    pytorch: Callable[[Any], tuple[str, dict[str, Any]]] | None = None
    """(config) -> name and settings of the optimizer in ``torch.optim`` with this rule, if PyTorch has a faster one.
    Its state has the names of ``state``, and "step"."""


class OptimizerSpec(NamedTuple):
    """An optimizer, which ``--optimizer`` chooses by name."""

    config: type
    """Frozen dataclass of its settings, made with :func:`flag`; each is a flag of the same name."""
    rule_of: Callable[[Any, Parameter], UpdateRule]
    """(config, parameter) -> its update rule."""


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """An optimizer with its settings, as used by engines, checkpoints and plans."""

    name: str
    config: Any
    optimizer: OptimizerSpec

    def rule_of(self, parameter: Parameter) -> UpdateRule:
        """Return the update rule of ``parameter``."""
        return self.optimizer.rule_of(self.config, parameter)

    def state_of(self, parameter: Parameter) -> dict[str, Shape]:
        """Return name -> shape of its state; checkpoints save it as ``optimizer.state.PARAMETER.NAME``."""
        return {STEP: (), **dict.fromkeys(self.rule_of(parameter).state, parameter.shape)}


def flag(default: Any, help_text: str, **how: Any) -> Any:
    """Return a setting with help text ``help_text``; ``how``: further arguments for argparse, e.g. ``choices``."""
    return field(default=default, metadata={"help": help_text, "how": how})


def require(config: Any, name: str, good: bool, problem: str) -> None:
    """Raise ConfigError, naming the flag of setting ``name``, unless ``good``."""
    if not good:
        raise ConfigError(f"{flag_of(name)} = {getattr(config, name)} {problem}.")
