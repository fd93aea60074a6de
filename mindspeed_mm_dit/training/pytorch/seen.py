"""What a step of an engine did: the gradients that the optimizer was given, the weights and their average after it."""

from __future__ import annotations

import sys
from collections import defaultdict
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


class Watch:
    """What each module of ``network`` was given back and gave, in the first step, by sample.

    Of the micro-batches of a step the outputs stand one after the other. A module that is called several times for a
    micro-batch is watched the first time; recomputation calls it again, with the same result.

    Args:
        inside: whether a module is watched, by its name; what is compiled is not looked into.
    """

    def __init__(self, network: nn.Module, is_watched: Any = lambda name: True) -> None:
        self._found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        self._micro_batch = -1
        self._network = network
        self._hooks = [network.register_forward_pre_hook(self._inputs)]
        for name, module in network.named_modules():
            if is_watched(name):
                self._hooks.append(module.register_forward_hook(partial(self._output, name)))
                self._hooks.append(module.register_full_backward_hook(partial(self._gradients, name)))

    def next(self) -> None:
        """Count up the micro-batches."""
        self._micro_batch += 1

    def end(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()

    def arrays(self) -> Arrays:
        """Return ``input/NUMBER``, ``out/MODULE``, ``given/MODULE`` and ``back/MODULE``: gradients of its output and of
        its input; in the order in which they were computed."""
        return {name: np.concatenate([each[n] for n in sorted(each)]) for name, each in self._found.items()}

    def _inputs(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for number, tensor in enumerate(inputs):
            self._keep(f"input/{number}", tensor)

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors(output):
            self._keep(f"out/{name}", tensor)
            return

    def _gradients(self, name: str, module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        for kind, gradients in (("given", of_outputs), ("back", of_inputs)):
            for tensor in tensors(gradients):
                self._keep(f"{kind}/{name}", tensor)
                break

    def _keep(self, name: str, values: Any) -> None:
        if isinstance(values, Tensor) and values.ndim and self._micro_batch not in self._found[name]:
            self._found[name][self._micro_batch] = whole(values)


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
