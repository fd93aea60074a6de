"""A step of a run is computed again, to the digit, and what overflows in it is named."""

import json
import math
import re
import shutil
import sys

import pytest

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.training.dry_run import NOT_FINITE, read_not_finite, record_not_finite
from tests.conftest import ROOT
from tests.tools.tables import refusals
from tests.training.launch import Configs, mm_dit

FLAGS = "--global-batch-size 8 --micro-batch-size 4 --num-workers 0 --lr-decay-style constant "


def replay(folder, flags, ranks=1, cwd=ROOT):
    done = mm_dit("replay", "--checkpoint", folder, *flags.split(), ranks=ranks, folder=cwd)
    return done.code, done.output


def head(iteration, line):
    """What is printed of a step whose line in the log says (learning rate, loss, gradient norm)."""
    return f"iteration {iteration} | loss: {line[1]} | grad norm: {line[2]} |"


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "ck"
    outcome = tiny.run(FLAGS + f"--train-iters 5 --lr 1e-3 --save-interval 3 --save-retain-interval 3 --save {folder}")
    assert outcome.code == 0, outcome.output
    return outcome, folder


@pytest.mark.ranks
@pytest.mark.parametrize(("iteration", "origin"), [(2, "the beginning"), (5, "iter_0000003")])
def test_step_is_computed_again_to_the_printed_digit(trained, iteration, origin):
    outcome, folder = trained
    code, said = replay(folder, f"--iteration {iteration}")
    assert code == 0 and head(iteration, outcome.lines[iteration]) in said, said
    assert origin in said and f"  {8 * iteration - 1}  " in said


@pytest.mark.extended
@pytest.mark.ranks
def test_step_of_sharded_ranks_is_computed_again(tiny, tmp_path):
    yaml, blocks = tmp_path / "fsdp2.yaml", "['predictor.blocks.{*}']"
    yaml.write_text(f"sub_modules_to_wrap: {blocks}\nrecompute_modules: {blocks}\nsharding_size: auto\n")
    flags = f"--train-iters 2 --lr 1e-3 --use-torch-fsdp2 --fsdp2-config-path {yaml} --save {tmp_path}/ck"
    outcome = tiny.run(FLAGS + flags, 2)
    code, said = replay(tmp_path / "ck", "--iteration 2", 2)
    assert code == 0 and head(2, outcome.lines[2]) in said, said
    assert said.index("rank 0:") < said.index("rank 1:") and "  8  " in said and "  15  " in said


@pytest.mark.ranks
def test_moved_run_is_replayed_and_names_no_machine(tiny, tmp_path):
    home = tmp_path / "alice"
    shutil.copytree(tiny.folder, home)
    outcome = Configs(home).run(FLAGS + "--train-iters 3 --lr 1e-3 --save-interval 2 --save out/ck")
    assert outcome.code == 0, outcome.output
    written = read_facts(CheckpointStore(home / "out/ck").path(2))
    assert "alice" not in json.dumps(written) and written["command"]["folder"] == "../.."
    home.rename(tmp_path / "bob")
    code, said = replay(tmp_path / "bob/out/ck", "--iteration 3")
    assert code == 0 and head(3, outcome.lines[3]) in said, said
    (tmp_path / "bob/out/ck").rename(tmp_path / "ck")  # the checkpoints alone, replayed where the configs are
    code, said = replay(tmp_path / "ck", "--iteration 3", cwd=tmp_path / "bob")
    assert code == 0 and head(3, outcome.lines[3]) in said, said


@pytest.mark.extended
@pytest.mark.ranks
def test_overflow_is_named_with_its_module(trained, tmp_path):
    _, folder = trained
    origin, store = CheckpointStore(folder).path(3), CheckpointStore(tmp_path)
    state = torch_dcp.read_tree(origin)
    state["model.blocks.1.attn.qkv.weight"].fill_(1e30)
    torch_dcp.write(state, store.begin(3))
    store.commit(3, read_facts(origin))
    code, said = replay(tmp_path, "--iteration 5")
    assert code == 1 and "iteration 4 | loss: NAN | grad norm: nan |" in said, said
    assert "first not finite: output of blocks.1.attn.proj" in said and said.count("<- not finite") == 4


@pytest.mark.ranks
def test_diverged_run_is_replayed_to_its_cause(tiny, tmp_path):
    outcome = tiny.run(FLAGS + f"--train-iters 5 --lr 1e20 --save {tmp_path}/ck")
    assert outcome.code == 2 and f"mm-dit replay --checkpoint {tmp_path}/ck shows" in outcome.output
    code, said = replay(tmp_path / "ck", "")
    assert code == 1 and "first not finite: " in said and "from the beginning" in said, said


def test_position_of_a_run_not_finite_is_left_once_and_read(tmp_path):
    assert read_not_finite(tmp_path) == {}
    record_not_finite(str(tmp_path), 7, math.nan, 2.0)
    found = read_not_finite(tmp_path)
    assert found["iteration"] == 7 and found["command"]["arguments"] == sys.argv[1:]
    record_not_finite(None, 8, 0.0, 0.0)
    record_not_finite(str(tmp_path / "missing"), 8, 0.0, 0.0)
    for text in ("[1]", "{", '{"iteration": "7"}', '{"iteration": 7, "command": {"folder": 1}}'):
        (tmp_path / NOT_FINITE).write_text(text)
        with pytest.raises(CheckpointError, match=NOT_FINITE):
            read_not_finite(tmp_path)


@refusals("""
--checkpoint {} | --iteration
--iteration 0
--iteration 9 | its command
--iteration 4 --checkpoint {}/iter_0000004 | --iteration = 4
--iteration 4 --checkpoint {}/nowhere | nowhere
--checkpoint {}/empty | --checkpoint
--iteration 3 --checkpoint {}/empty | --checkpoint
""")
def test_step_that_cannot_be_replayed_is_refused(tmp_path, capsys, flags, named):
    store = CheckpointStore(tmp_path)
    store.begin(4)
    store.commit(4, {"iteration": 4})
    (tmp_path / "empty").mkdir()
    assert main(["replay", "--checkpoint", str(tmp_path), *flags.format(tmp_path).split()]) == 2
    assert named in capsys.readouterr().err


def test_step_that_the_run_does_not_have_is_refused(tmp_path, capsys):
    words = "--mm-model m.json --mm-data d.json --micro-batch-size 4 --train-iters 5 --lr 1e-3"
    for iteration, changed, named in (
        (9, "", "--iteration = 9"),
        (4, "-- --train-iters 3", "--iteration = 4"),
        (5, "-- --ai-framework mindspore", "--ai-framework = mindspore"),
    ):
        facts = {"iteration": iteration, "command": {"arguments": words.split(), "folder": "."}}
        (tmp_path / NOT_FINITE).write_text(json.dumps(facts))
        assert main(["replay", "--checkpoint", str(tmp_path), *changed.split()]) == 2
        assert named in capsys.readouterr().err


# --- prove --run: steps of a published run, whose checkpoints, or card alone, say how --------------------------------


@pytest.fixture
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
    outcome = Configs.create(place, digits_folder, hidden_size=32, num_layers=2, num_heads=2).run(
        f"{FLAGS} --train-iters 5 --lr 1e-3 --save-interval 3 --save {place}/ck"
    )
    assert outcome.code == 0, outcome.output
    (place / "log").write_text(outcome.output)
    return place


@pytest.mark.ranks
def test_steps_of_a_run_have_the_digits_of_its_log(alone, published, tmp_path, capsys):
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
    here = ("--mm-model", f"{published}/model.json", "--mm-data", f"{published}/data.json")
    assert recompute(str(card), "--at", "1,2", "--", *here, page=page) == 0
    assert "PASS  iteration      2  loss" in capsys.readouterr().out


@pytest.mark.ranks
def test_another_seed_and_a_wrong_line_fail(alone, published, tmp_path, capsys):
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


@pytest.mark.extended
@pytest.mark.ranks
def test_steps_of_the_demo_have_the_digits_of_its_card(alone, digits_folder, tmp_path, capsys):
    data = json.loads((ROOT / "examples/dit/data.json").read_text())
    data["dataset_param"]["data_folder"] = str(digits_folder)
    del data["dataset_param"]["source"]
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = ["--at", "20", "--", "--mm-data", str(tmp_path / "data.json"), "--num-workers", "0"]
    assert recompute("examples/digits_card.md", *flags, page=tmp_path / "page.html") == 0
    said = capsys.readouterr().out
    assert "PASS  iteration     20  loss" in said and "changed since" not in said
