"""Recompute every quantity in a file of reference values with the active framework, and judge it.

``float64/<result>`` in a file is the result of the same program in float64. The kinds of files, one module of
``reference/`` each, define the other names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    MUON,
    FileKind,
    ReferenceArrays,
    read_arrays,
    unknown_quantity,
)
from mindspeed_mm_dit.tools.verify.reference.image_transformers import IMAGE_TRANSFORMER
from mindspeed_mm_dit.tools.verify.reference.images import DIT
from mindspeed_mm_dit.tools.verify.reference.lora import IMAGE_LORA, LORA
from mindspeed_mm_dit.tools.verify.reference.recipes import JIT, LIGHTNING_DIT, MEAN_FLOW
from mindspeed_mm_dit.tools.verify.reference.sit import REPA, SIT
from mindspeed_mm_dit.tools.verify.reference.text_to_video import TEXT_TO_VIDEO, WAN_VAE
from mindspeed_mm_dit.tools.verify.reference.wan import WAN
from mindspeed_mm_dit.tools.verify.table import (
    Finding,
    Quantity,
    Tolerances,
    UnknownQuantity,
    find_row,
    judge,
    relative_error,
)

KINDS = (
    *(MUON, IMAGE_LORA, LORA, IMAGE_TRANSFORMER, WAN, WAN_VAE, TEXT_TO_VIDEO, MEAN_FLOW, LIGHTNING_DIT, JIT, REPA, SIT),
    DIT,
)
"""The kinds of files; a file has the first kind whose signature matches one of its names."""


def kind_of(names: Collection[str]) -> FileKind:
    """Return the kind of a file with the keys ``names``."""
    return next(kind for kind in KINDS if any(re.fullmatch(kind.signature, name) for name in names))


MatchedRow = tuple[Quantity, tuple[str, ...]]
"""The row of a name, and the matches of its groups."""
_FLOAT64 = "float64/"
MAX_RELATIVE, MAX_ABSOLUTE = 1e-2, 1e-6
"""How far float32 may be from float64 in a file: relative (the published files: 8e-5), or absolute for values that are
nothing but rounding. A larger difference means another quantity, which would widen its bound."""


def compare(
    reference: str | Path,
    checkpoint: str | Path | None,
    tolerance: float,
    table_tolerance: float,
    parts: Mapping[str, str | Path] | None = None,
    on_left_out: Callable[[str, str], None] = lambda group, why: None,
) -> list[Finding]:
    """Recompute and compare every result in ``reference``.

    Args:
        parts: flag -> weights of further parts of a text-to-video model.
        on_left_out: called with each group of results that is not checked, and why.

    Raises CheckpointError for a file without results, a file of images without ``config``, an unknown key, inputs that
    do not fit the network, or values that cannot belong to one quantity.
    """
    arrays, tolerances = read_arrays(reference), Tolerances(tolerance, table_tolerance)
    weights = {**({} if checkpoint is None else {"--checkpoint": checkpoint}), **(parts or {})}
    names = list(dict.fromkeys(key.removeprefix(_FLOAT64) for key in arrays))
    kind = kind_of(names)
    if kind.has_network and checkpoint is None:
        raise ConfigError("--checkpoint is required, because the values of the file are those of a network.")
    with _named_errors(reference, "inputs"):
        program = kind.program(arrays, weights)
    results = _results(kind, names)
    for group, why in _left_out(kind, names, results, weights).items():
        on_left_out(group, why)
    checked = {name: row for name, row in results.items() if row[0].needs in (None, *weights)}
    if not checked:
        raise CheckpointError(f"--reference = {reference} has no results to compare, only inputs.")
    findings = []
    for name, row in checked.items():
        with _named_errors(reference, name):
            findings.append(_judged(name, row, program, arrays, tolerances))
    return findings


@contextmanager
def _named_errors(reference: str | Path, part: str) -> Iterator[None]:
    """Raise CheckpointError, naming file and part, for any error of an operator about values that do not fit."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"--reference = {reference} has {part} that cannot be computed here: {type(error).__name__}: "
            f"{shorten_repr(str(error))}. {FORMAT}"
        ) from error


def _results(kind: FileKind, names: list[str]) -> dict[str, MatchedRow]:
    """Return the results among ``names`` to recompute; raises CheckpointError for a name that has no row."""
    results = {}
    for name in names:
        if re.fullmatch(kind.inputs, name) or any(re.fullmatch(other, name) for other in kind.not_checked):
            continue
        row = find_row(kind.rows, name)
        if row is None:
            raise unknown_quantity(name)
        results[name] = row
    return results


def _left_out(
    kind: FileKind, names: list[str], results: Mapping[str, MatchedRow], weights: Mapping[str, Any]
) -> dict[str, str]:
    """Return groups that are not checked, or single results in a group that is, with the reasons."""
    why = {
        name.partition("/")[0]: kind.not_checked[other]
        for other in kind.not_checked
        for name in names
        if re.fullmatch(other, name)
    }
    checked = {name.partition("/")[0] for name, (row, _) in results.items() if row.needs in (None, *weights)}
    for name, (row, _) in results.items():
        if row.needs not in (None, *weights):
            group = name.partition("/")[0]
            why[name if group in checked else group] = f"needs {row.needs}"
    return why


def _ours(name: str, matched: MatchedRow, program: Any) -> np.ndarray:
    row, groups = matched
    try:
        values = row.compute(program, *groups)
    except UnknownQuantity as hint:
        raise unknown_quantity(name, str(hint)) from None
    return np.asarray(values) if isinstance(values, (np.ndarray, np.generic, tuple)) else ops.numpy(values)


def _judged(name: str, matched: MatchedRow, program: Any, arrays: ReferenceArrays, tolerances: Tolerances) -> Finding:
    """Judge our value against float64, allowing for float32 rounding, or against the only published value."""
    (row, groups), ours = matched, _ours(name, matched, program)
    published, exact = arrays.get(name), arrays.get(_FLOAT64 + name)
    if row.start is not None:
        start = row.start(program, *groups).astype(np.float64)
        ours, published, exact = (_from(start, values) for values in (ours, published, exact))
    bound = row.bound
    if published is None or exact is None:
        reference = published if exact is None else exact
        assert reference is not None, "a name of the file is one of the two"
        return judge(name, ours, reference, bound, tolerances)
    noise = relative_error(published, exact)
    both = f"{name} and {_FLOAT64}{name} in --reference"
    if not math.isfinite(noise):
        raise CheckpointError(f"{both} differ in shape, or are not finite.")
    if noise > MAX_RELATIVE and np.linalg.norm((published - exact).ravel()) > MAX_ABSOLUTE:
        raise CheckpointError(
            f"{both} are {noise:.1e} apart, and rounding alone moves a value by at most {MAX_RELATIVE:g}. Compute both "
            "with one program from the same inputs."
        )
    return judge(name, ours, exact, bound, tolerances, noise)


def _from(start: np.ndarray, values: np.ndarray | None) -> Any:
    """Return ``values`` relative to ``start``; values of another shape are returned unchanged, and judged so."""
    fits = values is not None and values.shape[-start.ndim :] == start.shape
    return values - start if values is not None and fits else values
