"""One optimizer step on PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.configs.fsdp2 import FLOAT32, Fsdp2Config, Precision
from mindspeed_mm_dit.configs.run import MultiModalArguments, RunConfig
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.framework.pytorch.optim import is_fsdp, is_sharded, split_by_kind
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import build_predictor
from mindspeed_mm_dit.planning import offloaded_blocks
from mindspeed_mm_dit.training import contract
from mindspeed_mm_dit.training.contract import EmaModel, ForwardStep, StepResult
from mindspeed_mm_dit.training.pytorch.parallel import (
    BlockOffload,
    average_ignored,
    check_paths,
    check_recompute,
    replicate,
    reshard,
    shard,
    unwrap,
)
from mindspeed_mm_dit.training.pytorch.stepper import TrainState

checkpoints: contract.Checkpoints = torch_dcp


class Engine(TrainState, contract.Engine):
    """The composite spread over the ranks, its optimizer and its EMA."""

    def __init__(
        self,
        model: nn.Module,
        args: RunConfig,
        fsdp2: Fsdp2Config | None,
        precision: Precision = FLOAT32,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.args = args
        runtime.allow_tf32(args.tf32)
        runtime.load_arrays(model.predictor, weights or model.initial_weights(args.seed))  # the same on every rank
        if args.torch_compile:
            runtime.compile_blocks(model.blocks, len(args.mm.data.dataset_param.sizes) if args.mm else 1)
        if args.offload_blocks:
            modules, waiting = dict(model.predictor.named_modules()), model.declared.blocks
            BlockOffload([modules[name] for name in offloaded_blocks(args.offload_blocks, waiting)])
        self.model = shard(model, fsdp2) if fsdp2 else replicate(model)
        super().__init__(unwrap(self.model).predictor, model.declared, args)
        self._autocast = precision.mode == "autocast"  # (with FSDP2, fsdp2.yaml decides the precision)

    def train_step(self, forward_step: ForwardStep, batches: Iterator[Any], lr: float) -> StepResult:
        count = runtime.num_microbatches()
        if self.optimizer.switches:
            reshard(self.model)  # a validation may have left weights gathered, and these are others
            self.optimizer.train()
        reported = []
        for number in range(count):
            with self._gradient_sync(is_last=number == count - 1):
                with self._precision():
                    output, loss_func = forward_step(batches, self.model)
                    loss, metrics = loss_func(output)
                (loss / count).backward()
            reported.append(metrics["loss"])
        average_ignored(self.model)
        grad_norm = self._clip()
        self.optimizer.step(lr)
        self.ema.update()
        return StepResult(torch.stack(reported).mean(), grad_norm)

    def update_power_emas(self, fractions: Sequence[float]) -> None:
        self.power_ema.move(fractions)

    def eval_step(self, forward_step: ForwardStep, batches: Iterator[Any]) -> Tensor:
        losses = []
        for _ in range(runtime.num_microbatches()):
            with torch.no_grad(), self._precision():
                losses.append(forward_step(batches, self.model)[0])
        return torch.cat(losses)

    @contextlib.contextmanager
    def ema_weights(self, needs_model: bool) -> Iterator[EmaModel | None]:
        """Let the EMA replace the weights if ``needs_model``, or if other ranks need this one for it."""
        is_needed = is_fsdp(self.model) or runtime.data_parallel_size() < runtime.world_size()
        if not (needs_model or is_needed):
            yield None
            return
        composite: Any = unwrap(self.model)

        def predict(*inputs: Tensor) -> Tensor:
            with self._precision():
                return composite.predict(*inputs)

        reshard(self.model)  # a validation may have left the weights gathered
        with self.ema.swapped_in():
            try:
                yield EmaModel.of(composite, predict)
            finally:
                reshard(self.model)  # else the gathered EMA weights would be trained

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(runtime.device_type(), torch.bfloat16, enabled=self._autocast)

    def _gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Average gradients over copies of the model once per step; between shards they are reduced as they come."""
        if isinstance(self.model, DistributedDataParallel) and not is_last:
            return self.model.no_sync()
        if is_fsdp(self.model):
            self.model.set_is_last_backward(is_last)
            self.model.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()

    def _clip(self) -> Tensor:
        gradients = split_by_kind(p.grad for p in self.predictor.parameters() if p.grad is not None)
        norm = torch.stack([_whole(nn.utils.get_total_norm(kind)) for kind in gradients]).norm()
        if self.args.clip_grad:
            for kind in gradients:
                torch._foreach_mul_(kind, (self.args.clip_grad / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _whole(norm: Tensor) -> Tensor:
    """Return the norm over all shards."""
    return norm.full_tensor() if is_sharded(norm) else norm


def check_sharding(mm: MultiModalArguments) -> None:
    """Raise ConfigError if fsdp2.yaml does not fit the model; the check allocates no weights."""
    if mm.fsdp2 is not None:
        with torch.device("meta"):
            predictor = build_predictor(mm.model)
        check_recompute(mm.fsdp2, parameters_of(mm.model))
        modules = {f"predictor.{name}" if name else "predictor": module for name, module in predictor.named_modules()}
        check_paths(mm.fsdp2, modules)
