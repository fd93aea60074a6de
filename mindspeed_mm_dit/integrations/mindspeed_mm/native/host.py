"""The native engine as a host for pretrain_dit.py: upstream's trainer, unmodified, after our checks, with our hooks."""

from __future__ import annotations

import logging
import os
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed_mm_dit import __version__, framework
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import (
    USER_ERROR,
    end,
    raise_when_interrupted,
    set_single_process_variables,
    write_temporary_file,
)
from mindspeed_mm_dit.hosts.preflight import with_report
from mindspeed_mm_dit.hosts.registry import Host, ModelType
from mindspeed_mm_dit.integrations.mindspeed_mm.native import run as commandline
from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import NAME, trainer_script
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import current
from mindspeed_mm_dit.terminal import logger, open_streams
from mindspeed_mm_dit.training.loggers import boards
from mindspeed_mm_dit.training.loggers.registry import GuardedLogger, LoggerContext
from mindspeed_mm_dit.training.resume import print_rank_0

LOGGER = "mindspeed_mm.fsdp.train.train_engine"
"""The engine's logger of training progress, on its first rank."""

_NUMBER = r"(\S+) \|"
_STEP = re.compile(rf"iteration +(\d+)/.*learning rate: {_NUMBER}.* loss: {_NUMBER}(?:.* grad norm: {_NUMBER})?")
_VALIDATION = re.compile(rf"validation after iteration (\d+) .*validation loss: {_NUMBER}")


class TensorBoardHandler(logging.Handler):
    """Writes each logged step and validation to event files in ``folder``, which begin with the first of them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._scalars: GuardedLogger | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Extract the numbers from a line, and write them."""
        logged = parse_line(record.getMessage())
        if logged is None:
            return
        iteration, values = logged
        if self._scalars is None:
            config = boards.TensorBoardConfig(self._folder)
            self._scalars = GuardedLogger(boards.TENSORBOARD, config, LoggerContext(iteration - 1, self._folder, {}))
        self._scalars.add(iteration, values)


def parse_line(line: str) -> tuple[int, dict[str, float]] | None:
    """Return the iteration of a logged line, and its scalars by the names that all hosts use; None for other lines."""
    if step := _STEP.search(line):
        values = {"train/learning_rate": step[2], "train/loss": step[3], "train/grad_norm": step[4]}
        return int(step[1]), {name: float(value) for name, value in values.items() if value is not None}
    if validation := _VALIDATION.search(line):
        return int(validation[1]), {"valid/loss": float(validation[2])}
    return None


def install_hooks() -> None:
    """Install the hooks: replace the optimizer's steps by ours, and read the log."""
    register_optimizer_step_pre_hook(_step)
    folder = current().flags.parts["tensorboard_dir"]
    if folder is not None and framework.runtime.rank() == 0:
        logging.getLogger(LOGGER).addHandler(TensorBoardHandler(folder))


def _step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Step with our optimizer, which leaves no gradients for the engine's optimizer."""
    if optimizer not in current().trained.optimizer.optimizers:  # (our own optimizers call this hook too)
        try:
            current().step()
        except UserError as error:
            end(error)


class NativeEngine(Host):
    """MindSpeed-MM's native engine.

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
            self._args = _reportable(commandline.parse(sys.argv[1:], framework.runtime.world_size()))
            path = _written(self._args)
        except UserError as error:  # the same on every rank
            end(error, collective_error=True)
        become_trainer([str(path)])


def attach() -> NativeEngine:
    """Set the environment that the engine needs, and return the host."""
    os.environ["NON_MEGATRON"] = "true"  # (MindSpeed-MM reads it while it is imported)
    set_single_process_variables()
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
    content = commandline.yaml_for(args, framework.runtime.world_size())
    for flag in commandline.without_effect(args) if framework.runtime.rank() == 0 else ():
        logger.warning(f"note: {flag} is a flag of the standalone host; the native engine does not know it")
    return write_temporary_file("native.yaml", commandline.as_text(content))


COMMAND = "mindspeed_mm_dit.hosts.native"


def main() -> None:
    """Check the engine and the yaml ``sys.argv[1]``, then run the trainer in this process."""
    open_streams()
    if len(sys.argv) < 2:
        logger.warning(f"usage: python -m {COMMAND} CONFIG.yaml")
        sys.exit(USER_ERROR)
    activate("pytorch")
    from mindspeed_mm_dit.integrations.mindspeed_mm.native import contract, host, run

    try:
        contract.check_engine(f"-m {COMMAND}")
        host.attach()
        run.engine_arguments(sys.argv)
    except UserError as error:
        end(error, collective_error=True)
    host.become_trainer(sys.argv[1:])
