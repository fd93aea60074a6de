"""MindSpore computes what PyTorch computes, whatever the architecture."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.sweep import FEW_MODELS, sweep
from mindspeed_mm_dit.wings.lab.compare import Side


@pytest.mark.ranks
@pytest.mark.extended
def test_mindspore_has_the_gradients_of_pytorch(tmp_path):
    """A few of the models of benchmarks/sweep.py."""
    python = os.environ.get("MM_DIT_MINDSPORE_PYTHON")
    if python is None:
        pytest.skip("MM_DIT_MINDSPORE_PYTHON names no interpreter")
    sides = Side("pytorch", sys.executable, "pytorch"), Side("mindspore", python, "mindspore")
    found = sweep(FEW_MODELS, sides, tmp_path)
    assert len(found.agreements) == len(FEW_MODELS)
    assert [agreement for agreement in found.agreements if not agreement.good] == []
