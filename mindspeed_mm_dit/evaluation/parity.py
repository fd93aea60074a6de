"""Every quantity of a file of reference values, recomputed by the active framework and judged.

``float64/<result>`` in a file is what the same program gives in float64. What else may stand there is known to the
two kinds of files: ``parity_gaussian`` (DiT) and ``parity_flow`` (SiT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.evaluation.compare import relative_error
from mindspeed_mm_dit.evaluation.parity_flow import FlowParity, is_flow
from mindspeed_mm_dit.evaluation.parity_gaussian import GaussianParity
from mindspeed_mm_dit.evaluation.reference import Reference
from mindspeed_mm_dit.evaluation.reference_inputs import check_inputs

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


def compare(reference: str | Path, checkpoint: str | Path, tolerance: float, table_tolerance: float) -> list[Finding]:
    """Recompute and compare every result in ``reference``.

    Raises CheckpointError for a file without ``config`` or results, with a key that means nothing to us, with inputs
    that the network cannot be given, or with values that cannot be those of one quantity.
    """
    read = Reference(reference, checkpoint)
    names = dict.fromkeys(key.removeprefix(_FLOAT64) for key in read.given)
    kind: type[FlowParity] | type[GaussianParity] = FlowParity if is_flow(names) else GaussianParity
    results = [name for name in names if not kind.inputs.fullmatch(name)]
    if not results:
        raise CheckpointError(f"--reference = {reference}", "has no results to compare, only inputs")
    check_inputs(read.given, read.config, kind.num_timesteps)
    ours = kind(read)
    return [
        _finding(name, ours.value(name), read.given, ours.tolerance(name, tolerance, table_tolerance))
        for name in results
    ]


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
