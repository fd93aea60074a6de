"""Steps of a published run, taken again by ``mm-dit prove --run``: its checkpoints, or its card alone, say how."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mindspeed_mm_dit.cli.main import main
from tests.conftest import ROOT
from tests.training.launch import Configs

FLAGS = "--global-batch-size 8 --micro-batch-size 4 --num-workers 0 --lr 1e-3 --train-iters 5 --save-interval 3 "


@pytest.fixture(autouse=True)
def alone(monkeypatch, framework):
    """One rank in this process, whose environment and folder stay as they were."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    from mindspeed_mm_dit.hosts import prove_run  # (of the framework that is active)

    monkeypatch.setattr(prove_run, "NOISY_STEPS", 1)


@pytest.fixture(scope="module")
def published(tmp_path_factory, digits_folder):
    """A tiny run's folder of checkpoints and its log."""
    place = tmp_path_factory.mktemp("published")
    configs = Configs.create(place, digits_folder, hidden_size=32, num_layers=2, num_heads=2)
    outcome = configs.run(f"{FLAGS} --save {place}/ck")
    assert outcome.code == 0, outcome.output
    (place / "log").write_text(outcome.output)
    return place


@pytest.mark.ranks
def test_steps_after_each_checkpoint_have_the_digits_of_the_log_and_so_says_the_card(published, tmp_path, capsys):
    card = tmp_path / "card.md"
    assert main(["prove", "--run", f"{published}/ck", "--log", f"{published}/log", "--card", str(card)]) == 0
    said = capsys.readouterr().out
    assert [int(place) for place in re.findall(r"PASS  iteration +(\d+)  loss .*: the same digits", said)] == [1, 4]
    text = card.read_text()
    assert all(f" iteration {step:8d}/       5 | mean of 1 | loss: " in text for step in range(1, 6)), text
    assert "iteration 1, 4." in text and str(published) not in text
    assert main(["prove", "--run", str(card), "--at", "1,2", "--", *here(published)]) == 0
    assert "PASS  iteration      2  loss" in capsys.readouterr().out


@pytest.mark.ranks
def test_another_seed_and_a_wrong_line_are_told(published, tmp_path, capsys):
    flags = ["prove", "--run", f"{published}/ck", "--at", "2", "--log"]
    lines = (published / "log").read_text()
    loss = re.search(r"iteration +2/.* loss: (\S+)", lines)[1]
    (tmp_path / "log").write_text(lines.replace(loss, f"{float(loss) * 1.0001:.6E}"))
    assert main([*flags, str(tmp_path / "log")]) == 1
    said = capsys.readouterr().out
    assert "FAIL  iteration      2  loss" in said and "PASS  iteration      2  gradient norm" in said
    assert main([*flags, f"{published}/log", "--", "--seed", "7"]) == 1
    assert "FAIL  iteration      2  loss" in capsys.readouterr().out


def here(published: Path) -> list[str]:
    return ["--mm-model", f"{published}/model.json", "--mm-data", f"{published}/data.json"]


@pytest.mark.ranks
def test_the_first_steps_of_the_embedded_demo_are_those_of_its_card(digits_folder, tmp_path, capsys):
    data = json.loads((ROOT / "examples/dit/data.json").read_text())
    data["dataset_param"]["data_folder"] = str(digits_folder)
    del data["dataset_param"]["source"]
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = ["--at", "20", "--", "--mm-data", str(tmp_path / "data.json"), "--num-workers", "0"]
    assert main(["prove", "--run", "docs/digits_card.md", *flags]) == 0
    said = capsys.readouterr().out
    assert "PASS  iteration     20  loss" in said and "changed since" not in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--run", "README.md"], "--run = README.md: is no card of a run"),
        (["--run", "nowhere"], "there is no such folder"),
        (["--run", "docs/digits_card.md", "--at", "7"], "--at = 7: is not in the log"),
        (["--run", "docs/digits_card.md", "--at", "1.5"], "1.5 is no list of iterations"),
        (["--at", "20"], "CONFIG: name one config folder"),
        (["digits", "--card", "card.md"], "--at, --log and --card: are about a run"),
    ],
)
def test_what_is_no_run_is_named(flags, reason, capsys):
    assert main(["prove", *flags]) == 2
    assert reason in capsys.readouterr().err
