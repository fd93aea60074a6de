"""One optimizer step: losses, gradients and the weights after it, and the rows about it that all files share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import nearest
from mindspeed_mm_dit.framework import ops, optim
from mindspeed_mm_dit.tools.verify.table import FORWARD, GRADIENTS, Bound, NotThere, Quantity, Rows

Tensor = Any
ADAMW_LR = 1e-4
"""Learning rate of the step in most files."""
KEYS_BIAS = Bound(
    "The keys' bias has a gradient of rounding alone, which Adam scales up.", least=lambda reference: 1e-4
)

ZERO = Bound(
    "The bias of the keys' norm shifts all scores of a query alike, which softmax does not see: its gradient is zero "
    "but for rounding, unless keys are rotated by position.",
    least=lambda reference: 1e-7 / max(float(norm(reference)), 1e-30),
)


class Step:
    """A step of AdamW (eps 1e-8, no decay) on the mean of the losses, done when a result is first used.

    ``network``: creates a network whose weights this step may change. ``losses``: network -> losses (B,).
    """

    def __init__(
        self,
        network: Callable[[], Any],
        losses: Callable[[Any], Tensor],
        lr: float = ADAMW_LR,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self._network, self._losses, self._lr, self._betas = network, losses, lr, betas

    @cached_property
    def network(self) -> Any:
        """The network that learns."""
        return self._network()

    @cached_property
    def _before(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return optim.gradients(self.network, lambda: self._losses(self.network))

    @property
    def losses(self) -> np.ndarray:
        """Loss of each sample before the step, (B,)."""
        return self._before[0]

    @property
    def gradients(self) -> Mapping[str, np.ndarray]:
        """Gradient of the mean loss by parameter."""
        return self._before[1]

    def gradient_norm(self, parameter: str) -> np.ndarray:
        """Return the norm of one of the gradients; raises NotThere."""
        return norm(_lookup(self.gradients, parameter))

    @property
    def grad_norm(self) -> np.ndarray:
        """Norm of all gradients as one vector."""
        return np.sqrt(sum(norm(gradient) ** 2 for gradient in self.gradients.values()))

    @cached_property
    def _after(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        assert self.gradients is not None  # those of the weights before the step
        optim.adamw_step(self.network, lambda: self._losses(self.network), self._lr, self._betas)
        with ops.no_grad():
            losses = ops.numpy(self._losses(self.network))
        return losses, {name: ops.numpy(p) for name, p in self.network.named_parameters()}

    @property
    def network_after(self) -> Any:
        """The network after the step."""
        assert self._after is not None
        return self.network

    @property
    def losses_after(self) -> np.ndarray:
        """Loss of each sample after the step, (B,)."""
        return self._after[0]

    @property
    def weights_after(self) -> Mapping[str, np.ndarray]:
        """Every parameter after the step."""
        return self._after[1]


def rows_of_step(step: Callable[[Any], Step], prefix: str = "") -> Rows:
    """Return the rows about one step, for files of reference values.

    step: program -> its step. prefix: regular expression of the text before a parameter's name.
    """
    return (
        Quantity(rf"grad_norm/{prefix}(.+attn\.k_norm\.bias)", lambda p, name: step(p).gradient_norm(name), ZERO),
        Quantity(rf"grad_norm/{prefix}(.+)", lambda p, name: step(p).gradient_norm(name), GRADIENTS),
        Quantity(r"grad_norm_total", lambda p: step(p).grad_norm, GRADIENTS),
        Quantity(
            rf"param_norm_after_one_adamw_step/{prefix}(.+attn\.(?:qkv|k_norm)\.bias)",
            lambda p, name: norm(_lookup(step(p).weights_after, name)), KEYS_BIAS,
        ),
        Quantity(
            rf"param_norm_after_one_adamw_step/{prefix}(.+)",
            lambda p, name: norm(_lookup(step(p).weights_after, name)), FORWARD,
        ),
        Quantity(r"loss_after_one_adamw_step", lambda p: step(p).losses_after),
    )  # fmt: skip


def norm(array: np.ndarray) -> np.ndarray:
    """Return the norm of all elements, summed in float64."""
    return np.asarray(np.linalg.norm(array.astype(np.float64)))


def _lookup(arrays: Mapping[str, np.ndarray], parameter: str) -> np.ndarray:
    if parameter not in arrays:
        raise NotThere(nearest(parameter, arrays))
    return arrays[parameter]
