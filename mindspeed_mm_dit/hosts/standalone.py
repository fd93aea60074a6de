"""The standalone host: the names, flags and log line of MindSpeed-MM, without MindSpeed-MM."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint.lock import FolderLock
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.data.builtin import remove_written
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import active, runtime
from mindspeed_mm_dit.framework.exits import end, report_error, report_to_launcher
from mindspeed_mm_dit.hosts.preflight import preflight
from mindspeed_mm_dit.hosts.registry import DatasetsProvider, FlagsProvider, Host, ModelType
from mindspeed_mm_dit.models import registry
from mindspeed_mm_dit.training.callbacks.registry import Run, open_callbacks
from mindspeed_mm_dit.training.dry_run import plan_of_run
from mindspeed_mm_dit.training.flags import parse, standalone_parser
from mindspeed_mm_dit.training.log import open_log
from mindspeed_mm_dit.training.loop import engine_module, train
from mindspeed_mm_dit.training.progress import locked_save_folder, open_progress
from mindspeed_mm_dit.training.report import how_to_resume
from mindspeed_mm_dit.training.resume import find_resume_point, print_rank_0, read_initial_weights
from mindspeed_mm_dit.training.signals import StopReason, StopRequest


class Standalone(Host):
    """The standalone host."""

    name = "standalone"
    ModelType, print_rank_0 = ModelType, staticmethod(print_rank_0)

    def __init__(self) -> None:
        self._args: RunConfig | None = None

    def get_args(self) -> RunConfig:
        assert self._args is not None, "pretrain() has not parsed the command line yet"
        return self._args

    def load_encoders(self) -> tuple[Any, Any]:
        """Load the encoders and decoders of this run; if it needs neither, their weights stay on disk."""
        args = self.get_args()
        return registry.load_encoders(args.mm.model, args.mm.encodes or args.sample_interval > 0)

    def average_losses_across_data_parallel_group(self, losses: list[Any]) -> list[Any]:
        return list(runtime.mean_over_ranks(losses))

    def pretrain(
        self,
        train_valid_test_dataset_provider: DatasetsProvider,
        model_provider: Callable[..., Any],
        model_type: Any,
        forward_step_func: Callable[..., Any],
        process_non_loss_data_func: Callable[..., Any] | None = None,
        extra_args_provider: FlagsProvider | None = None,
        args_defaults: dict[str, Any] | None = None,
    ) -> None:
        """Train as the command line specifies (same arguments as MindSpeed-MM's ``pretrain``).

        ``model_type``, ``process_non_loss_data_func`` and ``args_defaults`` matter only to MindSpeed-MM and change
        nothing here. A UserError is printed and ends the process with code 2, before any device work if it can be
        detected by then. A run that received a signal to stop saves, and ends with 128 plus the number of the signal.
        A --dry-run ends with 0 before a model is built.
        """
        try:
            parser = standalone_parser()
            if extra_args_provider is not None:
                extra_args_provider(parser)
            args = self._args = preflight(parse(sys.argv[1:], parser))
        except UserError as error:
            end(error, collective_error=True)
        try:
            if args.dry_run:
                _report_dry_run(args)
                sys.exit(0)
            ended = self._run(train_valid_test_dataset_provider, model_provider, forward_step_func)
        except UserError as error:
            end(error)
        if ended:
            sys.exit(ended.code)

    def _run(
        self,
        dataset_provider: DatasetsProvider,
        model_provider: Callable[..., Any],
        forward_step: Callable[..., Any],
    ) -> StopReason | None:
        args = self.get_args()
        runtime.initialize(
            args.distributed_backend, args.micro_batch_size, args.global_batch_size, args.context_parallel_size
        )
        with StopRequest(args.exit_duration_in_mins) as stop, locked_save_folder(args) as lock:
            ended = self._train(dataset_provider, model_provider, forward_step, stop, lock)
            # The engine is gone by now: DDP, if freed after its process group, can wait for its threads forever.
            runtime.barrier()
            runtime.shutdown()
        return ended

    def _train(
        self,
        dataset_provider: DatasetsProvider,
        model_provider: Callable[..., Any],
        forward_step: Callable[..., Any],
        stop: StopRequest,
        lock: FolderLock | None,
    ) -> StopReason | None:
        """Put the parts of the run together, and train.

        The data set is open by now (``args.mm.data_set``), and every setting has been checked.
        """
        args, started, framework = self.get_args(), time.monotonic(), engine_module()
        _announce(args)
        start = find_resume_point(args, framework.checkpoints)
        first = read_initial_weights(args, start)
        args = replace(args, mm=replace(args.mm, base=first.base))  # which every checkpoint of adapters stores
        model = model_provider()  # autoencoder, text encoders, network and objective
        assert args.mm.precision is not None  # (None only inside MindSpeed-MM)
        engine = framework.Engine(model, args, args.mm.fsdp2, args.mm.precision, first.weights)  # ranks, optimizer, EMA
        print_rank_0(f"predictor: {engine.num_parameters():,} parameters; ready in {time.monotonic() - started:.1f} s")
        progress = open_progress(args, engine, framework.checkpoints, lock, start)
        self._args = replace(args, consumed_train_samples=progress.consumed_samples, start_iteration=progress.iteration)
        train_batches, valid_batches, _ = dataset_provider([args.train_iters * args.global_batch_size, 0, 0])
        with closing(open_log(args, progress.iteration)) as log:
            run = Run(args, engine, forward_step, valid_batches, progress, stop, log)
            run.callbacks = open_callbacks(run)
            ended = _train_and_report(run, train_batches)
        if ended:
            print_rank_0(how_to_resume(args, progress.iteration))
        return ended


def _train_and_report(run: Run, train_batches: Iterator[Any]) -> StopReason | None:
    """Train, and report the error that stopped this rank, if there was one."""
    try:
        ended = train(run, train_batches)
    except UserError:
        run.progress.wait_for_write()
        if run.stop.error:  # the reason why the run was stopped
            report_error(run.stop.error)
        raise
    if ended and ended.error:
        report_to_launcher(ended.error)
        report_error(ended.error)
    return ended


def _report_dry_run(args: RunConfig) -> None:
    """Let the ranks meet, find where they would start, and print what they would do. Leaves no files behind.

    Raises:
        UserError: --load, --save or --init-from cannot be used.
    """
    runtime.initialize(args.distributed_backend, args.micro_batch_size, args.global_batch_size)
    _announce(args)
    start = find_resume_point(args, engine_module().checkpoints)
    read_initial_weights(args, start)
    consumed = start.facts.get("consumed_samples", start.iteration * args.global_batch_size) if start else 0
    print_rank_0(plan_of_run(args, runtime.world_size(), start.iteration if start else 0, consumed))
    runtime.barrier()
    remove_written()
    runtime.shutdown()


def _announce(args: RunConfig) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in runtime.versions().items())
    sequence_ranks = args.context_parallel_size
    groups = "rank(s)" if sequence_ranks == 1 else f"group(s) of {sequence_ranks} ranks that share a sample"
    sharding = f"FSDP2 {args.fsdp2_config_path or 'defaults'}" if args.mm.fsdp2 else "data parallel"
    print_rank_0(
        f"mindspeed_mm_dit {__version__}, host: {Standalone.name}, framework: {active()} ({versions})\n"
        f"{runtime.world_size()} rank(s) on {runtime.device_name()}, {sharding}, {args.mm.precision}, "
        f"global batch {args.global_batch_size} = {args.micro_batch_size} x {runtime.data_parallel_size()} {groups} x "
        f"{runtime.num_microbatches()} micro-batch(es)"
    )
