"""One optimizer step on MindSpore, and the state for checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from mindspeed_mm_dit.checkpoint import mindspore_ckpt, power_ema
from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.configs.fsdp2 import FLOAT32, Fsdp2Config, Precision
from mindspeed_mm_dit.configs.run import MultiModalArguments, RunConfig
from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.framework.mindspore.optim import trained
from mindspeed_mm_dit.models.data import with_size
from mindspeed_mm_dit.training import contract
from mindspeed_mm_dit.training.contract import EmaModel, ForwardStep, StepResult
from mindspeed_mm_dit.training.dry_run import example
from mindspeed_mm_dit.training.mindspore import flat_optimizer
from mindspeed_mm_dit.training.mindspore.flat_optimizer import group_parameters
from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss, InterpretedLoss

checkpoints: contract.Checkpoints = mindspore_ckpt


class Engine(contract.Engine):
    """The composite on every worker, the flat optimizer, and the EMA."""

    def __init__(
        self,
        model: Any,
        args: RunConfig,
        fsdp2: Fsdp2Config | None,
        precision: Precision = FLOAT32,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        assert precision.mode is None, "runtime.BF16_MODES offers none"
        runtime.allow_tf32(args.tf32)
        if args.torch_compile:
            runtime.compile_blocks(model.blocks)
        self.args, self.model, self.predictor = args, model, model.predictor
        runtime.load_arrays(self.predictor, weights or model.initial_weights(args.seed))
        names, parameters = trained(self.predictor)
        self.parts = group_parameters(
            dict(zip(names, parameters)), model.declared, args, flat_optimizer.ShardGroups.create(fsdp2)
        )
        """The trained parameters, grouped by the rules that step them."""
        self._base_names = {name for name, p in model.declared.items() if not p.saved}
        self._loss = (
            InterpretedLoss(model, parameters)
            if args.pynative
            else CompiledLoss(model, parameters, args.micro_batch_size)
        )
        if isinstance(self._loss, CompiledLoss) and args.mm is not None and runtime.world_size() > 1:
            # On a CPU, workers wait 30 s for each other, and the first step of a shape compiles: compile all now.
            for shape in args.mm.data_set.shapes():
                self._loss.compile(example(model, with_size(args.mm.model, shape), args.micro_batch_size))

    def train_step(self, forward_step: ForwardStep, batches: Iterator[Any], lr: float) -> StepResult:
        count = runtime.num_microbatches()
        gradients: list[Any] = []
        reported = []
        for number in range(count):
            loss, grads = self._loss.gradient(forward_step, batches)
            vectors = [part.vector(grads) / count for part in self.parts]
            gradients = [a + b for a, b in zip(gradients, vectors)] if number else vectors
            reported.append(loss)
        gradients = [runtime.mean_vector_over_ranks(gradient) for gradient in gradients]
        norm = ops.norm(gradients[0] if len(gradients) == 1 else ops.cat(gradients, 0))
        if self.args.clip_grad:
            factor = ops.clamp(self.args.clip_grad / (norm + 1e-6), None, 1.0)
            gradients = [gradient * factor for gradient in gradients]
        for part, gradient in zip(self.parts, gradients):
            part.step(gradient, lr)
        return StepResult(sum(reported) / count, norm)

    def update_power_emas(self, fractions: Sequence[float]) -> None:
        for part in self.parts:
            part.optimizer.update_power_emas(fractions)

    def eval_step(self, forward_step: ForwardStep, batches: Iterator[Any]) -> Tensor:
        count = runtime.num_microbatches()
        return ops.cat([self._loss.sample_losses(forward_step, batches) for _ in range(count)], 0)

    @contextlib.contextmanager
    def ema_weights(self, needs_model: bool) -> Iterator[EmaModel | None]:
        """Let the EMA replace the weights, and yield a model if ``needs_model``; every worker contributes its slice."""
        self._hold("average")
        try:
            yield EmaModel.of(self.model, self._predict) if needs_model else None
        finally:
            self._hold("weights")

    @cached_property
    def _predict(self) -> Any:
        return self.model.predict if self.args.pynative else mindspore.jit(self.model.predict)

    def _hold(self, which: str) -> None:
        """Let the parameters hold the weights, or their EMA."""
        for part in self.parts:
            part.hold(getattr(part.optimizer, which))

    # --- state -------------------------------------------------------------------------------------------

    def state(self, with_optimizer: bool = True) -> dict[str, np.ndarray]:
        state: dict[str, np.ndarray] = {}
        for part in self.parts:
            for tree, vector in part.trees().items():
                state |= {f"{tree}.{name}": array for name, array in part.arrays(vector).items()}
            if with_optimizer:
                state |= {f"optimizer.state.{name}": array for name, array in part.optimizer_state().items()}
        for name, parameter in self.predictor.parameters_and_names():
            if not parameter.requires_grad and name not in self._base_names:
                state |= {f"{tree}.{name}": runtime.to_host(parameter) for tree in self.parts[0].trees()}
        return state

    def load(self, path: Path, with_optimizer: bool) -> None:
        shapes = {name: shape for name, shape in runtime.shapes(self.predictor).items() if name not in self._base_names}
        state = mindspore_ckpt.read_state(path, shapes, with_optimizer)
        has_power_ema = power_ema.STDS in read_facts(path)
        for part in self.parts:
            for tree, vector in part.trees().items():
                there = tree if has_power_ema or tree in ("model", "ema") else "model"
                part.set(vector, {name: state[f"{there}.{name}"] for name in part.names})
            if with_optimizer:
                prefix = "optimizer.state."
                part.load_optimizer_state(
                    {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
                )
        self._hold("weights")

    def num_parameters(self) -> int:
        return sum(p.size for p in self.predictor.get_parameters())


def check_sharding(mm: MultiModalArguments) -> None:
    """Raise ConfigError for a key of fsdp2.yaml that this backend does not support."""
    if mm.fsdp2 is not None:
        flat_optimizer.check(mm.fsdp2)
