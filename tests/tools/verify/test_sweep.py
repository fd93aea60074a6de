"""MindSpore computes what PyTorch computes, whatever the architecture."""

import sys

import pytest

from benchmarks.sweep import FEW_MODELS, sweep
from mindspeed_mm_dit.tools.verify.compare import Side
from tests.mindspore.launch import PYTHON, needs_mindspore


@pytest.mark.ranks
@pytest.mark.extended
@needs_mindspore
def test_mindspore_has_the_gradients_of_pytorch(tmp_path):
    """A few of the models of benchmarks/sweep.py."""
    found = sweep(FEW_MODELS, (Side("pytorch", sys.executable, "pytorch"), Side("mindspore", PYTHON, "ms")), tmp_path)
    assert len(found.agreements) == len(FEW_MODELS)
    assert [agreement for agreement in found.agreements if not agreement.good] == []
