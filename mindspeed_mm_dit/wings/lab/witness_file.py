"""The folder of a witness: for each step and rank a .json, written last, and the safetensors that it lists."""

from __future__ import annotations

import json
import re
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
    """What one rank recorded of a step."""

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


def write(
    folder: Path, step: int, rank: int, arrays: Mapping[str, np.ndarray], noise: Any, facts: Mapping[str, Any]
) -> None:
    """Write what a rank recorded of a step, a part at a time."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    files, part, size = dict[str, int](), dict[str, np.ndarray](), 0
    begin, names = f"step{step}-rank{rank}", list(arrays)
    for name in names:
        part[name] = np.ascontiguousarray(arrays[name])
        size += part[name].nbytes
        if size > PART_BYTES or name == names[-1]:
            file = folder / f"{begin}-{len(files)}.safetensors"
            save_file(part, file)
            files[file.name] = file.stat().st_size
            part, size = {}, 0
    content = {"form": FORM, "files": files, "names": names, "noise": noise, "facts": facts}
    (folder / f"{begin}.json").write_text(json.dumps(content), encoding="utf-8")


def read(folder: str | Path) -> dict[tuple[int, int], Recorded]:
    """Return what was recorded by step, from 1, and rank; raises DataError for a folder that is no whole witness."""
    named = {path: re.fullmatch(r"step(\d+)-rank(\d+)", path.stem) for path in Path(folder).glob("step*.json")}
    paths = {(int(match[1]), int(match[2])): path for path, match in named.items() if match}
    if not paths:
        begun = any(Path(folder).glob("step*.safetensors"))
        raise DataError(str(folder), "ended before its step did" if begun else "is no witness", RECORD_AGAIN)
    steps, ranks = map(max, zip(*paths))
    if lost := {(step, rank) for step in range(1, steps + 1) for rank in range(ranks + 1)} - paths.keys():
        raise DataError(str(folder), "has no step {} of rank {}".format(*min(lost)), RECORD_AGAIN)
    return {key: _read(path) for key, path in sorted(paths.items())}


def _read(path: Path) -> Recorded:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names, files = content["names"], content["files"]
        is_whole = content["form"] == FORM and all((path.parent / f).stat().st_size == s for f, s in files.items())
        arrays: dict[str, np.ndarray] = {}
        for file in files if is_whole else ():
            arrays |= read_safetensors_file(path.parent / file)[0]
        return Recorded({name: arrays[name] for name in names}, content["noise"], content["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
        raise DataError(str(path.parent), f"is cut short or damaged: {path.name} and its files", RECORD_AGAIN) from None
