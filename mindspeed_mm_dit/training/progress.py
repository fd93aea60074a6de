"""How far a run is, and its way to disk and back."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.changes import changes, run_facts, table_of
from mindspeed_mm_dit.training.classes import check_classes


class Progress:
    """Counts steps and samples; saves and restores them with the state of the engine."""

    def __init__(self, args: Namespace, engine: Any, checkpoints: Any) -> None:
        self.iteration = 0
        self.consumed_samples = 0
        self._args, self._engine, self._checkpoints = args, engine, checkpoints
        self._store = CheckpointStore(args.save, args.keep_last) if args.save else None
        self._writer = checkpoints.Writer(in_background=not args.no_async_save) if args.save else None
        self._saved_iteration: int | None = None

    def advance(self) -> None:
        """Count one optimizer step."""
        self.iteration += 1
        self.consumed_samples += self._args.global_batch_size

    def restore(self, folder: str, checkpoints: Any) -> None:
        """Continue from the newest complete checkpoint in ``folder``; an empty or missing folder changes nothing."""
        store = CheckpointStore(folder)
        iteration, passed = store.latest(checkpoints.problem_of)
        for line in passed:
            _print_rank_0(f"warning: {line}")
        if iteration is None:
            _print_rank_0(f"no checkpoint in {folder}{_content(folder)}: starting anew")
            return
        path = store.path(iteration)
        facts = read_facts(path)
        self._check_facts(facts, path)
        self._engine.load(path, with_optimizer=not self._args.no_load_optim)
        self.iteration = iteration
        self.consumed_samples = facts.get("consumed_samples", iteration * self._args.global_batch_size)
        self._saved_iteration = iteration if folder == self._args.save else None
        _print_rank_0(f"resumed from {path}: iteration {iteration}, {self.consumed_samples} samples consumed")

    def _check_facts(self, facts: dict[str, Any], path: Path) -> None:
        check_classes(facts, self._args.mm.classes, path)
        if "model" in facts:
            _check_model(self._args.mm.model, facts["model"], path)
        if table := table_of(changes(facts, self._facts())):
            _print_rank_0(table)

    def save(self) -> None:
        """Start writing a checkpoint of this iteration, unless there is one already."""
        if self._store is None or self._writer is None or self._saved_iteration == self.iteration:
            return
        self._writer.wait()
        if runtime.rank() == 0:
            self._store.begin(self.iteration)
        runtime.barrier()
        iteration, facts, store = self.iteration, self._facts(), self._store
        state = self._engine.state(with_optimizer=not self._args.no_save_optim)
        state.update(self._checkpoints.entries_for_mindspeed_mm(facts, self._args.mm.model.predictor))
        self._writer.write(state, store.partial_path(iteration), lambda: store.commit(iteration, facts))
        self._saved_iteration = iteration

    def try_save(self) -> None:
        """Save in the middle of a run: a failure is reported and the training goes on."""
        try:
            self.save()
        except CheckpointError as error:
            print(f"warning: {error}", flush=True)

    def finish(self) -> None:
        """Save the last state and wait until it is on disk; raises CheckpointError if it cannot be."""
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except CheckpointError as error:
            print(f"warning: {error}", flush=True)
            self._saved_iteration = None
        self.save()
        self._writer.wait()
        runtime.barrier()

    def _facts(self) -> dict[str, Any]:
        return run_facts(self._args, self.iteration, self.consumed_samples)


def open_progress(args: Namespace, engine: Any, checkpoints: Any) -> Progress:
    """Return the progress of a run: where --load left it, or at the start.

    Raises:
        ConfigError: --save holds the checkpoints of another run, which this one would mix with its own.
        CheckpointError: --load cannot be resumed from.
    """
    progress = Progress(args, engine, checkpoints)
    if args.load:
        progress.restore(args.load, checkpoints)
    if args.save:
        if not args.load or os.path.realpath(args.load) != os.path.realpath(args.save):
            _check_is_free(CheckpointStore(args.save), progress.iteration)
        runtime.barrier()  # every rank has looked
        if runtime.rank() == 0:
            CheckpointStore(args.save).remove_unfinished()
    return progress


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


def _print_rank_0(text: str) -> None:
    if runtime.rank() == 0:
        print(text, flush=True)
