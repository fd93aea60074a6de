"""Whole runs in the unmodified native engine, compared with the standalone host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.native_hosted import NativeAndStandalone, needs_engine
from tests.training.launch import Outcome

pytestmark = [needs_engine, pytest.mark.ranks]

STEPS = 20
CLOSE = {"abs": 2e-6, "rel": 0}  # float32 sums in another order; everything random comes with the batch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path) -> NativeAndStandalone:
    return NativeAndStandalone(tmp_path_factory.mktemp("native"), digits_folder)


@pytest.fixture(scope="module")
def standalone(runs: NativeAndStandalone) -> Outcome:
    return good(runs.train("standalone", STEPS, "--save standalone", fsdp2=False))


def good(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.output[-4000:]
    return outcome


def check_same(there: Outcome, here: Outcome, steps: range = range(1, STEPS + 1)) -> None:
    assert list(there.losses) == list(steps), there.output[-4000:]
    assert there.losses == pytest.approx({step: here.losses[step] for step in steps}, **CLOSE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_upstreams_trainer_prints_the_losses_of_the_standalone_host(
    runs: NativeAndStandalone, standalone: Outcome, ranks: int
) -> None:
    path = runs.yaml(f"ranks{ranks}", STEPS, ranks=ranks, fsdp2=ranks > 1)
    there = good(runs.engine(path, ranks))
    assert ("DDP mode is enabled" in there.output) == (ranks == 1)
    check_same(there, standalone)
