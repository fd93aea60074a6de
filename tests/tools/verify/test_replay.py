"""A step of a run is computed again, to the digit, and what overflows in it is named."""

import json
import math
import shutil
import sys

import pytest

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.training.dry_run import NOT_FINITE, read_not_finite, record_not_finite
from tests.conftest import ROOT
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
    blocks = "['predictor.blocks.{*}']"
    yaml = f"sub_modules_to_wrap: {blocks}\nrecompute_modules: {blocks}\nsharding_size: auto\n"
    (tmp_path / "fsdp2.yaml").write_text(yaml)
    flags = (
        f"--train-iters 2 --lr 1e-3 --use-torch-fsdp2 --fsdp2-config-path {tmp_path}/fsdp2.yaml --save {tmp_path}/ck"
    )
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
    assert outcome.code == 2 and f"what overflowed: mm-dit replay --checkpoint {tmp_path}/ck" in outcome.output
    code, said = replay(tmp_path / "ck", "")
    assert code == 1 and "first not finite: " in said and "from the beginning" in said, said


def test_position_of_a_run_not_finite_is_left_once_and_read(tmp_path):
    assert read_not_finite(tmp_path) == {}
    record_not_finite(str(tmp_path), 7, math.nan, 2.0)
    assert (
        read_not_finite(tmp_path)["iteration"] == 7
        and read_not_finite(tmp_path)["command"]["arguments"] == sys.argv[1:]
    )
    record_not_finite(None, 8, 0.0, 0.0)
    record_not_finite(str(tmp_path / "missing"), 8, 0.0, 0.0)
    for text in ("[1]", "{", '{"iteration": "7"}', '{"iteration": 7, "command": {"folder": 1}}'):
        (tmp_path / NOT_FINITE).write_text(text)
        with pytest.raises(CheckpointError, match="is not a record that a run writes"):
            read_not_finite(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--iteration"),
        ("--iteration 0", "--iteration = 0"),
        ("--iteration 9", "does not record its command"),
        ("--iteration 4 --checkpoint {}/iter_0000004", "--iteration = 4"),
        ("--iteration 4 --checkpoint {}/nowhere", "nowhere"),
        ("--checkpoint {}/empty", "--checkpoint = "),
        ("--iteration 3 --checkpoint {}/empty", "--checkpoint = "),
    ],
)
def test_step_that_cannot_be_replayed_is_refused(tmp_path, capsys, flags, message):
    store = CheckpointStore(tmp_path)
    store.begin(4)
    store.commit(4, {"iteration": 4})
    (tmp_path / "empty").mkdir()
    assert main(["replay", "--checkpoint", str(tmp_path), *flags.format(tmp_path).split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("iteration", "changed", "message"),
    [
        (9, "", "--iteration = 9"),
        (4, "-- --train-iters 3", "--iteration = 4"),
        (5, "-- --ai-framework mindspore", "--ai-framework = mindspore"),
    ],
)
def test_step_that_the_run_does_not_have_is_refused(tmp_path, capsys, iteration, changed, message):
    words = "--mm-model m.json --mm-data d.json --micro-batch-size 4 --train-iters 5 --lr 1e-3"
    facts = {"iteration": iteration, "command": {"arguments": words.split(), "folder": "."}}
    (tmp_path / NOT_FINITE).write_text(json.dumps(facts))
    assert main(["replay", "--checkpoint", str(tmp_path), *changed.split()]) == 2
    assert message in capsys.readouterr().err
