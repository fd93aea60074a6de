"""A record of an engine's step: the gradients that the optimizer got, and the weights and EMA after it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.framework.pytorch.optim import is_sharded
from mindspeed_mm_dit.tools.verify import pytorch
from mindspeed_mm_dit.training.pytorch.engine import Engine

Arrays = dict[str, np.ndarray]
whole = pytorch.to_numpy
stay_on_host = runtime.use_cpu_only
IS_DIVIDED_AFTER = False
"""Whether gradients are divided by the number of micro-batches only after they went back through the modules."""


class StepObserver:
    """Observes ``engine`` from outside. Every rank must make the same calls, and gets whole arrays."""

    def __init__(self, engine: Engine) -> None:
        self.gradients: Arrays = {}
        """Gradients of the first step, by parameter, as the optimizer got them: reduced and clipped."""
        self._engine = engine
        self._names = {parameter: name for name, parameter in engine.predictor.named_parameters()}
        for optimizer in engine.optimizer.optimizers:
            optimizer.register_step_pre_hook(self._note)

    def tree(self, name: str) -> Arrays:
        """Return the weights ("model") or their EMA ("ema"), by parameter."""
        return {parameter: whole(tensor) for parameter, tensor in self._engine.state(False)[name].items()}

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and self._names[p] not in self.gradients:
                self.gradients[self._names[p]] = whole(p.grad)


class RoundingNoise(pytorch.RoundingNoise):
    """Perturbs the numbers of an engine's step: also the weights and their gradients, by up to ``size`` of themselves.

    Constants, and the weights that the optimizer gets, change by ``float32_size`` only, because they are float32 in
    every precision. (An error of a sinusoid's frequency grows with the timestep, to thousands of roundings.)
    """

    def __init__(self, engine: Engine, size: float, float32_size: float, seed: int) -> None:
        super().__init__(engine.predictor, size, seed)
        self._float32_size = float32_size
        self._parameters, self._originals = list(engine.predictor.parameters()), dict[Tensor, Tensor]()
        for optimizer in engine.optimizer.optimizers:
            optimizer.register_step_pre_hook(self._step)
        for constant in (b for module in (engine.predictor, engine.model.diffusion) for b in module.buffers()):
            if constant.is_floating_point():
                self.perturb_in_place(constant, float32_size)

    def begin(self) -> None:
        """Perturb the weights for the next step."""
        for parameter in self._parameters:
            self._originals[parameter] = parameter.detach().clone()
            self.perturb_in_place(parameter, self._size)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.copy_(self.perturbed(self._originals[p], self._float32_size))
            if p.grad is not None:
                p.grad = self.perturbed(p.grad, self._size)


def hook_everything(before: Any, after: Any, step: Any) -> None:
    """Call ``before`` and ``after`` around every module's forward pass, and ``step`` before optimizers step."""
    register_module_forward_pre_hook(before)
    register_module_forward_hook(after)
    register_optimizer_step_pre_hook(step)


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by their names in its checkpoints."""
    return {n: p for n, p in model.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}


def tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a module's output."""
    for tensor in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            yield tensor


def in_float64(model: nn.Module) -> nn.Module:
    """Make a composite compute in float64; frozen modules, which compute its inputs, are unchanged."""
    return model.double()


def losses_in_float64(model: Any, batch: Any) -> Tensor:
    """Return the loss of each sample of ``batch``, (B,) float64."""
    latents, *inputs = (
        x.double() if x.is_floating_point() else x for x in (model.latents(batch), *model.loss_inputs(batch))
    )
    return model.losses(latents, *inputs)


def forget() -> None:
    """Drop what was compiled for one layout, so that the next one compiles again."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


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
