"""MindSpore computes what PyTorch computes, whatever the architecture."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.sweep import FEW_MODELS, MODELS, random_weights, sweep
from mindspeed_mm_dit.wings.lab.compare import Side


@pytest.mark.ranks
def test_outputs_losses_and_every_gradient_of_mindspore_are_pytorchs(tmp_path):
    """A few of the models of benchmarks/sweep.py."""
    python = os.environ.get("MM_DIT_MINDSPORE_PYTHON")
    if python is None:
        pytest.skip("MM_DIT_MINDSPORE_PYTHON names no interpreter")
    sides = Side("pytorch", sys.executable, "pytorch"), Side("mindspore", python, "mindspore")
    found = sweep(FEW_MODELS, sides, tmp_path)
    assert len(found.agreements) == len(FEW_MODELS)
    assert [agreement for agreement in found.agreements if not agreement.good] == []
    assert found.good and "torch" in found.facts[0] and "mindspore" in found.facts[1]


@pytest.mark.parametrize(("models", "patches"), [(MODELS, set(range(1, 9))), (FEW_MODELS, {1, 4, 6, 8})])
def test_the_models_differ_in_all_that_can_differ(models, patches):
    assert {m.predictor.patch_size for m in models} == patches
    assert {m.diffusion.prediction_type for m in models} == {"epsilon", "sample", "v_prediction"}
    assert {m.diffusion.variance_type for m in models} == {"learned_range", "fixed_small", "fixed_large"}
    assert {m.diffusion.noise_schedule for m in models} == {"linear", "squaredcos_cap_v2"}
    assert len({m.predictor for m in models}) == len(models)


def test_no_weight_of_the_sweep_is_zero():
    assert all(array.all() for array in random_weights(MODELS[0].predictor, 0).values())
