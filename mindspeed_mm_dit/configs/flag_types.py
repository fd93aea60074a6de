"""Argparse types for flags: each parses a flag's text or reports what it should have been."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from mindspeed_mm_dit.configs.limits import FLOAT32, LARGEST, MOST_THREADS, short_repr


def number(kind: type, is_valid: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """Return an argparse type that accepts a ``kind`` that is ``is_valid``; its error reads "must be ``expected``"."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:  # (also of a number of thousands of digits)
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, not {short_repr(text)}")
        return value

    return parse


positive_int = number(int, lambda v: 0 < v <= LARGEST, "a positive whole number below 2**63")
unsigned_int = number(int, lambda v: 0 <= v <= LARGEST, "a whole number of at least 0, below 2**63")
batches = number(int, lambda v: 0 <= v <= 100_000, "a whole number from 0 to 100000")
threads = number(int, lambda v: 0 <= v <= MOST_THREADS, f"a whole number from 0 to {MOST_THREADS}")
positive_float = number(float, lambda v: FLOAT32[0] <= v <= FLOAT32[1], "a positive number in the range of float32")
finite_float = number(float, math.isfinite, "a number")
fraction = number(float, lambda v: 0 <= v < 1, "a number in [0, 1)")


def window(text: str) -> tuple[float, float]:
    """Parse "LOW,HIGH", two numbers."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 0.875,1, not {short_repr(text)}") from None
    return low, high


std = number(float, lambda v: 0.001 <= v <= 0.288, "a width from 0.001 to 0.288, about the plain mean")
