"""Observe a network during a step: find the first tensor that is not finite, and how large activations are."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mindspeed_mm_dit.framework.pytorch.sharded import is_sharded
from mindspeed_mm_dit.tools.verify.pytorch.step_record import tensors

INPUTS = ("x_t", "t", "condition")


class NotFinite(NamedTuple):
    """Where in a step the first tensor with a nan or an infinity occurs."""

    module: str
    """Module of the predictor, named as in its parameters; empty for the predictor itself."""
    tensor: str
    """"output", "gradient of output", "parameter weight", "gradient of parameter weight", "input x_t", "loss"."""
    micro_batch: int
    """Micro-batch of this rank, from 0; -1: before the first."""
    rows: tuple[int, ...]
    """Samples of the micro-batch with such a value; empty if the tensor does not belong to samples."""


class Probe:
    """Hooks on every module of ``network``, which change no numbers.

    Tensors are checked in the order in which they are computed: parameters before the step, the network's inputs,
    each module's output, the losses, the gradients of outputs and parameters.
    """

    def __init__(self, network: nn.Module) -> None:
        self.largest: dict[str, float] = {}
        """Module -> largest absolute value in its outputs, since ``begin``; infinite or nan if one of them is."""
        self.not_finite: NotFinite | None = None
        """The first tensor that is not finite, since ``begin``."""
        self.micro_batch = -1
        """Index of the current micro-batch."""
        self._network = network
        network.register_forward_pre_hook(self._inputs)
        for name, module in network.named_modules():
            module.register_forward_hook(partial(self._output, name))
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and not is_sharded(parameter):
                parameter.register_hook(partial(self._check, *_owner(name), "gradient of"))

    def begin(self) -> None:
        """Reset for a new step, and check the parameters that it starts from."""
        self.largest, self.not_finite, self.micro_batch = {}, None, -1
        for name, parameter in self._network.named_parameters():
            shard = parameter.to_local() if is_sharded(parameter) else parameter
            self._check(*_owner(name), "", shard.detach())

    def next(self) -> None:
        """Start the next micro-batch."""
        self.micro_batch += 1

    def loss(self, losses: Tensor) -> None:
        """Check the losses (B,) of the current micro-batch."""
        self._check("", "loss", "", losses.detach(), by_sample=True)

    def _inputs(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for number, tensor in enumerate(inputs):
            self._check("", f"input {INPUTS[min(number, 2)]}", "", tensor, by_sample=True)

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors(output):
            largest = tensor.detach().abs().max().item()
            if not self.largest.get(name, 0.0) > largest:  # (nan is not below anything)
                self.largest[name] = largest
            if not math.isfinite(largest):
                self._check(name, "output", "", tensor.detach(), by_sample=True)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._check, name, "output", "gradient of", by_sample=True))

    def _check(self, module: str, tensor: str, prefix: str, values: Any, by_sample: bool = False) -> None:
        """Record where ``values`` occur if they are the first that are not finite."""
        if self.not_finite is not None or not isinstance(values, Tensor) or not values.is_floating_point():
            return
        finite = torch.isfinite(values)
        if not finite.all():
            rows = (~finite.reshape(len(values), -1).all(1)).nonzero()[:, 0].tolist() if by_sample else []
            self.not_finite = NotFinite(module, f"{prefix} {tensor}".strip(), self.micro_batch, tuple(rows))


def _owner(parameter: str) -> tuple[str, str]:
    """Return the module of a parameter, and the parameter's name in it."""
    module, _, name = parameter.rpartition(".")
    return module, f"parameter {name}"
