"""Steps of a published run, taken again by ``mm-dit prove --run``: its checkpoints, or its card alone, say how."""

import json
import re

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
    from mindspeed_mm_dit.tools.verify import recompute

    monkeypatch.setattr(recompute, "NOISY_STEPS", 1)


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
def test_steps_of_a_run_have_the_digits_of_its_log(published, tmp_path, capsys):
    card, page = tmp_path / "card.md", tmp_path / "page.html"
    assert recompute(f"{published}/ck", "--log", f"{published}/log", "--card", str(card), page=page) == 0
    said = capsys.readouterr().out
    assert [int(place) for place in re.findall(r"PASS  iteration +(\d+)  loss .*: the same digits", said)] == [1, 4]
    text = card.read_text()
    assert all(f" iteration {step:8d}/       5 | mean of 1 | loss: " in text for step in range(1, 6)), text
    assert "iteration 1, 4." in text and str(published) not in text
    found = json.loads(page.with_suffix(".json").read_text())
    assert [each["name"] for each in found["quantities"]] == ["loss/1", "gradient norm/1", "loss/4", "gradient norm/4"]
    assert found["about"]["weights after iteration 5"] in text and "4 of 4 numbers of the log are" in page.read_text()
    assert recompute(str(card), "--at", "1,2", "--", *here(published), page=page) == 0
    assert "PASS  iteration      2  loss" in capsys.readouterr().out


@pytest.mark.ranks
def test_another_seed_and_a_wrong_line_fail(published, tmp_path, capsys):
    flags, page = [f"{published}/ck", "--at", "2", "--log"], tmp_path / "page.html"
    lines = (published / "log").read_text()
    loss = re.search(r"iteration +2/.* loss: (\S+)", lines)[1]
    (tmp_path / "log").write_text(lines.replace(loss, f"{float(loss) * 1.0001:.6E}"))
    assert recompute(*flags, str(tmp_path / "log"), page=page) == 1
    said = capsys.readouterr().out
    assert "<td class=FAIL>FAIL</td>" in page.read_text() and "1 of 2 numbers" in page.read_text()
    assert "FAIL  iteration      2  loss" in said and "PASS  iteration      2  gradient norm" in said
    assert recompute(*flags, f"{published}/log", "--", "--seed", "7", page=page) == 1
    assert "FAIL  iteration      2  loss" in capsys.readouterr().out


def recompute(place, *flags, page):
    return main(["prove", "--output", str(page), "--run", place, *flags])


def here(published):
    return ["--mm-model", f"{published}/model.json", "--mm-data", f"{published}/data.json"]


@pytest.mark.extended
@pytest.mark.ranks
def test_steps_of_the_demo_have_the_digits_of_its_card(digits_folder, tmp_path, capsys):
    data = json.loads((ROOT / "examples/dit/data.json").read_text())
    data["dataset_param"]["data_folder"] = str(digits_folder)
    del data["dataset_param"]["source"]
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = ["--at", "20", "--", "--mm-data", str(tmp_path / "data.json"), "--num-workers", "0"]
    assert recompute("examples/digits_card.md", *flags, page=tmp_path / "page.html") == 0
    said = capsys.readouterr().out
    assert "PASS  iteration     20  loss" in said and "changed since" not in said
