"""The folder of a step trace: for each step and rank a .json, written last, and the safetensors that it lists."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, reason_of
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file

FORM = "mm-dit witness 1"
"""Version of the file format; the name is older than the term step trace."""
MAX_ENTRIES = 4096
"""Number of entries that are recorded of a larger tensor."""
MAX_JSON_BYTES = 2**26
_PARAMETER_KINDS = ("gradient", "moved", "step", "start/step", "average", "start/average")
"""Kinds of arrays that each parameter has, all of the same shape."""
PART_BYTES = 2**26
"""Bytes after which a new file is started."""
RECORD_AGAIN = "record it again: with dit.record_trace(...) as w, and w.step() after the optimizer's step"


@dataclass(frozen=True)
class Facts:
    """The facts about a step in its .json."""

    unit: float
    """The largest relative error of one rounding: 2**-53 of float64, 2**-4 of float8."""
    shapes: dict[str, tuple[int, ...]]
    """The whole shape of each parameter."""
    settings: dict[str, str]
    model: str
    micro_batches: int

    def __post_init__(self) -> None:
        if not 0 <= self.unit < 0.5:
            raise ConfigError(f"unit = {self.unit}", "must be at least 0 and less than 0.5")
        if min((size for shape in self.shapes.values() for size in shape), default=0) < 0:
            raise ConfigError("shapes", "must not be negative")


@dataclass(frozen=True)
class Content:
    """The .json of a step."""

    form: Literal["mm-dit witness 1"]
    files: dict[str, int]
    names: tuple[str, ...]
    noise: dict[str, float]
    facts: Facts

    def __post_init__(self) -> None:
        if negative := [name for name, value in self.noise.items() if value < 0]:
            raise ConfigError(f"noise.{negative[0]} = {self.noise[negative[0]]}", "must not be negative")
        if not any(name.startswith("gradient/") for name in self.names):
            raise ConfigError("names", "lists no gradient")


@dataclass(frozen=True)
class Recorded:
    """What one rank recorded of a step."""

    arrays: Mapping[str, np.ndarray]
    noise: Mapping[str, float]
    """How far rounding moved each quantity on that machine."""
    facts: Facts

    def below(self, start: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names begin with ``start``, without it."""
        return {name[len(start) :]: array for name, array in self.arrays.items() if name.startswith(start)}


def write(
    folder: Path, step: int, rank: int, arrays: Mapping[str, np.ndarray], noise: Any, facts: Mapping[str, Any]
) -> None:
    """Write the record of a step by one rank, in files of about PART_BYTES."""
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
    finite = {name: value for name, value in noise.items() if math.isfinite(value)}
    content = {"form": FORM, "files": files, "names": names, "noise": finite, "facts": facts}
    (folder / f"{begin}.json").write_text(json.dumps(content), encoding="utf-8")


def read(folder: str | Path) -> dict[tuple[int, int], Recorded]:
    """Return the records by step, from 1, and rank; raises DataError for a folder that is not a whole step trace."""
    name = re.compile(r"step([1-9][0-9]*)-rank(0|[1-9][0-9]*)(-[0-9]+\.safetensors|\.json)")
    named = {path: name.fullmatch(path.name) for path in Path(folder).glob("step*")}
    files = {path: (int(match[1]), int(match[2])) for path, match in named.items() if match}
    paths = {key: path for path, key in files.items() if path.suffix == ".json"}
    if incomplete := set(files.values()) - paths.keys():
        step, rank = min(incomplete)
        reason = f"is incomplete: rank {rank} has not finished step {step}, which has no .json"
        raise DataError(str(folder), reason, RECORD_AGAIN)
    if not paths:
        raise DataError(str(folder), "is not a step trace", RECORD_AGAIN)
    steps, ranks = map(max, zip(*paths))
    if len(paths) < steps * (ranks + 1):
        every = ((step, rank) for step in itertools.count(1) for rank in range(ranks + 1))
        lost = next(key for key in every if key not in paths)
        raise DataError(str(folder), "has no step {} of rank {}".format(*lost), RECORD_AGAIN)
    shapes: dict[int, dict[str, tuple[int, ...]]] = {rank: {} for rank in range(ranks + 1)}
    return {key: _read(path, shapes[key[1]]) for key, path in sorted(paths.items())}


def _read(path: Path, shapes: dict[str, tuple[int, ...]]) -> Recorded:
    """Read a step; ``shapes`` of the arrays of each parameter are the same in all steps."""
    try:
        if check_file(path) > MAX_JSON_BYTES:
            raise UnusableFile(f"has more than {MAX_JSON_BYTES:,} bytes")
        content = from_mapping(Content, json.loads(path.read_text(encoding="utf-8")), path.name)
        arrays: dict[str, np.ndarray] = {}
        for file, size in content.files.items():
            if not re.fullmatch(rf"{path.stem}-[0-9]+\.safetensors", file) or check_file(path.with_name(file)) != size:
                raise UnusableFile(f"lists {file} with {size} bytes, which is another file")
            arrays |= read_safetensors_file(path.with_name(file), set(content.names).intersection, MAX_ENTRIES)[0]
        if missing := [name for name in content.names if name not in arrays]:
            raise UnusableFile(f"lists {missing[0]}, which its files lack")
        for name, array in arrays.items():
            kind, _, parameter = name.rpartition("/")
            if kind in _PARAMETER_KINDS and shapes.setdefault(parameter, array.shape) != array.shape:
                raise UnusableFile(f"{name} has another shape than before: {array.shape}, not {shapes[parameter]}")
    except (OSError, ValueError, RecursionError, UnusableFile, ConfigError, CheckpointError) as error:
        reason = f"is cut short or damaged: {path.name} and its files: {reason_of(error)}"
        raise DataError(str(path.parent), reason, RECORD_AGAIN) from None
    return Recorded({name: arrays[name] for name in content.names}, content.noise, content.facts)
