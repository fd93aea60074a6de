"""A part of a file of golden values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import FRAMEWORK


def without(file: Path, folder: Path, *patterns: str) -> Path:
    """Write ``file`` into ``folder`` without the quantities whose names begin as one of ``patterns``; return where."""
    with np.load(file) as whole:
        names = [n for n in whole if not any(re.match(pattern, n.removeprefix("float64/")) for pattern in patterns)]
        np.savez(folder / file.name, **{name: whole[name] for name in names})
    return folder / file.name


def not_all_on_mindspore(names, *quick):
    """Return parameters; of these `make test` takes the ``quick`` alone on MindSpore, which compiles and interprets."""
    marks = [pytest.mark.extended] if FRAMEWORK == "mindspore" else []
    return [pytest.param(name, marks=[] if name in quick else marks) for name in names]


extended_on_mindspore = pytest.mark.extended if FRAMEWORK == "mindspore" else lambda test: test
