"""The native engine wrapped as a host for pretrain_dit.py: its ``pretrain`` runs upstream's trainer.py."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import end, raise_when_interrupted, written
from mindspeed_mm_dit.framework.launched import launched_alone
from mindspeed_mm_dit.hosts.contract import ModelType
from mindspeed_mm_dit.hosts.preflight import with_report
from mindspeed_mm_dit.integrations.mindspeed_mm.native import commandline
from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import NAME, trainer_script
from mindspeed_mm_dit.terminal import echo_if_open
from mindspeed_mm_dit.training.resume import print_rank_0


class NativeEngine:
    """The engine, an implementation of ``contract.Host``.

    Model and data come from the plugin that the yaml names, not from the providers that other hosts use.
    """

    name = NAME
    ModelType, print_rank_0 = ModelType, staticmethod(print_rank_0)

    def __init__(self) -> None:
        self._args: RunConfig | None = None

    def get_args(self) -> RunConfig:
        """Return the flags of this run; ``args.mm`` holds the config files once the engine has read its yaml."""
        assert self._args is not None, "pretrain() has not parsed the command line yet"
        from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import current

        run = current()
        start_iteration = run.consumed_samples // self._args.global_batch_size
        return replace(self._args, mm=run.flags.mm, start_iteration=start_iteration)

    def load_encoders(self) -> tuple[Any, Any]:
        """Load the encoders of this run, in real memory even while the engine builds a model on the meta device."""
        from mindspeed_mm_dit.integrations.mindspeed_mm.native.model import load_encoders

        return load_encoders(self.get_args().mm)

    def average_losses_across_data_parallel_group(self, losses: list[Any]) -> list[Any]:
        """Return ``losses``: the engine averages them itself."""
        return losses

    def pretrain(self, *providers: Any, **others: Any) -> None:
        """Write the yaml for the command line, which names model and data, and run upstream's trainer on it."""
        try:
            self._args = _reportable(commandline.parse(sys.argv[1:], runtime.world_size()))
            path = _written(self._args)
        except UserError as error:  # the same on every rank
            end(error, collective_error=True)
        become_trainer([str(path)])


def attach() -> NativeEngine:
    """Set the environment that the engine needs, and return the host."""
    os.environ["NON_MEGATRON"] = "true"  # (MindSpeed-MM reads it while it is imported)
    launched_alone()
    raise_when_interrupted()  # (during training MindSpeed-MM handles signals itself)
    return NativeEngine()


def become_trainer(argv: Sequence[str]) -> None:
    """Run upstream's trainer in this process with ``argv``, a yaml."""
    trainer = str(trainer_script())
    print_rank_0(f"mindspeed_mm_dit {__version__}, host: {NAME}, {trainer} {argv[0]}")
    sys.argv[:] = [trainer, *argv]
    runpy.run_path(trainer, run_name="__main__")


def _reportable(args: RunConfig) -> RunConfig:
    """Return ``args`` with the settings that their report needs."""
    from mindspeed_mm_dit.configs.model import model_config_from_mapping
    from mindspeed_mm_dit.configs.strict import read_json

    return with_report(args, model_config_from_mapping(read_json(args.mm_model, "--mm-model"), args.mm_model))


def _written(args: RunConfig) -> Path:
    """Write the yaml of this run to a new file and return its path; print a note for flags without effect."""
    content = commandline.yaml_for(args, runtime.world_size())
    for flag in commandline.without_effect(args) if runtime.rank() == 0 else ():
        echo_if_open(
            f"note: {flag} is a flag of the standalone host; the native engine does not know it", file=sys.stderr
        )
    return written("native.yaml", commandline.as_text(content))
