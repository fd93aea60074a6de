"""Every quantity of a file of reference values, recomputed by the active framework and judged.

``float64/<result>`` in a file is what the same program gives in float64. What else may stand there is known to the
kinds of files: ``parity_gaussian`` (DiT), ``parity_flow`` (SiT) and ``parity_video`` (text to video).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.verify.compare import relative_error
from mindspeed_mm_dit.verify.reference.dit import GaussianParity
from mindspeed_mm_dit.verify.reference.file import Given, Reference, read_arrays
from mindspeed_mm_dit.verify.reference.inputs import as_taken, check_inputs
from mindspeed_mm_dit.verify.reference.sit import FlowParity, is_flow
from mindspeed_mm_dit.verify.reference.text_to_video import VideoParity, is_video

PUBLISHED_ERRORS = 2.0
"""Where float64 is known, how many times the published float32's error from it passes too: two correct float32
programs round differently, and neither is nearer to the truth by right."""
_FLOAT64 = "float64/"


@dataclass(frozen=True)
class Finding:
    """One quantity compared."""

    name: str
    ours: float
    """Norm of our values."""
    reference: float
    """Norm of the reference's: of float64 where the file has it, else of the published float32."""
    error: float
    """Norm of the difference over norm of the reference; infinite for another shape."""
    published_error: float | None
    """The same of the published float32, where the file has float64."""
    tolerance: float
    """Largest error that passes."""

    @property
    def good(self) -> bool:
        """Whether the error is within tolerance."""
        return self.error <= self.tolerance


class Quantities(Protocol):
    """The quantities of one kind of files."""

    def value(self, name: str) -> np.ndarray:
        """Return our value of the result ``name``."""

    def tolerance(self, name: str, tolerance: float, table_tolerance: float) -> float:
        """Return the largest relative error of ``name`` that passes."""


def compare(
    reference: str | Path,
    checkpoint: str | Path,
    tolerance: float,
    table_tolerance: float,
    parts: Mapping[str, str | Path] | None = None,
    on_left_out: Callable[[str, str], None] = lambda group, why: None,
) -> list[Finding]:
    """Recompute and compare every result in ``reference``.

    Args:
        parts: flag -> weights of further parts of a model of text to video.
        on_left_out: called with each group of results that is not checked, and why.

    Raises CheckpointError for a file without results, or of images without ``config``, with a key that means nothing to
    us, with inputs that the network cannot be given, or with values that cannot be those of one quantity.
    """
    given = read_arrays(reference)
    names = list(dict.fromkeys(key.removeprefix(_FLOAT64) for key in given))
    if is_video(names):
        ours, results = _of_video(given, names, {"--checkpoint": checkpoint, **(parts or {})}, on_left_out)
    else:
        ours, results = _of_images(given, names, checkpoint)
    if not results:
        raise CheckpointError(f"--reference = {reference}", "has no results to compare, only inputs")
    return [
        _finding(name, ours.value(name), given, ours.tolerance(name, tolerance, table_tolerance)) for name in results
    ]


def _of_images(given: Given, names: list[str], checkpoint: str | Path) -> tuple[Quantities, list[str]]:
    """Return what recomputes a file of DiT or SiT, and which of ``names`` are results."""
    read = Reference(given, checkpoint)
    kind: type[FlowParity] | type[GaussianParity] = FlowParity if is_flow(names) else GaussianParity
    check_inputs(given, read.config, kind.num_timesteps)
    given.update(as_taken(given))
    return kind(read), [name for name in names if not kind.inputs.fullmatch(name)]


def _of_video(
    given: Given, names: list[str], parts: Mapping[str, str | Path], on_left_out: Callable[[str, str], None]
) -> tuple[Quantities, list[str]]:
    """Return the same of a file of text to video."""
    video = VideoParity(given, parts)
    for group, why in video.left_out(names).items():
        on_left_out(group, why)
    return video, video.results(names)


def _finding(name: str, ours: np.ndarray, given: dict[str, np.ndarray], tolerance: float) -> Finding:
    """Judge ``ours`` by float64 and what float32 can hold of it, or by the published float32 where there is no more."""
    published, exact = given.get(name), given.get(_FLOAT64 + name)
    reference = published if exact is None else exact
    published_error = None
    if published is not None and exact is not None:
        published_error = relative_error(published, exact)
        if not math.isfinite(published_error):
            raise CheckpointError(f"--reference: {name} and {_FLOAT64}{name}", "differ in shape, or are not finite")
        tolerance = max(tolerance, PUBLISHED_ERRORS * published_error)
    ours_norm, reference_norm = (float(np.linalg.norm(np.asarray(x, np.float64).ravel())) for x in (ours, reference))
    error = relative_error(np.asarray(ours), np.asarray(reference))
    return Finding(name, ours_norm, reference_norm, error, published_error, tolerance)
