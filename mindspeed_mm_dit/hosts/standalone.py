"""Our own host: MindSpeed-MM's names, flags and log line, without MindSpeed-MM.

A training script written for one host runs in the other: ``pretrain`` has the same signature, and
``get_args``, ``print_rank_0`` and ``average_losses_across_data_parallel_group`` mean the same. ``load_encoders`` is
a name of our own: how weights get into memory while a model is built is the host's business.
"""

from __future__ import annotations

import importlib
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from enum import Enum
from typing import Any

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.hosts.ending import end, leave_for_launcher, say
from mindspeed_mm_dit.hosts.standalone_preflight import preflight
from mindspeed_mm_dit.models import registry
from mindspeed_mm_dit.training.beginning import first_weights
from mindspeed_mm_dit.training.contract import Engine, EngineModule
from mindspeed_mm_dit.training.dry_run import plan_of_run
from mindspeed_mm_dit.training.flags import standalone_parser
from mindspeed_mm_dit.training.loop import train
from mindspeed_mm_dit.training.progress import claimed_save, open_progress
from mindspeed_mm_dit.training.report import how_to_resume
from mindspeed_mm_dit.training.signals import Stop, StopRequest
from mindspeed_mm_dit.training.start import Start, find_start, print_rank_0

NAME = "standalone"

_args: Namespace | None = None


class ModelType(Enum):
    """Megatron's kinds of model; a DiT is the first."""

    encoder_or_decoder = 1


def get_args() -> Namespace:
    """Return the flags of this run; ``args.mm`` holds the config files."""
    assert _args is not None, "pretrain() has not parsed the command line yet"
    return _args


def load_encoders() -> tuple[Any, tuple[Any, ...]]:
    """Load what encodes and decodes for this run; where neither is done, weights stay on disk."""
    args = get_args()
    return registry.load_encoders(args.mm.model, args.mm.encodes or args.sample_interval > 0)


def average_losses_across_data_parallel_group(losses: list[Any]) -> list[Any]:
    """Average scalar losses over the ranks."""
    return list(runtime.mean_over_ranks(losses))


def pretrain(
    train_valid_test_dataset_provider: Callable[[Any], tuple[Any, Any, Any]],
    model_provider: Callable[..., Any],
    model_type: ModelType,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: dict[str, Any] | None = None,
) -> None:
    """Train as the command line says (MindSpeed-MM's ``pretrain``, same arguments).

    ``model_type``, ``process_non_loss_data_func`` and ``args_defaults`` are the real host's business and change
    nothing here. A UserError is printed and ends the process with code 2, before any device work if it can be
    seen by then. A run that was asked to stop is saved, and ends with 128 and the number of the signal; a --dry-run
    ends with 0 before a model is built.
    """
    try:
        args = _parse(extra_args_provider)
        args.mm = preflight(args)
    except UserError as error:
        end(error, found_by_all=True)
    try:
        if args.dry_run:
            _say_what_would_run(args)
            sys.exit(0)
        ended = _run(args, train_valid_test_dataset_provider, model_provider, forward_step_func)
    except UserError as error:
        end(error)
    if ended:
        sys.exit(ended.code)


def _parse(extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None) -> Namespace:
    global _args
    parser = standalone_parser()
    if extra_args_provider is not None:
        extra_args_provider(parser)
    _args = parser.parse_strictly(sys.argv[1:])
    return _args


def _say_what_would_run(args: Namespace) -> None:
    """Let the ranks meet and find where they would start, and say what they would do; the --save folder stays as it is.

    Raises:
        UserError: whatever is wrong with --load, --save or --init-from.
    """
    engine_module: EngineModule = importlib.import_module(f"mindspeed_mm_dit.training.{active()}.engine")
    runtime.initialize(args.distributed_backend, args.micro_batch_size, args.global_batch_size)
    _announce(args)
    start = find_start(args, engine_module.checkpoints)
    first_weights(args, start)
    consumed = start.facts.get("consumed_samples", start.iteration * args.global_batch_size) if start else 0
    print_rank_0(plan_of_run(args, runtime.world_size(), start.iteration if start else 0, consumed))
    runtime.barrier()
    runtime.shutdown()


def _run(
    args: Namespace,
    dataset_provider: Callable[[Any], tuple[Any, Any, Any]],
    model_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
) -> Stop | None:
    started = time.monotonic()
    engine_module: EngineModule = importlib.import_module(f"mindspeed_mm_dit.training.{active()}.engine")
    runtime.initialize(
        args.distributed_backend, args.micro_batch_size, args.global_batch_size, args.context_parallel_size
    )
    with StopRequest(args.exit_duration_in_mins) as stop, claimed_save(args) as claim:
        _announce(args)
        start = find_start(args, engine_module.checkpoints)
        engine = _build_engine(args, engine_module, model_provider, start)
        print_rank_0(f"predictor: {engine.num_parameters():,} parameters; ready in {time.monotonic() - started:.1f} s")
        progress = open_progress(args, engine, engine_module.checkpoints, claim, start)
        args.consumed_train_samples = progress.consumed_samples
        train_batches, valid_batches, _ = dataset_provider([args.train_iters * args.global_batch_size, 0, 0])
        try:
            ended = train(args, engine, forward_step, train_batches, valid_batches, progress, stop)
        except UserError:
            progress.let_the_write_end()
            if stop.error:  # which asked the run to end
                say(stop.error)
            raise
        if ended and ended.error:
            leave_for_launcher(ended.error)
            say(ended.error)
        if ended:
            print_rank_0(how_to_resume(args, progress.iteration))
        runtime.barrier()
        runtime.shutdown()
    return ended


def _build_engine(
    args: Namespace, engine_module: EngineModule, model_provider: Callable[..., Any], start: Start | None
) -> Engine:
    weights = first_weights(args, start)  # before there is a model: what cannot be read costs nothing
    return engine_module.Engine(model_provider(), args, args.mm.fsdp2, args.mm.precision, weights)


def _announce(args: Namespace) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in runtime.versions().items())
    shared = args.context_parallel_size
    groups = "rank(s)" if shared == 1 else f"group(s) of {shared} ranks that share a clip"
    sharding = f"FSDP2 {args.fsdp2_config_path or 'defaults'}" if args.mm.fsdp2 else "data parallel"
    print_rank_0(
        f"mindspeed_mm_dit {__version__}, host: {NAME}, framework: {active()} ({versions})\n"
        f"{runtime.world_size()} rank(s) on {runtime.device_name()}, {sharding}, {args.mm.precision}, "
        f"global batch {args.global_batch_size} = {args.micro_batch_size} x {runtime.data_world_size()} {groups} x "
        f"{runtime.num_microbatches()} micro-batch(es)"
    )


__all__ = [
    "NAME",
    "ModelType",
    "average_losses_across_data_parallel_group",
    "get_args",
    "load_encoders",
    "pretrain",
    "print_rank_0",
]
