"""The folder of a witness: for each rank a .json, written last, and the safetensors that it lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError, DataError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file

FORM = "mm-dit witness 1"
PART_BYTES = 2**26
"""Bytes after which a new file begins."""
RECORD_AGAIN = "record it again: with dit.witness(...) as w, and w.step() after the optimizer's step"


@dataclass(frozen=True)
class Recorded:
    """What one rank recorded."""

    label: str
    arrays: Mapping[str, np.ndarray]
    noise: Mapping[str, float]
    """How far rounding moved each quantity on that machine."""
    facts: Mapping[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of each parameter."""
        return {name: tuple(shape) for name, shape in self.facts["shapes"].items()}

    def below(self, start: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names begin with ``start``, without it."""
        return {name[len(start) :]: array for name, array in self.arrays.items() if name.startswith(start)}


def write(folder: Path, rank: int, arrays: Mapping[str, np.ndarray], noise: Any, facts: Mapping[str, Any]) -> None:
    """Write what a rank recorded, a part at a time."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    files, part, size = dict[str, int](), dict[str, np.ndarray](), 0
    names = list(arrays)
    for name in names:
        part[name] = np.ascontiguousarray(arrays[name])
        size += part[name].nbytes
        if size > PART_BYTES or name == names[-1]:
            file = folder / f"rank{rank}-{len(files)}.safetensors"
            save_file(part, file)
            files[file.name] = file.stat().st_size
            part, size = {}, 0
    content = {"form": FORM, "files": files, "names": names, "noise": noise, "facts": facts}
    (folder / f"rank{rank}.json").write_text(json.dumps(content), encoding="utf-8")


def read(folder: str | Path) -> list[Recorded]:
    """Return what each rank recorded; raises DataError for a folder that is none, is cut short, or has no step."""
    found = sorted(Path(folder).glob("rank*.json"))
    if not found:
        begun = any(Path(folder).glob("rank*.safetensors"))
        raise DataError(str(folder), "ended before its step did" if begun else "is no witness", RECORD_AGAIN)
    return [_read(path, f"{folder}" if len(found) == 1 else f"{folder} rank {n}") for n, path in enumerate(found)]


def _read(path: Path, label: str) -> Recorded:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names, files = content["names"], content["files"]
        is_whole = content["form"] == FORM and all((path.parent / f).stat().st_size == s for f, s in files.items())
        arrays: dict[str, np.ndarray] = {}
        for file in files if is_whole else ():
            arrays |= read_safetensors_file(path.parent / file)[0]
        return Recorded(label, {name: arrays[name] for name in names}, content["noise"], content["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
        raise DataError(str(path.parent), f"is cut short or damaged: {path.name} and its files", RECORD_AGAIN) from None
