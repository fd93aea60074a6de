"""What a kind of files of reference values is: how one is known, what it gives, what is recomputed of it.

To add a kind: a file beside this one with a program, which takes (arrays, weights by flag) and has what its rows ask
for, and its ``Kind``; and the kind's line in ``registry.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm_dit.verify.reference.file import Given, Weights
from mindspeed_mm_dit.verify.table import Rows


@dataclass(frozen=True)
class Kind:
    """A kind of files; what is a name here is a regular expression of it."""

    signature: str
    """Names that no file of a kind further down in the registry has."""
    inputs: str
    """Names that are given, or kept for information."""
    program: Callable[[Given, Weights], Any]
    """Recomputes a file, each quantity when it is asked for."""
    rows: Rows
    """Every quantity that such a file may hold."""
    has_network: bool = True
    """Whether the values are those of a network, whose weights ``--checkpoint`` names."""
    not_checked: Mapping[str, str] = field(default_factory=dict)
    """Names that nothing here recomputes, and why."""
