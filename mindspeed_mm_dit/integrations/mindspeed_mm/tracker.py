"""Read MindSpeed-MM's tracker file. The host writes it in place, so a kill at that moment leaves it empty."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm_dit.checkpoint.store import TRACKER, CheckpointStore
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.errors import CheckpointError

RELEASE = "release"
"""Content of the tracker file, instead of an iteration, for converted weights without a run."""


def newest(what: str, folder: str) -> Path:
    """Return the checkpoint that a host will load from ``folder``; ``what`` names the setting, as in "--load = DIR".

    Raises:
        CheckpointError: the tracker names no checkpoint that exists.
    """
    name = (Path(folder) / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    iterations = [str(iteration) for iteration in CheckpointStore(folder).iterations()]
    if not name:
        reason = f"its {TRACKER} is empty: a run was killed while it wrote it, after the checkpoint"
        raise CheckpointError(what, reason, f"write {iterations[-1]} into it" if iterations else "name another folder")
    if name != RELEASE and not name.isdecimal():
        raise CheckpointError(
            what, f"its {TRACKER} says {short_repr(name)}", "write the number of a checkpoint into it"
        )
    path = Path(folder) / RELEASE if name == RELEASE else CheckpointStore(folder).path(int(name))
    if not path.is_dir():
        raise CheckpointError(
            what, f"{TRACKER} names {path.name}, which is not there", "write the number of one that is"
        )
    return path
