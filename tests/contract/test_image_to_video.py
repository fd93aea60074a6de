"""Wan 2.2 in the real MindSpeed-MM, by either of its routes, against our own host: clips that begin with an image,
times by token, CLIP's features, and one of two experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.contract.hosted import TwoHosts, needs_trees
from tests.contract.native_hosted import NativeAndStandalone, needs_engine
from tests.training.launch import Outcome
from tests.training.test_image_to_video import NETWORKS, begun_configs, clips

__all__ = ["clips"]
pytestmark = pytest.mark.ranks
STEPS = 3
CLOSE = {"rel": 2e-6}
EXPERT = {"timestep_window": [0.875, 1]}


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path, clips: Path) -> Callable:
    """Name of a network -> its configs, and what three steps of its first expert print in our own host on one rank."""

    @cache
    def network(name: str) -> tuple[NativeAndStandalone, Outcome]:
        runs = NativeAndStandalone(tmp_path_factory.mktemp("network"), digits_folder)
        begun_configs(runs.folder, clips, name)
        model = json.loads((runs.folder / "model.json").read_text())
        model["diffusion"] |= EXPERT
        (runs.folder / "model.json").write_text(json.dumps(model))
        (runs.folder / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n")
        return runs, good(runs.train("standalone", STEPS, fsdp2=False))

    return network


def good(outcome: Outcome) -> Outcome:
    assert outcome.losses.keys() == set(range(1, STEPS + 1)), outcome.output[-4000:]
    return outcome


@needs_trees
@pytest.mark.parametrize("name", NETWORKS)
def test_an_expert_learns_the_same_by_the_old_route(networks: Callable, name: str) -> None:
    runs, here = networks(name)
    there = good(TwoHosts.train(runs, "mindspeed-mm", STEPS, "--micro-batch-size 2", ranks=2))
    assert there.losses == pytest.approx(here.losses, **CLOSE)


@needs_engine
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("flags", ["", "--context-parallel-size 2"])
def test_an_expert_learns_the_same_in_the_native_engine(networks: Callable, name: str, flags: str) -> None:
    runs, here = networks(name)
    there = good(runs.train("mindspeed-mm-native", STEPS, flags, ranks=2))
    assert there.losses == pytest.approx(here.losses, **CLOSE)
