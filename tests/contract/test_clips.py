"""Text to video in the real MindSpeed-MM, by either of its routes, against our own host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from tests.clips_fixtures import clip_configs, write_clips
from tests.contract.hosted import TwoHosts, needs_trees
from tests.contract.native_hosted import NativeAndStandalone, needs_engine

CLOSE = {"rel": 2e-6}


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.json and data.json of cached clips."""
    place = tmp_path_factory.mktemp("clips")
    clips = write_clips(place)
    files = clip_configs(place / "files", clips).folder
    names = ("--model", str(files / "model.json"), "--data", str(files / "data.json"))
    assert main(["cache-latents", *names, "--output", str(place / "cache")]) == 0
    return clip_configs(place / "features", clips, features=str(place / "cache")).folder


def hold(runs: TwoHosts, features: Path) -> None:
    """Put the configs of clips in the place of those of digits."""
    for name in ("model.json", "data.json"):
        shutil.copy(features / name, runs.folder / name)
    (runs.folder / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n")


@needs_trees
@pytest.mark.parametrize("ranks", [1, 2])
def test_clips_teach_the_same_by_the_old_route(features: Path, tmp_path: Path, digits_folder: Path, ranks: int) -> None:
    runs = TwoHosts(tmp_path, digits_folder)
    hold(runs, features)
    there, here = (runs.train(host, 3, ranks=ranks) for host in ("mindspeed-mm", "standalone"))
    assert there.losses.keys() == here.losses.keys() == {1, 2, 3}, there.output + here.output
    assert there.losses == pytest.approx(here.losses, **CLOSE)


@needs_engine
@pytest.mark.parametrize("ranks", [1, 2])
def test_clips_teach_the_same_in_the_native_engine(
    features: Path, tmp_path: Path, digits_folder: Path, ranks: int
) -> None:
    runs = NativeAndStandalone(tmp_path, digits_folder)
    hold(runs, features)
    there = runs.train("mindspeed-mm-native", 3, ranks=ranks, fsdp2=ranks > 1)
    here = runs.train("standalone", 3, fsdp2=False)
    assert there.losses.keys() == here.losses.keys() == {1, 2, 3}, there.output + here.output
    assert there.losses == pytest.approx(here.losses, **CLOSE)
