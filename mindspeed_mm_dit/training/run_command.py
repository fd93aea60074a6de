"""What a run leaves so that one of its steps can be computed again: its command, and which step was not finite."""

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
"""Beside the checkpoints: the step that was not finite, with the command of its run."""


def command(save: str, words: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the command of this run: paths inside the folder that it was started in begin there.

    words: its flags, where those of this process are a host's.
    That folder is told from ``save``, the --save folder, where this is inside it: both may move, and name no machine.
    """
    here, there = os.getcwd(), os.path.realpath(save)
    is_inside = os.path.commonpath([here, there]) == here
    return {
        "arguments": [below(word, here) for word in (sys.argv[1:] if words is None else words)],
        "folder": os.path.relpath(here, there) if is_inside else here,
    }


def leave(save: str | None, iteration: int, loss: float, grad_norm: float) -> None:
    """Keep which step was not finite, on the first rank; a disk that fails keeps nothing."""
    from mindspeed_mm_dit.framework import runtime  # (who looks for it may not know yet which framework the run's is)

    if not save or runtime.rank() != 0:
        return
    facts = {"iteration": iteration, "loss": str(loss), "grad_norm": str(grad_norm), COMMAND: command(save)}
    with suppress(OSError):
        (Path(save) / NOT_FINITE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def found(folder: Path) -> dict[str, Any]:
    """Return what ``leave`` has left in a folder of checkpoints, {} where no step was not finite.

    Raises CheckpointError where it is something else.
    """
    try:
        facts = json.loads((folder / NOT_FINITE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or type(facts.get("iteration")) is not int or not is_command(facts.get(COMMAND)):
        raise CheckpointError(str(folder / NOT_FINITE), "is not what a run leaves there", "remove it")
    return facts


def is_command(value: Any) -> bool:
    """Return whether ``value`` is a command as ``command`` gives it."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("folder"), str)
        and isinstance(value.get("arguments"), list)
        and all(isinstance(word, str) for word in value["arguments"])
    )
