"""Runs that keep power-function averages, and mm-dit ema, against sums over the weights of every step."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts
from mindspeed_mm_dit.checkpoint.weights import read_trees
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.models.on_paper import parameters_of
from mindspeed_mm_dit.planning.memory import Placement, memory
from mindspeed_mm_dit.wings.mindspeed_mm.megatron.preflight import check_before_import
from mindspeed_mm_dit.wings.mindspeed_mm.native.commandline import parse, yaml_for

pytestmark = pytest.mark.ranks
STEPS = "--global-batch-size 16 --lr 1e-2 --num-workers 0 --lr-decay-iters 6 --save-interval 1 --keep-last 9 "
STDS = "--power-ema-stds 0.05 0.1 "


@pytest.fixture(scope="module")
def kept(tiny, tmp_path_factory):
    """The checkpoints of all 6 steps of a run."""
    folder = tmp_path_factory.mktemp("kept")
    outcome = tiny.run(STEPS + STDS + f"--train-iters 6 --save {folder}")
    assert outcome.code == 0, outcome.output
    return CheckpointStore(folder)


def read_tree(path, tree):
    return read_trees(path, [tree])[tree]


def direct(store, last, std):
    """The average in float64, from the weights after every step."""
    counted = np.diff((np.arange(last + 1) / last) ** (power_ema.exponent(std) + 1))
    weights = [read_tree(store.path(step), "model") for step in range(1, last + 1)]
    return {name: sum(c * w[name].astype(np.float64) for c, w in zip(counted, weights)) for name in weights[0]}


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        scale = np.linalg.norm(array) or 1.0
        assert np.linalg.norm(found[name] - array) <= 1e-6 * scale, name


def test_each_average_is_the_sum_over_all_steps(kept):
    assert read_facts(kept.path(6))["power_ema_stds"] == [0.05, 0.1]
    for last in (1, 4, 6):
        for tree, std in (("power_ema_1", 0.05), ("power_ema_2", 0.1)):
            assert_close(read_tree(kept.path(last), tree), direct(kept, last, std))
    weights, average = (read_tree(kept.path(6), tree) for tree in ("model", "power_ema_2"))
    assert any(np.abs(weights[name] - average[name]).max() > 1e-4 for name in weights)


@pytest.mark.extended
@pytest.mark.parametrize("std", [0.03, 0.07, 0.15, 0.25])
def test_any_other_width_is_made_of_them(kept, tmp_path, capsys, std):
    output = tmp_path / "ema.safetensors"
    assert main(["ema", "--checkpoint", str(kept.root), "--std", str(std), "--output", str(output)]) == 0
    found = read_safetensors_file(output)[0]
    assert_close(found, direct(kept, 6, std))
    said = capsys.readouterr().out
    assert (
        f"width {std:g} at iteration 6, of 12 averages at iterations 1, 2, 3 ... 6" in said and "met to 0.00%" in said
    )


def test_it_is_of_the_checkpoint_that_is_named_and_the_same_from_mindspores_folder(kept, tmp_path, capsys):
    there = CheckpointStore(tmp_path / "mindspore", keep_last=9)
    for step in kept.iterations():
        state = FORMATS["pytorch"].read(kept.path(step))
        FORMATS["mindspore"].write(there.begin(step), state)
        there.commit(step, state.facts)
    made = []
    for store in (kept, there):
        output = tmp_path / f"{len(made)}.safetensors"
        assert main(["ema", "--checkpoint", str(store.path(4)), "--std", "0.2", "--output", str(output)]) == 0
        made.append(read_safetensors_file(output)[0])
    assert_close(made[0], direct(kept, 4, 0.2))
    assert all(made[0][name].tobytes() == made[1][name].tobytes() for name in made[0])
    assert main(["ema", "--checkpoint", str(kept.root), "--std", "0.1", "--output", str(tmp_path / "0.1.pt")]) == 0
    wanted = read_tree(kept.path(6), "power_ema_2")
    found = FORMATS["pt"].read(tmp_path / "0.1.pt").weights
    assert all(found[name].tobytes() == array.tobytes() for name, array in wanted.items())


@pytest.mark.extended
def test_two_ranks_keep_their_shards_of_them(tiny, tmp_path):
    sharding = f"--use-torch-fsdp2 --fsdp2-config-path {tiny.folder}/auto.yaml"
    sharded = tiny.run(STEPS + STDS + f"--save {tmp_path} --train-iters 6 {sharding}", ranks=2)
    assert sharded.code == 0, sharded.output
    shards = CheckpointStore(tmp_path)
    for tree, std in (("power_ema_1", 0.05), ("power_ema_2", 0.1)):
        assert_close(read_tree(shards.path(6), tree), direct(shards, 6, std))


def test_averages_begin_where_a_checkpoint_has_none_end_where_none_are_asked_for_and_keep_their_widths(
    tiny, tmp_path, capsys
):
    flags = STEPS + f"--save {tmp_path} --load {tmp_path} --train-iters "
    assert tiny.run(flags + "2").code == 0
    assert main(["ema", "--checkpoint", str(tmp_path), "--std", "0.1", "--output", str(tmp_path / "a.pt")]) == 2
    said = capsys.readouterr().err
    assert "iter_0000002: holds no power-function averages\n    Cure: train with --power-ema-stds 0.05 0.1" in said
    begun = tiny.run(flags + "3 " + STDS)
    assert "iter_0000002 has no power-function averages; they begin with its weights" in begun.output
    store = CheckpointStore(tmp_path)
    before, after = (read_tree(store.path(step), "model") for step in (2, 3))
    share = power_ema.share(3, power_ema.exponent(0.05))
    assert_close(
        read_tree(store.path(3), "power_ema_1"),
        {n: before[n] + share * (after[n] - before[n].astype(float)) for n in after},
    )
    other = tiny.run(flags + "4 --power-ema-stds 0.05 0.2")
    assert other.code == 2 and "--power-ema-stds = 0.05 0.2: " in other.output
    assert "has the averages of 0.05 0.1\n    Cure: go on with --power-ema-stds 0.05 0.1" in other.output
    ended = tiny.run(flags + "4")
    assert "the power-function averages of " in ended.output and "iter_0000003 end here" in ended.output
    assert not read_tree(store.path(4), "power_ema_1") and "power_ema_stds" not in read_facts(store.path(4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--std 0.5 --output {tmp}/a.pt", "--std = 0.5: a width is from 0.001 to 0.2887"),
        ("--std 0.1 --output {tmp}/a", "its ending names no format"),
        ("--std 0.1 --output {kept}/iter_0000006", "its ending names no format"),
        ("--std 0.1 --output {tmp}/there.pt", "exists"),
        ("--std 0.1 --output {tmp}/a.pt --checkpoint {tmp}/none", "none"),
    ],
)
def test_what_cannot_be_made_is_named(kept, tmp_path, capsys, arguments, message):
    (tmp_path / "there.pt").write_bytes(b"1")
    words = arguments.format(tmp=tmp_path, kept=kept.root).split()
    assert main(["ema", "--checkpoint", str(kept.root), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "a.pt").exists()


def test_mindspeed_mm_which_would_not_keep_them_is_not_begun(tiny, tmp_path):
    words = ["--mm-model", str(tiny.folder / "model.json"), "--mm-data", str(tiny.folder / "data.json"), "--lr", "1",
             "--train-iters", "1", "--micro-batch-size", "4", "--power-ema-stds", "0.05", "0.1"]  # fmt: skip
    tools = tmp_path / "tools.json"
    tools.write_text("{}")
    refused = "--power-ema-stds = 0.05 0.1: is not acted on in this host"
    with pytest.raises(ConfigError, match=refused):
        yaml_for(parse(words, 1), 1)
    with pytest.raises(ConfigError, match=refused):
        check_before_import([*words, "--mm-tool", str(tools)])


def test_memory_is_planned_for_each_of_them(tiny, capsys):
    words = ["plan", "--model", str(tiny.folder / "model.json"), "--world-size", "2", "--device-memory-gib", "1"]
    model = load_model_config(tiny.folder / "model.json")
    weights = 4 * parameters_of(model.predictor).num_elements(trained_only=True)
    one, three = (memory(model, Placement(averages=count)) for count in (1, 3))
    assert one.ema == weights and three.ema == 3 * weights and three.fixed - one.fixed == 2 * weights
    printed = []
    for flags in ([], ["--power-ema-stds", "0.05", "0.1"]):
        assert main([*words, *flags]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]
