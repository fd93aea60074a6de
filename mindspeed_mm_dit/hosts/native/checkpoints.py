"""The functions of the engine that are replaced: where a run goes on, and what a checkpoint says of itself.

The engine keeps position and schedule in a file for each rank, and finds none where another number of ranks, or another
host, wrote the checkpoint. Position and schedule follow from run.json and the yaml, as in the standalone host; so no
such file is opened (the engine would unpickle it without a look).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.checkpoint.dcp_checkpointer import DistributedCheckpointer

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.fitting import check_whole
from mindspeed_mm_dit.checkpoint.mindspeed_mm import EMA
from mindspeed_mm_dit.checkpoint.store import RUN_FACTS, TRACKER, CheckpointStore, read_facts
from mindspeed_mm_dit.checkpoint.torch_pickles import check_entries, read_metadata
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.native.contract import check_replaced
from mindspeed_mm_dit.hosts.native.run import Run, current
from mindspeed_mm_dit.hosts.tracker import RELEASE, newest
from mindspeed_mm_dit.optimizers import adam
from mindspeed_mm_dit.training.changes import run_facts
from mindspeed_mm_dit.training.lr import LearningRate
from mindspeed_mm_dit.training.start import Start, check_fits, check_is_free, print_rank_0, same_folder

_save, _save_extra_state = DistributedCheckpointer.save, DistributedCheckpointer._save_extra_state


def replace() -> None:
    """Put our functions in place of the engine's (``contract.REPLACED``).

    Raises:
        PlatformError: the engine's are not those we know.
    """
    check_replaced(DistributedCheckpointer)
    DistributedCheckpointer.save = staticmethod(save)
    DistributedCheckpointer._save_extra_state = staticmethod(save_extra_state)
    DistributedCheckpointer._load_extra_state = staticmethod(load_extra_state)


def save(path: str, state: dict[str, Any], **how: Any) -> None:
    """Do what the engine does, unless this very state is in the folder ``path``: at its end a run saves once more."""
    run, iteration = current(), state["extra_state"]["iteration"]
    if iteration != run.saved:
        _save(path=path, state=state, **how)
        run.saved = iteration


def save_extra_state(checkpoint_dir: str, state: dict[str, Any]) -> None:
    """Do what the engine does, and write run.json, by which every other command knows the run."""
    _save_extra_state(checkpoint_dir=checkpoint_dir, state=state)
    if runtime.rank() == 0:
        reached = state["extra_state"]
        facts = run_facts(current().flags, reached["iteration"], reached["consumed_train_samples"])
        text = json.dumps({**facts, "host": "MindSpeed-MM, native engine"}, indent=1)
        (Path(checkpoint_dir) / RUN_FACTS).write_text(text + "\n", encoding="utf-8")


def load_extra_state(checkpoint_dir: str, state: dict[str, Any]) -> None:
    """Go on from a checkpoint whose weights and, where they have the engine's names, moments it has just read."""
    run, path = current(), Path(checkpoint_dir)
    facts, iteration = read_facts(path), _iteration(path)
    run.consumed_samples = facts.get("consumed_samples", iteration * run.flags.global_batch_size)
    _read_average(run, path)
    run.first_lr = LearningRate.of(run.flags).at(iteration)
    run.saved = iteration if same_folder(run.flags.load, run.flags.save) else None
    state["extra_state"] = {
        "iteration": iteration,
        "consumed_train_samples": run.consumed_samples,
        "train_dataloader": {},  # it begins where Run.consumed_samples says
        "lr_scheduler": {"last_epoch": iteration, "_last_lr": [run.first_lr], "lr_lambdas": [None]},
    }
    print_rank_0(f"resumed from {path}: iteration {iteration}, {run.consumed_samples} samples consumed")


def _read_average(run: Run, path: Path) -> None:
    """Read the average that another host wrote, or begin one where there is none."""
    stored, average = read_metadata(path).state_dict_metadata.keys(), run.model.moving_average()
    if any(name.startswith("ema.") for name in stored):
        torch_dcp.read({"ema": average.averages}, path)
    elif not any(name.startswith(EMA) for name in stored):
        average.begin_again()


def check(run: Run) -> None:
    """Look at the checkpoint that ``training.load`` stands at, and at ``training.save``, before a model is built.

    Every rank must call this: each reads its share of the files.

    Raises:
        CheckpointError: it is damaged, could run code, or is of another model; what is named.
        ConfigError: training.save holds the checkpoints of another run, which this one would mix with its own.
    """
    flags = run.flags
    path = find(flags.load) if flags.load is not None else None
    if flags.save is not None and not same_folder(flags.load, flags.save):
        check_is_free(CheckpointStore(flags.save), _iteration(path) if path else 0)
    if path is None:
        return
    _check_whole(path)
    if runtime.rank() == 0:
        check_entries(path, ("model.", "optimizer."))  # what the engine asks for, it unpickles without a look
    _refuse_numbered_moments(path, flags)
    check_fits(flags, Start(path, _iteration(path), read_facts(path)), torch_dcp)


def _check_whole(path: Path) -> None:
    """Raise CheckpointError where it is damaged; the cure names the one before it, which the engine never looks for."""
    try:
        check_whole(path, lambda path: torch_dcp.problem_of(path, runtime.rank(), runtime.world_size()))
    except CheckpointError as error:
        before = [found for found in CheckpointStore(path.parent).iterations() if found < _iteration(path)]
        tracker = path.parent / TRACKER
        cure = f"write {before[-1]}, the number of the one before it, into {tracker}" if before else error.cure
        raise CheckpointError(error.what, error.reason, cure) from None


def _refuse_numbered_moments(path: Path, flags: RunConfig) -> None:
    """Raise CheckpointError for moments that the engine would pass over in silence: they go by other names."""
    stored = [name for name in read_metadata(path).state_dict_metadata if name.startswith("optimizer.state.")]
    names = {f"optimizer.state.{name}.{adam.RULE.state[0]}" for name in flags.mm.model.predictor.parameters().shapes()}
    if stored and not flags.no_load_optim and not names & set(stored):
        raise CheckpointError(
            f"training.load = {path.parent}",
            f"names the moments in {path.name} as MindSpeed-MM's old route does, where the native engine finds none",
            f"convert it (mm-dit convert {path.parent} NEW --to pytorch) and load NEW; or load no moments: "
            "training.no_load_optim: true",
        )


def _iteration(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def find(load: str) -> Path:
    """Return the checkpoint that the engine will take from the folder ``load``.

    Raises:
        CheckpointError: there is none.
    """
    what = f"training.load = {load}"
    if not (Path(load) / TRACKER).is_file():
        raise CheckpointError(what, f"holds no checkpoint: there is no {TRACKER}", "leave load out to begin anew")
    path = newest(what, load)
    if path.name == RELEASE:
        raise CheckpointError(
            what, f"is {RELEASE!r} by its {TRACKER}: weights without a run", "name the folder that a run saved to"
        )
    return path
