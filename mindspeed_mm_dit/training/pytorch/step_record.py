"""What a step of an engine did: the gradients that the optimizer was given, the weights and their average after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed_mm_dit.framework.pytorch.sharded import is_sharded
from mindspeed_mm_dit.training.pytorch.engine import Engine

Arrays = dict[str, np.ndarray]
IS_DIVIDED_AFTER = False
"""Whether what goes back through modules is divided by the number of micro-batches afterwards."""


class Seen:
    """Looks at ``engine`` from outside. Every rank must ask for the same, and gets whole arrays."""

    def __init__(self, engine: Engine) -> None:
        self.gradients: Arrays = {}
        """Of the first step, by parameter, as the optimizer was given them: reduced and clipped."""
        self._engine = engine
        self._names = {parameter: name for name, parameter in engine.predictor.named_parameters()}
        for optimizer in engine.optimizer.optimizers:
            optimizer.register_step_pre_hook(self._note)

    def tree(self, name: str) -> Arrays:
        """Return "model", the weights, or "ema", their average, by parameter."""
        return {parameter: whole(tensor) for parameter, tensor in self._engine.state(False)[name].items()}

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and self._names[p] not in self.gradients:
                self.gradients[self._names[p]] = whole(p.grad)


class Roundings:
    """Moves what every module gives, each gradient that comes back to it, and the weights and their gradients by up to
    ``size`` of itself, at random: what rounding does, as much larger as is asked for (Parker 1997).

    Constants, and the weights that the optimizer is given, are moved by ``kept`` alone: they are kept in float32
    whatever is computed in. (An error of an angle's frequency grows with the time, to thousands of roundings.)
    """

    def __init__(self, engine: Engine, size: float, kept: float, seed: int) -> None:
        self._size, self._kept, self._draw = size, kept, torch.Generator().manual_seed(seed)
        self._parameters, self._own = list(engine.predictor.parameters()), dict[Tensor, Tensor]()
        for module in engine.predictor.modules():
            module.register_forward_hook(self._output)
        for optimizer in engine.optimizer.optimizers:
            optimizer.register_step_pre_hook(self._step)
        for constant in (b for module in (engine.predictor, engine.model.diffusion) for b in module.buffers()):
            if constant.is_floating_point():
                constant.copy_(self._moved(constant, kept))

    @torch.no_grad()
    def begin(self) -> None:
        """Move the weights, for the step that begins."""
        for parameter in self._parameters:
            self._own[parameter] = parameter.clone()
            parameter.copy_(self._moved(parameter, self._size))

    def _output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        output = self._moved(output, self._size)
        if output.requires_grad:
            output.register_hook(partial(self._moved, size=self._size))
        return output

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.copy_(self._moved(self._own[p], self._kept))
            if p.grad is not None:
                p.grad = self._moved(p.grad, self._size)

    def _moved(self, x: Tensor, size: float) -> Tensor:
        share = torch.rand(x.shape, generator=self._draw, dtype=x.dtype) * 2 - 1
        return x * (1 + size * share.to(x.device))


def look_everywhere(before: Any, after: Any, step: Any) -> None:
    """Call ``before`` and ``after`` with every forward pass of every module, and ``step`` before optimizers step."""
    register_module_forward_pre_hook(before)
    register_module_forward_hook(after)
    register_optimizer_step_pre_hook(step)


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by the names that its checkpoints have."""
    return {n: p for n, p in model.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}


def tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of numbers in what a module gives."""
    for tensor in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            yield tensor


def whole(tensor: Any) -> np.ndarray:
    """Return a tensor, sharded or not, as an array; what has less than 32 bits comes as float32."""
    full = tensor.detach()
    full = full.full_tensor() if is_sharded(full) else full
    if full.is_floating_point() and full.dtype.itemsize < 4:
        full = full.float()
    return np.array(full.cpu().numpy())


def in_float64(model: nn.Module) -> nn.Module:
    """Let a composite compute in float64; what is frozen makes the data that it is given, and stays."""
    return model.double()


def losses_in_float64(model: Any, batch: Any) -> Tensor:
    """Return the loss of each sample of ``batch``, (B,) float64."""
    latents, *given = (x.double() if x.is_floating_point() else x for x in (model.latents(batch), *model.given(batch)))
    return model.losses(latents, *given)


def forget() -> None:
    """Let what was compiled for one layout be compiled anew for the next."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
