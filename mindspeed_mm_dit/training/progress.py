"""How far a run is, and its way to disk and back."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint.shapes import dit_shapes
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts, without_optimizer
from mindspeed_mm_dit.configs.model import DiTConfig, ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.classes import check_classes


class Start(NamedTuple):
    """The checkpoint that a run goes on from."""

    path: Path
    iteration: int
    facts: dict[str, Any]
    """Its run.json; empty where another program wrote it."""


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

    def restore(self, start: Start) -> None:
        """Continue from the checkpoint that :func:`find_start` found."""
        path, iteration, facts = start
        self._engine.load(path, with_optimizer=not self._args.no_load_optim)
        self.iteration = iteration
        self.consumed_samples = facts.get("consumed_samples", iteration * self._args.global_batch_size)
        self._saved_iteration = iteration if self._args.load == self._args.save else None
        _print_rank_0(f"resumed from {path}: iteration {iteration}, {self.consumed_samples} samples consumed")

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


def find_start(args: Namespace, checkpoints: Any) -> Start | None:
    """Return the newest complete checkpoint of --load, known to fit this run; None starts anew. No device is touched.

    checkpoints: the module that reads the framework's.

    Raises:
        CheckpointError: --load cannot be resumed from, or belongs to another model.
        ConfigError: --save holds the checkpoints of another run, which this one would mix with its own.
    """
    start = _newest(args, checkpoints) if args.load else None
    if start is not None:
        _check_facts(args, start)
        if isinstance(args.mm.model.predictor, DiTConfig):
            checkpoints.check_architecture(start.path, dit_shapes(args.mm.model.predictor))
        if not args.no_load_optim and not checkpoints.has_optimizer(start.path):
            raise without_optimizer(start.path)
    if args.save and not _is_save(args.load, args):
        _check_is_free(CheckpointStore(args.save), start.iteration if start else 0)
    return start


def open_progress(args: Namespace, engine: Any, checkpoints: Any, start: Start | None) -> Progress:
    """Return the progress of a run: where ``start`` left it, or at the beginning."""
    progress = Progress(args, engine, checkpoints)
    if start is not None:
        progress.restore(start)
    if args.save:
        runtime.barrier()  # every rank has looked
        if runtime.rank() == 0:
            CheckpointStore(args.save).remove_unfinished()
    return progress


def _newest(args: Namespace, checkpoints: Any) -> Start | None:
    store = CheckpointStore(args.load)
    if os.path.exists(args.load) and not os.path.isdir(args.load) and not os.path.isfile(args.load):
        raise CheckpointError(f"--load = {args.load}", "is no folder", "name the folder that --save named")
    iteration, passed = store.latest(checkpoints.problem_of)
    for line in passed:
        _print_rank_0(f"warning: {line}")
    if iteration is not None:
        return Start(store.path(iteration), iteration, read_facts(store.path(iteration)))
    content = _content(args.load)
    if content and not _is_save(args.load, args):
        raise CheckpointError(
            f"--load = {args.load}",
            f"holds no checkpoint of a run (iter_0001000 and the like): it holds {content}",
            "name the folder that --save named; mm-dit convert makes one of weights in another format",
        )
    _print_rank_0(f"no checkpoint in {args.load}{f' (it holds {content})' if content else ''}: starting anew")
    return None


def _check_facts(args: Namespace, start: Start) -> None:
    path, _, facts = start
    check_classes(facts, args.mm.classes, path)
    if facts.get("seed", args.seed) != args.seed:
        _print_rank_0(
            f"warning: {path} was written with --seed {facts['seed']}, this run has {args.seed}: "
            "it goes on with other draws and another sample order"
        )
    if "model" in facts:
        _check_model(args.mm.model, facts["model"], path)


def _is_save(folder: str | None, args: Namespace) -> bool:
    return bool(folder and args.save) and os.path.realpath(folder or "") == os.path.realpath(args.save)


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
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _print_rank_0(text: str) -> None:
    if runtime.rank() == 0:
        print(text, flush=True)
