"""Runs that keep power-function averages, and mm-dit ema, against sums over the weights of every step."""

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_trees
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning import Placement, memory

pytestmark = pytest.mark.ranks
STEPS = "--global-batch-size 16 --lr 1e-2 --num-workers 0 --lr-decay-iters 6 --save-interval 1 --keep-last 9 "
STDS = "--power-ema-stds 0.05 0.1 "


@pytest.fixture(scope="module")
def kept(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    tiny.done(STEPS + STDS + f"--train-iters 6 --save {folder}")
    return CheckpointStore(folder)


def read_tree(path, tree):
    return read_trees(path, [tree])[tree]


def direct(store, last, std):
    """The average in float64, from the weights after every step."""
    counted = np.diff((np.arange(last + 1) / last) ** (power_ema.gamma_of_std(std) + 1))
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
@pytest.mark.parametrize("std", [0.03, 0.25])
def test_any_other_width_is_made_of_them(kept, tmp_path, std):
    output = tmp_path / "ema.safetensors"
    assert main(["ema", "--checkpoint", str(kept.root), "--std", str(std), "--output", str(output)]) == 0
    assert_close(read_safetensors_file(output)[0], direct(kept, 6, std))


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
    tiny.done(STEPS + STDS + f"--save {tmp_path} --train-iters 6 {sharding}", ranks=2)
    shards = CheckpointStore(tmp_path)
    for tree, std in (("power_ema_1", 0.05), ("power_ema_2", 0.1)):
        assert_close(read_tree(shards.path(6), tree), direct(shards, 6, std))


def test_averages_begin_and_end_with_their_flag_and_keep_their_widths(tiny, tmp_path, capsys):
    flags = STEPS + f"--save {tmp_path} --load {tmp_path} --train-iters "
    assert tiny.run(flags + "2").code == 0
    assert main(["ema", "--checkpoint", str(tmp_path), "--std", "0.1", "--output", str(tmp_path / "a.pt")]) == 2
    assert "iter_0000002 holds no power-function averages" in capsys.readouterr().err
    assert tiny.run(flags + "3 " + STDS).code == 0
    store = CheckpointStore(tmp_path)
    before, after = (read_tree(store.path(step), "model") for step in (2, 3))
    share = power_ema.decay_weight(3, power_ema.gamma_of_std(0.05))
    wanted = {name: before[name] + share * (after[name] - before[name].astype(float)) for name in after}
    assert_close(read_tree(store.path(3), "power_ema_1"), wanted)
    other = tiny.run(flags + "4 --power-ema-stds 0.05 0.2")
    assert other.code == 2 and "--power-ema-stds = 0.05 0.2" in other.output
    assert tiny.run(flags + "4").code == 0
    assert not read_tree(store.path(4), "power_ema_1") and "power_ema_stds" not in read_facts(store.path(4))


def test_what_cannot_be_made_is_named(kept, tmp_path, capsys):
    (tmp_path / "there.pt").write_bytes(b"1")
    for arguments, named in (
        (f"--std 0.5 --output {tmp_path}/a.pt", "--std = 0.5"),
        (f"--std 0.1 --output {tmp_path}/a", f"--output = {tmp_path}/a "),
        (f"--std 0.1 --output {tmp_path}/there.pt", "exists"),
        (f"--std 0.1 --output {tmp_path}/a.pt --checkpoint {tmp_path}/none", "none"),
    ):
        assert main(["ema", "--checkpoint", str(kept.root), *arguments.split()]) == 2
        assert named in capsys.readouterr().err and not (tmp_path / "a.pt").exists()


def test_memory_is_planned_for_each_of_them(tiny):
    model = load_model_config(tiny.folder / "model.json")
    weights = 4 * parameters_of(model.predictor).num_elements(trained_only=True)
    one, three = (memory(model, Placement(averages=count)) for count in (1, 3))
    assert one.ema == weights and three.ema == 3 * weights and three.fixed - one.fixed == 2 * weights
