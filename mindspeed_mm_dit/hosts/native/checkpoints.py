"""The two functions of the engine that are replaced: where a run goes on, and what a checkpoint says of itself.

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
from mindspeed_mm_dit.checkpoint.mindspeed_mm import EMA
from mindspeed_mm_dit.checkpoint.shapes import dit_shapes
from mindspeed_mm_dit.checkpoint.store import RUN_FACTS, TRACKER, CheckpointStore, read_facts, without_optimizer
from mindspeed_mm_dit.checkpoint.torch_pickles import check_pickles, read_metadata
from mindspeed_mm_dit.checkpoint.weights import check_whole
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.native.contract import check_replaced
from mindspeed_mm_dit.hosts.native.run import Run, current
from mindspeed_mm_dit.training.changes import changes, run_facts, table_of
from mindspeed_mm_dit.training.classes import check_classes
from mindspeed_mm_dit.training.loop import learning_rate
from mindspeed_mm_dit.training.start import print_rank_0

_save_extra_state = DistributedCheckpointer._save_extra_state


def replace() -> None:
    """Put our two functions in place of the engine's (``contract.REPLACED``).

    Raises:
        PlatformError: the engine's are not those we know.
    """
    check_replaced(DistributedCheckpointer)
    DistributedCheckpointer._save_extra_state = staticmethod(save_extra_state)
    DistributedCheckpointer._load_extra_state = staticmethod(load_extra_state)


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
    facts, iteration = read_facts(path), int(path.name.removeprefix("iter_"))
    run.consumed_samples = facts.get("consumed_samples", iteration * run.flags.global_batch_size)
    _read_what_the_engine_does_not_find(run, path, state.get("optimizer"))
    run.first_lr = learning_rate(run.flags).at(iteration)
    state["extra_state"] = {
        "iteration": iteration,
        "consumed_train_samples": run.consumed_samples,
        "train_dataloader": {},  # it begins where Run.consumed_samples says
        "lr_scheduler": {"last_epoch": iteration, "_last_lr": [run.first_lr], "lr_lambdas": [None]},
    }
    print_rank_0(f"resumed from {path}: iteration {iteration}, {run.consumed_samples} samples consumed")


def _read_what_the_engine_does_not_find(run: Run, path: Path, optimizer: Any) -> None:
    """Read the average, and the moments of ``optimizer`` unless it is None, that another host wrote."""
    stored = read_metadata(path).state_dict_metadata.keys()
    average = run.model.moving_average()
    if any(name.startswith("ema.") for name in stored):
        torch_dcp.read({"ema": average.averages}, path)
    elif not any(name.startswith(EMA) for name in stored):
        average.begin_again()
    if optimizer is not None and "optimizer.state.0.exp_avg" in stored:  # numbers, not names
        trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        torch_dcp.read({"optimizer": {"state": {name: optimizer.state[p] for name, p in trained.items()}}}, path)


def check(run: Run) -> None:
    """Look at the checkpoint that ``training.load`` stands at before a model is built for it.

    Every rank must call this: each reads its share of the files.

    Raises:
        CheckpointError: it is damaged, could run code, or is of another model; what is named.
    """
    flags = run.flags
    if flags.load is None:
        return
    path = find(flags.load)
    if runtime.rank() == 0:  # the engine loads the pickles of its index without a look
        check_pickles(path, ())
    check_whole(path, lambda path: torch_dcp.problem_of(path, runtime.rank(), runtime.world_size()))
    torch_dcp.check_architecture(path, dit_shapes(flags.mm.model.predictor))
    if not flags.no_load_optim and not torch_dcp.has_optimizer(path):
        raise without_optimizer(path)
    facts = read_facts(path)
    check_classes(facts, flags.mm.classes, path)
    if table := table_of(changes(facts, run_facts(flags, 0, 0))):
        print_rank_0(table)


def find(load: str) -> Path:
    """Return the checkpoint that the engine will take from the folder ``load``.

    Raises:
        CheckpointError: there is none.
    """
    tracker = Path(load) / TRACKER
    what = f"training.load = {load}"
    if not tracker.is_file():
        raise CheckpointError(what, f"holds no checkpoint: there is no {TRACKER}", "leave load out to begin anew")
    name = tracker.read_text(encoding="utf-8").strip()
    if not name.isdecimal():
        raise CheckpointError(
            what,
            f"is {shown(name)} by its {TRACKER}: weights without a run",
            "name the folder that a run saved to",
        )
    path = CheckpointStore(load).path(int(name))
    if not path.is_dir():
        raise CheckpointError(
            what, f"{TRACKER} names {path.name}, which is not there", "write the number of one that is"
        )
    return path
