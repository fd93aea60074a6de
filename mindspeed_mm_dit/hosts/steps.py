"""A run of the standalone host up to its steps, for commands that take some of them and look on."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.hosts.standalone import build_engine
from mindspeed_mm_dit.hosts.standalone_preflight import preflight
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.registry import load_encoders
from mindspeed_mm_dit.training.contract import EngineModule, ForwardStep
from mindspeed_mm_dit.training.start import Start

Tensor = Any


def join(args: Namespace) -> None:
    """Check the flags, and meet the other ranks."""
    args.mm = preflight(args)
    runtime.initialize(
        args.distributed_backend, args.micro_batch_size, args.global_batch_size, args.context_parallel_size
    )


def begin(args: Namespace, start: Start | None = None, made: Callable[[Any], Any] = lambda model: model) -> Any:
    """Return the engine of a run that has joined; ``made`` is given the composite before it is spread."""
    engine_module: EngineModule = importlib.import_module(f"mindspeed_mm_dit.training.{active()}.engine")

    def provided() -> Any:
        return made(DiTModel(args.mm.model, *load_encoders(args.mm.model, args.mm.encodes)))

    engine = build_engine(args, engine_module, provided, start)
    if start is not None:
        engine.load(start.path, with_optimizer=not args.no_load_optim)
    return engine


def script(
    see: Callable[[Tensor], None],
    next_batch: Callable[[], None] = lambda: None,
    losses_of: Callable[..., Tensor] = lambda model, batch: model(**batch),
) -> ForwardStep:
    """Return what pretrain_dit.py does with a micro-batch; ``see`` is told of the losses (B,)."""

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
