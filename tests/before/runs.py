"""Run pretrain_dit.py with flags alone, and see whether it printed what version 0.2.0 did."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.mindspore import launch as mindspore
from tests.training import launch
from tests.training.launch import Outcome

SCRIPT = [str(ROOT / "pretrain_dit.py"), "--host", "standalone"]


def run(place: Path, flags: str) -> Outcome:
    return launch.run([sys.executable, *SCRIPT, *flags.split()], place)


def run_on_mindspore(place: Path, flags: str) -> Outcome:
    return mindspore.run_script([*SCRIPT, "--ai-framework", "mindspore", *flags.split()], place)


LOSS_TOLERANCE = 2e-5
"""Relative. One machine prints the same digits. Another processor's products of matrices round otherwise (oneDNN on
AMD, MKL elsewhere): with the instructions of SSE 4.1 in place of AVX-512, an AMD EPYC was 2.3e-7 away at most."""
NORM_TOLERANCE = 1.5e-3
"""Absolute: norms are printed with three digits behind the point."""


def assert_same_lines(outcome: Outcome, lines: Mapping[str, list[str]]) -> None:
    """Compare learning rates as text, losses and gradient norms as numbers; ``lines`` by iteration, as printed."""
    assert outcome.code == 0, outcome.output
    assert [str(iteration) for iteration in outcome.lines] == list(lines), outcome.output
    for iteration, (rate, loss, norm) in lines.items():
        found = outcome.lines[int(iteration)]
        assert found[0] == rate and float(found[1]) == pytest.approx(float(loss), rel=LOSS_TOLERANCE), iteration
        assert float(found[2]) == pytest.approx(float(norm), abs=NORM_TOLERANCE), iteration


def assert_same_validations(outcome: Outcome, validations: Mapping[str, list[str]]) -> None:
    assert [str(iteration) for iteration in outcome.validations] == list(validations), outcome.output
    for iteration, values in validations.items():
        found = [float(value) for value in outcome.validations[int(iteration)]]
        assert found == pytest.approx([float(value) for value in values], rel=LOSS_TOLERANCE), iteration
