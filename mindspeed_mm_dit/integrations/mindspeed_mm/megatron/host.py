"""MindSpeed-MM's old route, wrapped as a host for pretrain_dit.py."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import get_args as get_host_args
from megatron.training import print_rank_0
from megatron.training.utils import average_losses_across_data_parallel_group
from mindspeed_mm.configs.config import mm_extra_args_provider
from mindspeed_mm.training import pretrain as pretrain_in_host

from mindspeed_mm_dit.checkpoint.store import COMMAND, RUN_FACTS, CheckpointStore
from mindspeed_mm_dit.configs.run import MultiModalArguments, RunConfig
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import end, exits_on_sigint, process_files
from mindspeed_mm_dit.hosts.registry import DatasetsProvider, FlagsProvider, Host
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.commandline import (
    endless_validation,
    launch_rank,
    parse,
    uses_mindspore,
    validation_step,
)
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.composite import HostedDiT
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.state import RunState, check_checkpoint, check_pickles_of
from mindspeed_mm_dit.integrations.mindspeed_mm.real_memory import real_memory
from mindspeed_mm_dit.models import registry
from mindspeed_mm_dit.training.dry_run import command
from mindspeed_mm_dit.training.resume import check_restorable, run_facts


def note_facts(args: RunConfig, words: Sequence[str]) -> None:
    """Write run.json into every checkpoint of this run that has none; called once training is over.

    words: the command line of pretrain_dit.py, before it was completed for the host.
    A checkpoint without run.json (the run was killed) can still be resumed.
    """
    if args.save is None or runtime.rank() != 0:
        return
    store = CheckpointStore(args.save)
    for iteration in store.iterations():
        path = store.path(iteration) / RUN_FACTS
        if not path.exists():
            path.write_text(
                json.dumps(_facts(args, iteration) | {COMMAND: command(args.save, words)}, indent=1) + "\n",
                encoding="utf-8",
            )


def _facts(args: RunConfig, iteration: int) -> dict[str, object]:
    return {**run_facts(args, iteration, iteration * args.global_batch_size), "host": "MindSpeed-MM"}


class MindSpeedMM(Host):
    """The old route."""

    name = "MindSpeed-MM"
    ModelType, print_rank_0 = ModelType, staticmethod(print_rank_0)

    def __init__(self, words: Sequence[str], mm: MultiModalArguments | None) -> None:
        self._words = tuple(words)
        """The command line, before it was completed for the host."""
        self._mm = mm
        """The checked configs; None if the host only prints its help."""
        self._is_restorable = False
        self._start_iteration: int | None = None

    def get_args(self) -> RunConfig:
        """Return the host's current flags, with our checked configs as ``args.mm``."""
        args = vars(get_host_args())
        assert self._mm is not None, "a host that prints its help does not train"
        if not self._is_restorable:  # not in the preflight, because the host's defaults are known only now
            self._mm.data_set.check(args["global_batch_size"], args["micro_batch_size"])
            check_restorable(RunConfig.of(args, mm=self._mm))
            self._is_restorable = True
        report = args.get("report") if args["ckpt_format"] == "torch_dcp" else None
        if self._start_iteration is None:  # (the host sets it when it has loaded, and counts on from there)
            self._start_iteration = args.get("iteration")
        return RunConfig.of(args, mm=self._mm, report=report, start_iteration=self._start_iteration or 0)

    def load_encoders(self) -> tuple[Any, Any]:
        """Load the encoders of this run, in real memory even while the host builds a model on the meta device."""
        mm = self.get_args().mm
        with real_memory():
            return registry.load_encoders(mm.model, mm.encodes)

    def average_losses_across_data_parallel_group(self, losses: list[Any]) -> Any:
        return average_losses_across_data_parallel_group(losses)

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
        """Train with MindSpeed-MM's ``pretrain``, which has the same arguments."""
        state = RunState()
        hosted: list[HostedDiT] = []
        meeting = ExitStack()

        def provide_model(*args: Any, **kwargs: Any) -> HostedDiT:
            meeting.close()  # the ranks have met
            check_checkpoint(self.get_args())
            process_files.close()  # (the host and we have read model.json)
            model = model_provider(*args, **kwargs)
            if not get_host_args().init_model_with_meta_device:
                runtime.load_arrays(model.predictor, model.initial_weights(get_host_args().seed))
            hosted[:] = [HostedDiT(model, state.averages)]
            return hosted[0]

        def provide_data(num_samples: Any) -> tuple[Any, Any, Any]:
            state.start(hosted[0], get_host_args())  # the model is sharded and loaded by now
            train, valid, test = train_valid_test_dataset_provider(num_samples)
            return train, endless_validation(valid, get_host_args()), test

        def forward_step(batches: Any, model: Any) -> Any:
            state.averages()
            if model.training:
                return forward_step_func(batches, model)
            return validation_step(forward_step_func, batches, model)

        def add_flags(parser: ArgumentParser) -> ArgumentParser:
            parser = mm_extra_args_provider(parser)
            return extra_args_provider(parser) if extra_args_provider else parser

        provide_data.is_distributed = True  # type: ignore[attr-defined]
        try:
            if launch_rank()[0] == 0 and not uses_mindspore(sys.argv[1:]):  # (MSAdapter has no torch_dcp)
                check_pickles_of(parse(sys.argv[1:]).load)
            meeting.enter_context(exits_on_sigint())
            pretrain_in_host(
                provide_data,
                provide_model,
                model_type,
                forward_step,
                process_non_loss_data_func,
                extra_args_provider=add_flags,
                args_defaults=args_defaults,
            )
        except UserError as error:
            end(error)
        note_facts(self.get_args(), self._words)
