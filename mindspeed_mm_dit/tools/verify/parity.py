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

from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.tools.verify.reference.dit import DIT
from mindspeed_mm_dit.tools.verify.reference.file import FORMAT, Given, Kind, read_arrays, unknown_quantity
from mindspeed_mm_dit.tools.verify.reference.image_transformers import IMAGE_TRANSFORMER
from mindspeed_mm_dit.tools.verify.reference.jit import JIT
from mindspeed_mm_dit.tools.verify.reference.lightningdit import LIGHTNING_DIT
from mindspeed_mm_dit.tools.verify.reference.lora import IMAGE_LORA, LORA
from mindspeed_mm_dit.tools.verify.reference.meanflow import MEAN_FLOW
from mindspeed_mm_dit.tools.verify.reference.muon import MUON
from mindspeed_mm_dit.tools.verify.reference.repa import REPA
from mindspeed_mm_dit.tools.verify.reference.sit import SIT
from mindspeed_mm_dit.tools.verify.reference.text_to_video import TEXT_TO_VIDEO
from mindspeed_mm_dit.tools.verify.reference.wan import WAN
from mindspeed_mm_dit.tools.verify.reference.wan_vae import WAN_VAE
from mindspeed_mm_dit.tools.verify.table import Finding, NotThere, Quantity, Tolerances, find, judge, relative_error

KINDS = (
    MUON,
    IMAGE_LORA,
    LORA,
    IMAGE_TRANSFORMER,
    WAN,
    WAN_VAE,
    TEXT_TO_VIDEO,
    MEAN_FLOW,
    LIGHTNING_DIT,
    JIT,
    REPA,
    SIT,
    DIT,
)
"""The kinds of files; a file has the first kind whose signature matches one of its names."""


def kind_of(names: Collection[str]) -> Kind:
    """Return the kind of a file with the keys ``names``."""
    return next(kind for kind in KINDS if any(re.fullmatch(kind.signature, name) for name in names))


Found = tuple[Quantity, tuple[str, ...]]
"""The row of a name, and the matches of its groups."""
_FLOAT64 = "float64/"
ROUNDED, NOTHING = 1e-2, 1e-6
"""How far float32 may be from float64 in a file, relative (the published files: 8e-5) or in all, where it is nothing
but rounding: what is further away is another quantity, and would widen its own bound."""


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
    given, asked = read_arrays(reference), Tolerances(tolerance, table_tolerance)
    weights = {**({} if checkpoint is None else {"--checkpoint": checkpoint}), **(parts or {})}
    names = list(dict.fromkeys(key.removeprefix(_FLOAT64) for key in given))
    kind = kind_of(names)
    if kind.has_network and checkpoint is None:
        raise ConfigError("--checkpoint", "is required: the values of the file are those of a network")
    with _said(reference, "its inputs"):
        program = kind.program(given, weights)
    results = _results(kind, names)
    for group, why in _left_out(kind, names, results, weights).items():
        on_left_out(group, why)
    checked = {name: found for name, found in results.items() if found[0].needs in (None, *weights)}
    if not checked:
        raise CheckpointError(f"--reference = {reference}", "has no results to compare, only inputs")
    findings = []
    for name, found in checked.items():
        with _said(reference, name):
            findings.append(_judged(name, found, program, given, asked))
    return findings


@contextmanager
def _said(reference: str | Path, part: str) -> Iterator[None]:
    """Raise CheckpointError, naming file and part, for whatever an operator says of values that do not fit."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"cannot be computed: {type(error).__name__}: {short_repr(str(error))}"
        raise CheckpointError(f"--reference = {reference}: {part}", reason, FORMAT) from error


def _results(kind: Kind, names: list[str]) -> dict[str, Found]:
    """Return the results among ``names`` to recompute; raises CheckpointError for a name that has no row."""
    results = {}
    for name in names:
        if re.fullmatch(kind.inputs, name) or any(re.fullmatch(other, name) for other in kind.not_checked):
            continue
        found = find(kind.rows, name)
        if found is None:
            raise unknown_quantity(name)
        results[name] = found
    return results


def _left_out(kind: Kind, names: list[str], results: Mapping[str, Found], weights: Mapping[str, Any]) -> dict[str, str]:
    """Return groups that are not checked, or single results in a group that is, with the reasons."""
    why = {name.partition("/")[0]: kind.not_checked[other] for other in kind.not_checked for name in names
           if re.fullmatch(other, name)}  # fmt: skip
    checked = {name.partition("/")[0] for name, (row, _) in results.items() if row.needs in (None, *weights)}
    for name, (row, _) in results.items():
        if row.needs not in (None, *weights):
            group = name.partition("/")[0]
            why[name if group in checked else group] = f"needs {row.needs}"
    return why


def _ours(name: str, found: Found, program: Any) -> np.ndarray:
    row, groups = found
    try:
        values = row.compute(program, *groups)
    except NotThere as hint:
        raise unknown_quantity(name, str(hint)) from None
    return np.asarray(values) if isinstance(values, (np.ndarray, np.generic, tuple)) else ops.numpy(values)


def _judged(name: str, found: Found, program: Any, given: Given, asked: Tolerances) -> Finding:
    """Judge our value against float64, allowing for float32 rounding, or against the only published value."""
    (row, groups), ours = found, _ours(name, found, program)
    published, exact = given.get(name), given.get(_FLOAT64 + name)
    if row.start is not None:
        start = row.start(program, *groups).astype(np.float64)
        ours, published, exact = (_from(start, values) for values in (ours, published, exact))
    bound = row.bound
    if published is None or exact is None:
        reference = published if exact is None else exact
        assert reference is not None, "a name of the file is one of the two"
        return judge(name, ours, reference, bound, asked)
    noise = relative_error(published, exact)
    both = f"--reference: {name} and {_FLOAT64}{name}"
    if not math.isfinite(noise):
        raise CheckpointError(both, "differ in shape, or are not finite")
    if noise > ROUNDED and np.linalg.norm((published - exact).ravel()) > NOTHING:
        reason = f"are {noise:.1e} apart, which is no rounding: at most {ROUNDED:g}"
        raise CheckpointError(both, reason, "compute both with one program from the same inputs")
    return judge(name, ours, exact, bound, asked, noise)


def _from(start: np.ndarray, values: np.ndarray | None) -> Any:
    """Return ``values`` relative to ``start``; values of another shape are returned unchanged, and judged so."""
    fits = values is not None and values.shape[-start.ndim :] == start.shape
    return values - start if values is not None and fits else values
