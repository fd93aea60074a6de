"""Set up a run of the standalone host and compute some of its steps, for commands that observe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.preflight import preflight
from mindspeed_mm_dit.hosts.standalone import build_engine
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.registry import load_encoders
from mindspeed_mm_dit.training.batches import train_valid_batches
from mindspeed_mm_dit.training.contract import ForwardStep, engine_module
from mindspeed_mm_dit.training.initial_weights import First, first_weights
from mindspeed_mm_dit.training.lr import LearningRate
from mindspeed_mm_dit.training.resume import Start, check_fits

Tensor = Any


class StepNumbers(NamedTuple):
    """The numbers of a step, as a run logs them."""

    iteration: int
    loss: float
    grad_norm: float
    began_at: int
    """Number of samples before the step."""


def join(args: RunConfig) -> RunConfig:
    """Check the run, join the other ranks, and return the run with its configs."""
    args = preflight(args)
    runtime.initialize(
        args.distributed_backend, args.micro_batch_size, args.global_batch_size, args.context_parallel_size
    )
    return args


def begin(
    args: RunConfig,
    start: Start | None = None,
    prepare: Callable[[Any], Any] = lambda model: model,
    first: First | None = None,
) -> Any:
    """Return the engine of a run that has joined.

    prepare: receives the composite before it is sharded, and returns the one to use. first: the initial weights; None:
    those of the run.
    """

    def build_model() -> Any:
        return prepare(DiTModel(args.mm.model, *load_encoders(args.mm.model, args.mm.encodes)))

    engine = build_engine(args, engine_module(), build_model, first or first_weights(args, start))
    if start is not None:
        engine.load(start.path, with_optimizer=not args.no_load_optim)
    return engine


def starting(args: RunConfig, checkpoint: Path | None) -> Start | None:
    """Return the point from which a run that has joined resumes, checked against its flags; None: the beginning."""
    if checkpoint is None:
        return None
    start = Start(checkpoint, int(checkpoint.name[5:]), read_facts(checkpoint))
    check_fits(args, start, engine_module().checkpoints)
    return start


def steps_after(args: RunConfig, engine: Any, start: Start | None, step: ForwardStep) -> Iterator[StepNumbers]:
    """Take the steps of a run after ``start``, one per item of this iterator."""
    done = start.iteration if start else 0
    began_at = (start.facts if start else {}).get("consumed_samples", done * args.global_batch_size)
    batches, _ = train_valid_batches(replace(args, consumed_train_samples=began_at))
    schedule = LearningRate.of(args)
    while True:
        result = engine.train_step(step, batches, schedule.at(done))
        done += 1
        loss, grad_norm = runtime.read_later([result.loss, result.grad_norm]).wait()
        yield StepNumbers(done, loss, grad_norm, began_at)
        began_at += args.global_batch_size


def script(
    see: Callable[[Tensor], None],
    next_batch: Callable[[], None] = lambda: None,
    losses_of: Callable[..., Tensor] = lambda model, batch: model(**batch),
) -> ForwardStep:
    """Return the forward step of pretrain_dit.py; it passes the losses (B,) to ``see``."""

    def loss_func(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.mean()
        return loss, {"loss": runtime.mean_over_ranks([loss])[0]}

    def forward_step(batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        next_batch()
        losses = losses_of(model, runtime.to_device(batch))
        see(losses)
        return losses, loss_func

    return forward_step
