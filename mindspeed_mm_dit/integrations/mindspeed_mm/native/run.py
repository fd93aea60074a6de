"""The run that the engine will do, read from its yaml or from every host's command line.

Checked before it is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.store import TRACKER
from mindspeed_mm_dit.configs.arguments import checked, read_train_args
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.tuning import SETS, Tuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import ignored_by
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import RELEASE
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import (
    HF,
    checked_values,
    flags_of,
    fsdp2_of,
    lookup,
    recomputed,
    yaml_of,
)
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.training.flags import ignored_flags, to_command_line
from mindspeed_mm_dit.training.flags import parse as parse_flags
from mindspeed_mm_dit.training.loggers import boards
from mindspeed_mm_dit.training.loop import LearningRate
from mindspeed_mm_dit.training.progress import Progress, locked_save_folder, open_progress
from mindspeed_mm_dit.training.pytorch.stepper import TrainState
from mindspeed_mm_dit.training.resume import (
    InitialWeights,
    ResumePoint,
    find_resume_point,
    print_rank_0,
    read_initial_weights,
)
from mindspeed_mm_dit.training.signals import StopReason, StopRequest


def parse(argv: Sequence[str], world_size: int) -> RunConfig:
    """Read the flags of a run on ``world_size`` ranks and check them against each other.

    Raises:
        ConfigError: naming the flag.
    """
    return checked(parse_flags(argv), world_size)


def without_effect(flags: RunConfig) -> list[str]:
    """Return the flags of the command line that have no effect here."""
    return ignored_flags(flags, ignored_by("native"), lambda kind: kind is not boards.TENSORBOARD)


def yaml_for(flags: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the engine's yaml for ``flags`` and the fsdp2.yaml they name, checked against ``world_size``."""
    fsdp2 = load_fsdp2_config(flags.fsdp2_config_path) if flags.use_torch_fsdp2 else None
    if fsdp2 is not None:
        fsdp2.shard_ranks(world_size)
    return yaml_of(_spelled_out(flags), fsdp2, world_size)


def _spelled_out(flags: RunConfig) -> RunConfig:
    """Return ``flags`` with patterns in place of sets of layers, which the engine does not know."""
    if not SETS.keys() & {*flags.lora_target_modules, *flags.freeze}:
        return flags
    parameters = parameters_of(load_model_config(str(flags.mm_model)))
    tuning = Tuning(flags.lora_target_modules, freeze=flags.freeze).spelled_out(parameters)
    return dataclasses.replace(flags, lora_target_modules=tuning.targets, freeze=tuning.freeze)


def yaml_of_config(folder: str | Path, world_size: int) -> str:
    """Return the engine's yaml for a folder with model.json, data.json, fsdp2.yaml and train.args."""
    folder = Path(folder)
    files = ("--mm-model", "model.json"), ("--mm-data", "data.json"), ("--fsdp2-config-path", "fsdp2.yaml")
    for _, name in files[:2]:  # (the yaml holds only their names)
        read_json(folder / name, "--write-native")
    named = [word for flag, name in files for word in (flag, str(folder / name))]
    flags = parse([*named, *read_train_args(folder / "train.args")], world_size)
    return as_text(yaml_for(flags, world_size))


def as_text(content: dict[str, Any]) -> str:
    """Return the text of a yaml file."""
    return yaml.safe_dump(content, sort_keys=False, width=110)


class CheckpointState(TrainState):
    """The trained state, with an optional dtype for the weights in checkpoints."""

    dtype: torch.dtype | None = None

    def state(self, with_optimizer: bool = True) -> torch_dcp.State:
        """Return what a resumed run needs: the live tensors, with weights cast to ``dtype`` if it is set."""
        state = super().state(with_optimizer)
        if self.dtype is None:
            return state
        return state | {"model": {name: weight.to(self.dtype) for name, weight in state["model"].items()}}


class Run:
    """One run: its yaml translated to our flags (``flags.mm``: the config files), and its progress."""

    def __init__(self, flags: RunConfig, recomputed: Sequence[str], lr_plan: Sequence[Any], exports: bool) -> None:
        self.flags, self.recomputed, self._lr_plan, self.exports = flags, recomputed, lr_plan, exports
        self.model: Any = None
        """The ``TrainedPredictor``, once it is built."""
        self.start: ResumePoint | None = None
        """The checkpoint from which it resumes, known once the ranks have met."""
        self.first = InitialWeights(None)
        """The initial weights."""
        self.meeting = contextlib.ExitStack()
        """Contexts that end when the ranks have met."""
        self._run_contexts = contextlib.ExitStack()

    def join_ranks(self) -> None:
        """Synchronize the ranks, lock the checkpoint folder, and find the start iteration and initial weights.

        Raises:
            UserError: a checkpoint, weights or the folder do not belong to this run.
        """
        self.meeting.close()
        flags = self.flags
        framework.runtime.divide_among_ranks(
            flags.micro_batch_size, flags.global_batch_size, flags.context_parallel_size
        )
        self._stop = self._run_contexts.enter_context(StopRequest(flags.exit_duration_in_mins))
        self._save_lock = self._run_contexts.enter_context(locked_save_folder(flags))
        self.start = find_resume_point(flags, torch_dcp)
        self.first = read_initial_weights(flags, self.start)
        self.flags = dataclasses.replace(flags, mm=dataclasses.replace(flags.mm, base=self.first.base))

    @property
    def consumed_samples(self) -> int:
        """Number of samples consumed when training begins."""
        if self.start is None:
            return 0
        return int(self.start.facts.get("consumed_samples", self.start.iteration * self.flags.global_batch_size))

    @functools.cached_property
    def trained(self) -> CheckpointState:
        """The trained state; first used once the model is sharded over the ranks."""
        declared = self.model.composite[0].declared
        return CheckpointState(self.model, declared, self.flags, {name: self._scale_of(name) for name in declared})

    def _scale_of(self, name: str) -> float:
        """Return the factor of a parameter's learning rate: the first match in lr_scaling_plan."""
        return next((float(part.scale) for part in self._lr_plan if re.match(part.match, name)), 1.0)

    @functools.cached_property
    def progress(self) -> Progress:
        """The run's progress, and saving and loading it; all ranks must use it for the first time together."""
        progress = open_progress(self.flags, self.trained, torch_dcp, self._save_lock, self.start)
        progress.words = to_command_line(self.flags)
        return progress

    def step(self) -> None:
        """Take an optimizer step with the current gradients, at the learning rate that every host uses."""
        self.trained.optimizer.step(LearningRate.of(self.flags).at(self.progress.iteration))
        self.trained.ema.update()
        self.progress.advance()
        if ended := self._stop.agree():
            self._end(ended)

    def _end(self, ended: StopReason) -> NoReturn:
        """Save this step and exit, because the run was asked to stop."""
        saved = "saving it" if self.flags.save else "nothing is saved without training.save"
        print_rank_0(f"{ended.reason} at iteration {self.progress.iteration}: {saved}")
        self.progress.finish()
        framework.runtime.barrier()
        sys.exit(ended.code)

    @property
    def autocast(self) -> bool:
        """Whether matrix products cast their inputs to bfloat16 (with FSDP2 ``param_dtype`` does it)."""
        precision = self.flags.mm.precision
        return precision is not None and precision.mode == "autocast"


_current: Run | None = None


def current() -> Run:
    """Return the run of this process."""
    assert _current is not None, "the engine has not imported the plugin"
    return _current


def begin(argv: Sequence[str]) -> None:
    """Read and check the run that ``argv``, the engine's command line, describes.

    Raises:
        UserError: whatever is wrong.
    """
    global _current
    from mindspeed_mm_dit.integrations.mindspeed_mm.native.preflight import check, check_offered

    read = engine_arguments(argv)
    check_offered(read)
    flags = _flags(read, argv[1])
    mm = check(read, flags, fsdp2_of(read))
    if read.training.train_epochs is not None:
        read.training.train_iters = read.training.train_epochs * (mm.data_set.epoch_samples // flags.global_batch_size)
        flags = _flags(read, argv[1])
    _current = Run(
        dataclasses.replace(flags, mm=mm),
        recomputed(read),
        read.training.lr_scaling_plan or (),
        read.training.save_format == HF,
    )


def _flags(read: Any, path: str) -> RunConfig:
    values = flags_of(read, lookup)
    if weights := _weights_in(values["load"], read.training.load_format):
        values |= {"load": None, "init_from": weights}
    return checked_values(values, path, framework.runtime.world_size())


def _weights_in(load: str | None, load_format: str) -> str | None:
    """Return the weights that ``training.load`` names if they are not a run's: another format, or converted ones."""
    if load is None or load_format == HF:
        return load
    file = Path(load) / TRACKER
    is_release = file.is_file() and file.read_text(encoding="utf-8", errors="replace").strip() == RELEASE
    return str(Path(load) / RELEASE) if is_release else None


def engine_arguments(argv: Sequence[str]) -> Any:
    """Check the keys of the yaml in the command line, and return the engine's own parse of both.

    Raises:
        ConfigError: naming the key.
    """
    from mindspeed_mm.config.config_manager import ConfigManager
    from mindspeed_mm.config.exception import ConfigValidationError
    from mindspeed_mm.fsdp.params.argument import Arguments

    from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import check_keys, refused

    if len(argv) < 2 or not argv[1].endswith((".yaml", ".yml")):
        raise ConfigError("The command line names no yaml. Run: trainer.py CONFIG.yaml")
    check_keys(argv[1])
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # (it prints all of it, and so does the trainer)
            return ConfigManager(config_class=Arguments).load_and_parse()
    except ConfigValidationError as error:
        raise refused(argv[1], error.__cause__ or error) from None
