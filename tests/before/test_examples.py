"""Config folders of examples/dit print the losses of version 0.2.0, and describe its models."""

import json
import re

import pytest

from mindspeed_mm_dit.cli.main import main
from tests.before.runs import assert_same_lines, run, run_on_mindspore
from tests.conftest import ROOT
from tests.mindspore import launch as mindspore

BEFORE = ROOT / "tests" / "data" / "before"
LOSSES = json.loads((BEFORE / "losses.json").read_text())
PLANS = json.loads((BEFORE / "plans.json").read_text())
STEPS = 3
"""Of the six that are kept: the third is behind two steps of the optimizer."""
ELSEWHERE = ("--train-iters", "--log-interval", "--save", "--load", "--report", "--tensorboard")
"""Flags of train.args that change no digit of the first steps, or are given here."""


def flags(config):
    """Return the flags of a config folder, with its learning rates and the first STEPS of its steps."""
    lines = (ROOT / config / "train.args").read_text().splitlines()
    given = [line for line in lines if line.startswith("--") and not line.startswith(ELSEWHERE)]
    length = next(line.split()[1] for line in lines if line.startswith("--train-iters"))
    files = f"--mm-model {ROOT / config / 'model.json'} --mm-data {ROOT / config / 'data.json'}"
    return f"{files} {' '.join(given)} --lr-decay-iters {length} --train-iters {STEPS} --log-interval 1"


def first_lines(framework, config):
    return dict(list(LOSSES[framework][config].items())[:STEPS])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the embedded images and clips are written, once."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.ranks
@pytest.mark.parametrize("config", LOSSES["pytorch"])
def test_example_prints_its_older_losses(place, config):
    if "text_encoder" in (ROOT / config / "model.json").read_text():
        pytest.importorskip("av", reason="requirements/video.txt")
        pytest.importorskip("transformers", reason="requirements/video.txt")
    assert_same_lines(run(place, flags(config)), first_lines("pytorch", config))


@pytest.mark.ranks
@mindspore.needs_mindspore
@pytest.mark.parametrize("config", LOSSES["mindspore"])
def test_example_prints_its_older_losses_on_mindspore(place, config):
    assert_same_lines(run_on_mindspore(place, flags(config)), first_lines("mindspore", config))


@pytest.mark.parametrize("config", PLANS)
def test_example_describes_its_older_model(capsys, config):
    flags = ["--world-size", "8", "--device-memory-gib", "80"]
    assert main(["plan", "--model", f"{ROOT / config}/model.json", *flags]) == 0
    said = capsys.readouterr().out
    expected = {**PLANS[config], "ema": PLANS[config]["gradients"]}  # an average is of what is trained, since
    found = {name: re.findall(rf"^ *{name} +([\d.,]+)", said, re.MULTILINE) for name in expected}
    assert found == {name: [figure] for name, figure in expected.items()}, said
