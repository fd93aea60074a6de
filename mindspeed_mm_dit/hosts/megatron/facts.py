"""run.json beside the host's tensors: what the standalone host and ``mm-dit sample`` want to know of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mindspeed_mm_dit.checkpoint.places import COMMAND
from mindspeed_mm_dit.checkpoint.store import RUN_FACTS, CheckpointStore
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training.changes import run_facts
from mindspeed_mm_dit.training.position import command


def note_facts(args: RunConfig, words: Sequence[str]) -> None:
    """Write run.json into every checkpoint of this run that has none; called once the training is over.

    words: the command line of pretrain_dit.py, before it was completed for the host.
    A checkpoint without it (the run was killed) can be resumed all the same.
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
