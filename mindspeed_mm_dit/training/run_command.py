"""Records of a run for recomputing a step: its command, and the step that was not finite."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.relative_paths import COMMAND, below
from mindspeed_mm_dit.errors import CheckpointError

NOT_FINITE = "not_finite.json"
"""File next to the checkpoints: the step that was not finite, with the command of its run."""


def command(save: str, words: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the command of this run, with paths inside the folder that it was started in relative to that folder.

    words: its flags, if those of this process are a host's.
    If ``save``, the --save folder, is inside that folder, the folder is recorded relative to it: then both may move,
    and no machine is named.
    """
    here, there = os.getcwd(), os.path.realpath(save)
    is_inside = os.path.commonpath([here, there]) == here
    return {
        "arguments": [below(word, here) for word in (sys.argv[1:] if words is None else words)],
        "folder": os.path.relpath(here, there) if is_inside else here,
    }


def record_not_finite(save: str | None, iteration: int, loss: float, grad_norm: float) -> None:
    """Record which step was not finite, on the first rank; if the disk fails, nothing is recorded."""
    from mindspeed_mm_dit.framework import runtime  # (a reader may not know the run's framework yet)

    if not save or runtime.rank() != 0:
        return
    facts = {"iteration": iteration, "loss": str(loss), "grad_norm": str(grad_norm), COMMAND: command(save)}
    with suppress(OSError):
        (Path(save) / NOT_FINITE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_not_finite(folder: Path) -> dict[str, Any]:
    """Return the record that ``record_not_finite`` wrote into a folder of checkpoints, or {} if all steps were finite.

    Raises CheckpointError if the file is something else.
    """
    try:
        facts = json.loads((folder / NOT_FINITE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or type(facts.get("iteration")) is not int or not is_command(facts.get(COMMAND)):
        raise CheckpointError(str(folder / NOT_FINITE), "is not a record that a run writes", "remove it")
    return facts


def is_command(value: Any) -> bool:
    """Return whether ``value`` has the form that ``command`` returns."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("folder"), str)
        and isinstance(value.get("arguments"), list)
        and all(isinstance(word, str) for word in value["arguments"])
    )
