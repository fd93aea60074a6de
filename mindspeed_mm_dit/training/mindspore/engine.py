"""One optimizer step on MindSpore, and the state it leaves behind."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops

from mindspeed_mm_dit.checkpoint import mindspore_ckpt as checkpoints
from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.precision import FLOAT32, Precision
from mindspeed_mm_dit.framework.mindspore import runtime
from mindspeed_mm_dit.framework.mindspore.optim import trained
from mindspeed_mm_dit.training.contract import AveragedModel, ForwardStep, StepResult
from mindspeed_mm_dit.training.mindspore import sharding
from mindspeed_mm_dit.training.mindspore.adamw import FlatAdamW
from mindspeed_mm_dit.training.mindspore.flat import Layout
from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss, InterpretedLoss
from mindspeed_mm_dit.training.mm_args import MultiModalArguments

__all__ = ["Engine", "StepResult", "check_sharding", "checkpoints"]


class Engine:
    """The composite on every worker, the flat optimizer, and the moving average."""

    def __init__(
        self,
        model: Any,
        args: Namespace,
        fsdp2: Fsdp2Config | None,
        precision: Precision = FLOAT32,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        assert precision.way is None, "runtime.WAYS_TO_BF16 offers none"
        runtime.allow_tf32(args.tf32)
        if args.torch_compile:
            runtime.compile_blocks(model.blocks)
        self.args, self.model, self.predictor = args, model, model.predictor
        names, self._parameters = trained(self.predictor)
        shapes = {name: tuple(p.shape) for name, p in zip(names, self._parameters)}
        runtime.load_arrays(self.predictor, weights or model.initial_weights(args.seed))
        self._shards = sharding.Shards.create(fsdp2)
        self.layout = Layout(tuple(names), tuple(shapes.values()), self._shards.count)
        self.optimizer = self._build_optimizer()
        self._loss = (
            InterpretedLoss(model, self._parameters)
            if args.pynative
            else CompiledLoss(model, self._parameters, args.micro_batch_size)
        )

    def _build_optimizer(self) -> FlatAdamW:
        args, layout = self.args, self.layout
        decay = {
            name: np.full(shape, args.weight_decay if len(shape) >= 2 else 0.0)
            for name, shape in zip(layout.names, layout.shapes)
        }
        weights = {name: runtime.to_host(p) for name, p in zip(layout.names, self._parameters)}
        own_weights, own_decay = (self._shards.own(layout.from_arrays(arrays)) for arrays in (weights, decay))
        betas = (args.adam_beta1, args.adam_beta2)
        return FlatAdamW(own_weights, own_decay, betas, args.adam_eps, args.ema_decay, len(args.power_ema_stds))

    def train_step(self, forward_step: ForwardStep, batches: Iterator[Any], lr: float) -> StepResult:
        """Accumulate the gradients of a global batch, clip, step, and update the moving average."""
        count = runtime.num_microbatches()
        gradient, reported = None, []
        for _ in range(count):
            loss, found = self._loss.gradient(forward_step, batches)
            vector = self.layout.vector(found) / count
            gradient = vector if gradient is None else gradient + vector
            reported.append(loss)
        gradient = runtime.mean_vector_over_ranks(gradient)
        norm = ops.norm(gradient)
        if self.args.clip_grad:
            gradient = gradient * ops.clamp(self.args.clip_grad / (norm + 1e-6), None, 1.0)
        own = self.optimizer.step(self._shards.own(gradient), lr)
        self.layout.assign(self._parameters, self._shards.whole(own))
        return StepResult(sum(reported) / count, norm)

    def move_power_averages(self, shares: Sequence[float]) -> None:
        """Move the average of each of --power-ema-stds this share of the way to the weights."""
        self.optimizer.move_power_averages(shares)

    def eval_step(self, forward_step: ForwardStep, batches: Iterator[Any]) -> Tensor:
        """Return the loss of each sample of this worker's part of a global batch, (B,)."""
        count = runtime.num_microbatches()
        return ops.cat([self._loss.of_samples(forward_step, batches) for _ in range(count)], 0)

    @contextlib.contextmanager
    def averaged(self, wanted: bool) -> Iterator[AveragedModel | None]:
        """Let the averages stand in for the weights where it is ``wanted``; every worker hands in its slice."""
        self._assign(self.optimizer.average)
        try:
            model = AveragedModel(self.model.ae, self.model.diffusion, self._predict, self.model.text_encoders)
            yield model if wanted else None
        finally:
            self._assign(self.optimizer.weights)

    @cached_property
    def _predict(self) -> Any:
        return self.model.predict if self.args.pynative else mindspore.jit(self.model.predict)

    def _assign(self, vector: Any) -> None:
        self.layout.assign(self._parameters, self._shards.whole(vector.value()))

    # --- state -------------------------------------------------------------------------------------------

    def state(self, with_optimizer: bool = True) -> dict[str, np.ndarray]:
        """Return every array a resumed run needs, under the names of the checkpoint; every worker must call this."""
        vectors = {"model": self.optimizer.weights, "ema": self.optimizer.average, **self._power_averages()}
        weights = tuple(vectors)
        if with_optimizer:
            vectors |= {"exp_avg": self.optimizer.exp_avg, "exp_avg_sq": self.optimizer.exp_avg_sq}
        trees = {
            kind: self.layout.arrays(runtime.to_host(self._shards.whole(vector))) for kind, vector in vectors.items()
        }
        state = {f"{tree}.{name}": array for tree in weights for name, array in trees[tree].items()}
        for name, parameter in self.predictor.parameters_and_names():
            if not parameter.requires_grad:
                state |= {f"{tree}.{name}": runtime.to_host(parameter) for tree in weights}
        if with_optimizer:
            for name in self.layout.names:
                state |= {f"optimizer.state.{name}.{kind}": trees[kind][name] for kind in ("exp_avg", "exp_avg_sq")}
                state[f"optimizer.state.{name}.step"] = np.array(self.optimizer.steps, np.float32)
        return state

    def load(self, path: Path, with_optimizer: bool) -> None:
        """Continue from the checkpoint ``path``; its architecture must be this model's."""
        state = checkpoints.read_state(path, runtime.shapes(self.predictor), with_optimizer)
        self._set(self.optimizer.weights, {name: state[f"model.{name}"] for name in self.layout.names})
        self._set(self.optimizer.average, {name: state[f"ema.{name}"] for name in self.layout.names})
        has_power_ema = power_ema.STDS in read_facts(path)
        for tree, average in self._power_averages().items():
            tree = tree if has_power_ema else "model"
            self._set(average, {name: state[f"{tree}.{name}"] for name in self.layout.names})
        if with_optimizer:
            for kind in ("exp_avg", "exp_avg_sq"):
                arrays = {name: state[f"optimizer.state.{name}.{kind}"] for name in self.layout.names}
                self._set(getattr(self.optimizer, kind), arrays)
            self.optimizer.steps = int(state[f"optimizer.state.{self.layout.names[0]}.step"])
        self._assign(self.optimizer.weights)

    def _power_averages(self) -> dict[str, Any]:
        averages = self.optimizer.power_averages
        return dict(zip(power_ema.trees(len(averages)), averages))

    def _set(self, vector: Any, arrays: dict[str, np.ndarray]) -> None:
        ops.assign(vector, Tensor(self._shards.own(self.layout.from_arrays(arrays))))

    def num_parameters(self) -> int:
        """Return the number of parameters of the predictor."""
        return sum(p.size for p in self.predictor.get_parameters())


def check_sharding(mm: MultiModalArguments) -> None:
    """Raise ConfigError for a key of fsdp2.yaml that this backend cannot honour."""
    if mm.fsdp2 is not None:
        sharding.check(mm.fsdp2)
