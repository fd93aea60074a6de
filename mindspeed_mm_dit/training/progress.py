"""How far a run is, and its way to disk and back."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.claim import Claim
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts, unwritten
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.classes import check_classes


class Progress:
    """Counts steps and samples; saves and restores them with the state of the engine.

    A save that fails is said at once, by the first rank, and costs nothing but itself; all ranks go on alike.
    """

    def __init__(self, args: Namespace, engine: Any, checkpoints: Any) -> None:
        self.iteration = 0
        self.consumed_samples = 0
        self._args, self._engine, self._checkpoints = args, engine, checkpoints
        self._saved_iteration: int | None = None
        self._problem: UserError | None = None
        if args.save:
            self._claim = Claim(args.save)
            self._store = CheckpointStore(args.save, args.keep_last)
            self._writer = checkpoints.Writer(not args.no_async_save, self._give_up_save)

    def claim(self) -> None:
        """Take the --save folder for this run; raises ConfigError, on every rank, where another run has it."""
        refused: ConfigError | None = None
        if runtime.rank() == 0:
            try:
                self._claim.take()
            except ConfigError as error:
                refused = error
        if runtime.any_rank(refused is not None):
            raise _shared(refused)

    def advance(self) -> None:
        """Count one optimizer step."""
        self.iteration += 1
        self.consumed_samples += self._args.global_batch_size

    def restore(self, folder: str, checkpoints: Any) -> None:
        """Continue from the newest complete checkpoint in ``folder``; an empty or missing folder changes nothing."""
        store = CheckpointStore(folder)
        iteration, passed = store.latest(lambda path: _problem_on_any_rank(checkpoints.problem_of, path))
        for line in passed:
            _say_on_rank_0(f"warning: {line}")
        if iteration is None:
            _say_on_rank_0(f"no checkpoint in {folder}{_content(folder)}: starting anew")
            return
        path = store.path(iteration)
        if not checksums.are_in(path):
            _say_on_rank_0(f"note: {path} has no checksums, so whether it is what was written is not known")
        facts = read_facts(path)
        self._check_facts(facts, path)
        self._engine.load(path, with_optimizer=not self._args.no_load_optim)
        self.iteration = iteration
        self.consumed_samples = facts.get("consumed_samples", iteration * self._args.global_batch_size)
        self._saved_iteration = iteration if folder == self._args.save else None
        _say_on_rank_0(f"resumed from {path}: iteration {iteration}, {self.consumed_samples} samples consumed")

    def _check_facts(self, facts: dict[str, Any], path: Path) -> None:
        check_classes(facts, self._args.mm.classes, path)
        if facts.get("seed", self._args.seed) != self._args.seed:
            _say_on_rank_0(
                f"warning: {path} was written with --seed {facts['seed']}, this run has {self._args.seed}: "
                "it goes on with other draws and another sample order"
            )
        if "model" in facts:
            _check_model(self._args.mm.model, facts["model"], path)

    def try_save(self) -> None:
        """Start writing a checkpoint of this iteration, unless there is one already; what goes wrong is said."""
        if not self._args.save:
            return
        self._settle()
        if self._saved_iteration == self.iteration or not self._begin():
            return
        iteration, facts, store = self.iteration, self._facts(), self._store
        state = self._engine.state(with_optimizer=not self._args.no_save_optim)
        state.update(self._checkpoints.entries_for_mindspeed_mm(facts, self._args.mm.model.predictor))
        self._writer.write(state, store.partial_path(iteration), lambda: store.commit(iteration, facts))
        self._saved_iteration = iteration

    def finish(self) -> None:
        """Save the last state, wait until it is on disk, and leave the folder to others.

        Raises:
            UserError: it could not be saved; on every rank.
        """
        if not self._args.save:
            return
        self.try_save()
        self._settle()
        self._claim.release()
        if self._saved_iteration != self.iteration:
            raise _shared(self._problem)

    def _settle(self) -> None:
        """Wait for the write under way; all ranks learn whether it failed."""
        problem = self._writer.wait()
        if runtime.any_rank(problem is not None):
            self._saved_iteration, self._problem = None, problem

    def _begin(self) -> bool:
        """Make an empty folder to write into, on the first rank; return, on all of them, whether that worked."""
        problem: UserError | None = None
        if runtime.rank() == 0:
            try:
                self._claim.keep()
                self._store.remove_unfinished()
                self._store.begin(self.iteration)
            except ConfigError as error:  # the folder, and what is unfinished in it, is another run's by now
                self._problem = problem = error
                _say_on_rank_0(f"warning: {error}")
            except OSError as error:
                self._problem = problem = unwritten(error, self._store.root)
                self._give_up_save(problem)
        return not runtime.any_rank(problem is not None)

    def _give_up_save(self, problem: CheckpointError) -> None:
        """Say why the save under way has failed, and give the disk back what it took; called in any thread."""
        _say_on_rank_0(f"warning: {problem}")
        if runtime.rank() == 0:
            self._store.remove_unfinished()

    def _facts(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "global_batch_size": self._args.global_batch_size,
            "seed": self._args.seed,
            "ema_decay": self._args.ema_decay,
            "model": self._args.mm.model_json,
            "classes": self._args.mm.classes,
            "mindspeed_mm_dit": __version__,
            **runtime.versions(),
        }


def open_progress(args: Namespace, engine: Any, checkpoints: Any) -> Progress:
    """Return the progress of a run: where --load left it, or at the start.

    Raises:
        ConfigError: --save belongs to a run that lives, or holds the checkpoints of another one, which this run would
            mix with its own.
        CheckpointError: --load cannot be resumed from.
    """
    progress = Progress(args, engine, checkpoints)
    if args.save:
        progress.claim()
    else:
        _say_on_rank_0("warning: without --save nothing of this run is kept")
    if args.load:
        progress.restore(args.load, checkpoints)
    if args.save:
        if not args.load or os.path.realpath(args.load) != os.path.realpath(args.save):
            _check_is_free(CheckpointStore(args.save), progress.iteration)
        runtime.barrier()  # every rank has looked
        if runtime.rank() == 0:
            CheckpointStore(args.save).remove_unfinished()
    return progress


def _problem_on_any_rank(problem_of: Callable[..., str | None], path: Path) -> str | None:
    """Return what is wrong with the checkpoint ``path``, on every rank alike; they share the reading."""
    problem = problem_of(path, runtime.rank(), runtime.world_size())
    if not runtime.any_rank(problem is not None):
        return None
    if runtime.rank() == 0:  # which says it
        problem = problem or problem_of(path)
    return problem or "another rank finds it damaged"


def _shared(error: UserError | None) -> UserError:
    """Return the error of the first rank, or what stands for it on the others, as one that all ranks raise."""
    shared = error or CheckpointError("--save", "the first rank says what is wrong with it")
    shared.is_shared = True
    return shared


def _check_is_free(store: CheckpointStore, iteration: int) -> None:
    there = store.iterations()
    if there and there[-1] > iteration:
        raise ConfigError(
            f"--save = {store.root}",
            f"holds the checkpoints of a run up to iteration {there[-1]}, and this one starts at {iteration}",
            f"pass --load {store.root} to go on with that run, or another --save",
        )


def _check_model(model: ModelConfig, kept: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError where predictor or diffusion are not those the checkpoint was trained with."""
    there, here = model_config_from_mapping(kept, f"{path}/run.json: model"), model
    changed = [
        f"{section}.{field.name} is {value!r} there and {getattr(getattr(here, section), field.name, None)!r} here"
        for section in ("predictor", "diffusion")
        for field in dataclasses.fields(getattr(there, section))
        if (value := getattr(getattr(there, section), field.name)) != getattr(getattr(here, section), field.name, None)
        and field.name != "class_dropout_prob"
    ]
    if changed:
        raise CheckpointError(
            f"--load = {path}",
            f"was trained with another model.json: {'; '.join(changed)}",
            f"use the one kept in {path}/run.json, or another --load and --save",
        )


def _content(folder: str) -> str:
    names = sorted(p.name for p in Path(folder).glob("*") if not p.name.startswith("."))
    return f" (it holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""


def _say_on_rank_0(text: str) -> None:
    if runtime.rank() == 0:
        with suppress(OSError):  # nobody reads it any more
            print(text, flush=True)
