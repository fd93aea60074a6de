"""Find where a run starts: at a checkpoint of --load that is complete and fits this run, or at the beginning."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.checkpoint import checksums, power_ema
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, SETTINGS, CheckpointStore, read_facts, without_optimizer
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.configs.tuning import without_lists
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers.registry import chosen_in
from mindspeed_mm_dit.terminal import echo_if_open
from mindspeed_mm_dit.training.changes import PREDICTOR_SETTINGS, changes, run_facts, table_of
from mindspeed_mm_dit.training.classes import check_classes
from mindspeed_mm_dit.training.contract import Checkpoints


class Start(NamedTuple):
    """The checkpoint that a run resumes from."""

    path: Path
    iteration: int
    facts: dict[str, Any]
    """Its run.json; empty if another program wrote the checkpoint."""


def find_start(args: RunConfig, checkpoints: Checkpoints) -> Start | None:
    """Return the newest undamaged checkpoint of --load, after checking that it fits this run; None for a new run.

    Every rank must call this: they share the reading. No model is needed. ``checkpoints``: the framework's module of
    checkpoints.

    Raises:
        CheckpointError: --load cannot be resumed from, or belongs to another model.
        ConfigError: --save holds checkpoints of another run, which would get mixed with those of this one.
    """
    try:
        start = _newest(args.load, args.save, checkpoints) if args.load else None
        if start is not None:
            check_fits(args, start, checkpoints)
        if args.save and not same_folder(args.load, args.save):
            check_is_free(CheckpointStore(args.save), start.iteration if start else 0)
    except UserError as error:
        error.is_shared = True  # all ranks look at one folder
        raise
    return start


def _newest(load: str, save: str | None, checkpoints: Checkpoints) -> Start | None:
    store = CheckpointStore(load)
    if os.path.exists(load) and not os.path.isdir(load) and not os.path.isfile(load):
        raise CheckpointError(f"--load = {load}", "is not a folder", "name the folder that --save named")
    iteration, warnings = store.latest(lambda path: _problem_on_any_rank(checkpoints.problem_of, path))
    for line in warnings:
        print_rank_0(f"warning: {line}; falling back to the one before")
    if iteration is not None:
        path = store.path(iteration)
        if not checksums.are_in(path):
            print_rank_0(f"note: {path} has no checksums, so it cannot be checked for damage")
        return Start(path, iteration, read_facts(path))
    content = _content(load)
    if content and not same_folder(load, save):
        raise CheckpointError(
            f"--load = {load}",
            f"holds no checkpoint of a run (iter_0001000 and the like): it holds {content}",
            "name the folder that --save named; mm-dit convert makes one from weights in another format",
        )
    print_rank_0(f"no checkpoint in {load}{f' (it holds {content})' if content else ''}: starting anew")
    return None


def _problem_on_any_rank(problem_of: Callable[..., str | None], path: Path) -> str | None:
    """Return what is wrong with the checkpoint ``path``, the same on every rank; they share the reading."""
    problem = problem_of(path, runtime.rank(), runtime.world_size())
    if not runtime.any_rank(problem is not None):
        return None
    if runtime.rank() == 0:  # which reports it
        problem = problem or problem_of(path)
    return problem or "another rank reports that it is damaged"


def check_fits(args: RunConfig, start: Start, checkpoints: Checkpoints) -> None:
    """Raise CheckpointError if the checkpoint is of another model or optimizer, or lacks the optimizer's state.

    Other changes since then are printed.
    """
    path, _, facts = start
    check_classes(facts, args.mm.classes, path)
    _check_power_ema(args.power_ema_stds, facts.get(power_ema.STDS, ()), path)
    if "model" in facts:
        _check_model(args.mm.model, facts["model"], path)
    here = run_facts(args, 0, 0)
    _check_adapters(here.get(ADAPTERS), facts.get(ADAPTERS), path)
    if table := table_of(changes(facts, here)):
        print_rank_0(table)
    checkpoints.check_architecture(path, parameters_of(args.mm.model).shapes(saved_only=True))
    if not args.no_load_optim:
        if not checkpoints.has_optimizer(path):
            raise without_optimizer(path)
        _check_optimizer(args.optimizer, chosen_in(facts.get(SETTINGS), path).name, path)
        _check_frozen(here[SETTINGS].get("--freeze", ""), facts.get(SETTINGS), path)


def _check_adapters(here: Mapping[str, Any] | None, there: Mapping[str, Any] | None, path: Path) -> None:
    """Raise CheckpointError if the adapters differ in kind from this run's; their base is checked once it is read."""
    if (here is None) != (there is None):
        reason = (
            "holds adapters (LoRA), and this run trains" if here is None else "holds no adapters, and this run trains"
        )
        raise CheckpointError(
            f"--load = {path}",
            f"{reason} {'the whole network' if here is None else 'some'}",
            "pass --lora-target-modules and --init-from as that run did"
            if here is None
            else "start from its weights: --init-from instead of --load",
        )
    for flag in (name for name in here or () if name.startswith("--")):
        if here and there and _plain(here[flag]) != _plain(there.get(flag)):
            raise CheckpointError(
                f"{flag} = {_text(here[flag])}",
                f"{path} holds adapters trained with {_text(there.get(flag))}",
                "use that value, or choose another --load and --save",
            )


def _plain(value: Any) -> Any:
    """Return patterns in the form that all hosts share; other values as they are."""
    return without_lists(map(str, value)) if isinstance(value, list) else value


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_frozen(here: str, settings: Any, path: Path) -> None:
    """Raise CheckpointError if the optimizer's state is of a run with other frozen parameters."""
    there = settings.get("--freeze", "") if isinstance(settings, dict) else ""
    if _plain(here.split()) != _plain(there.split()):
        raise CheckpointError(
            f"--freeze = {here}",
            f"{path} holds the optimizer's state of a run with {there or 'nothing frozen'}",
            "use that, or pass --no-load-optim to start the state anew",
        )


def _check_power_ema(stds: Sequence[float], saved_stds: Sequence[float], path: Path) -> None:
    """Raise ConfigError if the checkpoint has EMAs of other widths; print a note if they start or end here."""
    power_ema.check_stds(stds, saved_stds, str(path))
    if stds and not saved_stds:
        print_rank_0(
            f"note: {path} has no power-function averages; they begin with its weights, as if these had never changed"
        )
    if saved_stds and not stds:
        print_rank_0(f"note: the power-function averages of {path} end here: --power-ema-stds is not given")


def _check_optimizer(name: str, there: str, path: Path) -> None:
    """Raise CheckpointError if the checkpoint holds the state of another optimizer."""
    if name != there:
        raise CheckpointError(
            f"--load = {path}",
            f"holds the state of --optimizer {there}, and this run steps by {name}",
            "use that one, or pass --no-load-optim to start the state anew",
        )


def same_folder(load: str | None, save: str | None) -> bool:
    """Return whether --load and --save name one folder."""
    return load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save)


def check_is_free(store: CheckpointStore, iteration: int) -> None:
    """Raise ConfigError if the --save folder holds checkpoints of another run, later than ``iteration``."""
    there = store.iterations()
    if there and there[-1] > iteration:
        raise ConfigError(
            f"--save = {store.root}",
            f"holds the checkpoints of a run up to iteration {there[-1]}, and this one starts at {iteration}",
            f"pass --load {store.root} to go on with that run, or another --save",
        )


def _check_model(model: ModelConfig, saved: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if predictor or diffusion are not those that the checkpoint was trained with."""
    there = model_config_from_mapping(saved, f"{path}/run.json: model")
    changed = differences(there, model, ("predictor", "diffusion"))
    if changed:
        raise CheckpointError(
            f"--load = {path}",
            f"was trained with another model.json: {'; '.join(changed)}",
            f"use the one saved in {path}/run.json, or another --load and --save",
        )


def differences(there: ModelConfig, here: ModelConfig, sections: Sequence[str]) -> list[str]:
    """Return, in words, how ``sections`` of two model.json differ; the dropout of labels and frames may."""
    return [
        f"{section}.{name} is {value!r} there and {other!r} here"
        for section in sections
        for name, value, other in _pairs(getattr(there, section), getattr(here, section))
        if value != other and name not in PREDICTOR_SETTINGS
    ]


def _pairs(there: Any, here: Any) -> list[tuple[str, Any, Any]]:
    """Return (field, value there, value here) of a section; only ``model_id`` if their kinds differ."""
    names = [field.name for field in dataclasses.fields(there)] if type(there) is type(here) else ["model_id"]
    return [(name, getattr(there, name), getattr(here, name)) for name in names]


def _content(folder: str) -> str:
    names = sorted(p.name for p in Path(folder).glob("*") if not p.name.startswith("."))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def print_rank_0(text: str) -> None:
    """Print on the first rank."""
    if runtime.rank() == 0:
        echo_if_open(text)
