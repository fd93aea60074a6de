"""Runs by Muon, and by an optimizer of another package: resumed on other ranks, planned, converted."""

import json

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import PYTORCH
from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.optimizers import registry
from mindspeed_mm_dit.optimizers.registry import optimizer_from_facts, register_optimizer
from mindspeed_mm_dit.training.flags import parse
from tests.external import plugin
from tests.external.optimizer import LION
from tests.training.launch import Configs, plugged

FLAGS = "--lr 1e-3 --lr-decay-style constant --global-batch-size 8 --log-interval 1 --weight-decay 0.02"


@pytest.fixture
def configs(tmp_path, few_digits):
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
    return Configs.create(tmp_path / "configs", few_digits, **small)


@pytest.fixture
def path(tmp_path):
    return plugin.install(tmp_path / "site")


@pytest.mark.extended
@pytest.mark.ranks
def test_outside_optimizer_is_sharded_resumed_and_converted(configs, path, tmp_path):
    """Shards of 2 ranks, their checkpoint resumed on one: the losses are those of one rank."""
    (configs.folder / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap:\n  - predictor.blocks.{*}\n")
    sharded = f"--use-torch-fsdp2 --fsdp2-config-path {configs.folder / 'fsdp2.yaml'}"
    flags, saved = f"{FLAGS} --optimizer lion", tmp_path / "checkpoints"
    whole = configs.run(f"{flags} --train-iters 4", PYTHONPATH=path)
    first = configs.run(f"{flags} {sharded} --train-iters 2 --save {saved}", 2, PYTHONPATH=path)
    last = configs.run(f"{flags} --train-iters 4 --save {saved} --load {saved}", PYTHONPATH=path)
    assert last.code == 0, first.output + last.output
    assert first.losses | last.losses == pytest.approx(whole.losses, rel=2e-6) and len(whole.losses) == 4
    kept = PYTORCH.read(saved / "iter_0000004").trees["optimizer"]
    assert {key.rpartition(".")[2] for key in kept} == {"exp_avg", "step"}
    other = configs.run(f"{FLAGS} --train-iters 5 --load {saved}", PYTHONPATH=path)
    assert other.code == 2 and "holds the state of --optimizer lion, and this run steps by adam" in other.output
    plugged(path, "convert", saved, tmp_path / "there", "--to", "mindspore")
    plugged(path, "convert", tmp_path / "there", tmp_path / "back", "--to", "pytorch")
    back = PYTORCH.read(next((tmp_path / "back").glob("iter_*"))).trees["optimizer"]
    assert back.keys() == kept.keys() and all(np.array_equal(back[key], kept[key]) for key in kept)
    machine = ("--world-size", "1", "--device-memory-gib", "8", "--optimizer", "lion", "--lion-beta2", "0.9")
    assert "optimizer" in plugged(path, "plan", "--model", configs.folder / "model.json", *machine)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_what_is_loaded_is_what_was_saved_to_the_bit(framework, configs, tmp_path, sharded):
    """One rank loads what two shards, or one, have written; saved again it is the same."""
    (configs.folder / "fsdp2.yaml").write_text("sharding_size: auto\n")
    how = f"--use-torch-fsdp2 --fsdp2-config-path {configs.folder / 'fsdp2.yaml'}" if sharded else ""
    configs.done(f"{FLAGS} {how} --optimizer muon --train-iters 2 --save {tmp_path / 'c'}", 2 if sharded else 1)
    kept = PYTORCH.read(tmp_path / "c" / "iter_0000002").trees
    assert {key.rpartition(".")[2] for key in kept["optimizer"]} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    found = loaded(configs, tmp_path / "c" / "iter_0000002")
    assert found.keys() == kept["optimizer"].keys()
    for name, array in kept["optimizer"].items():
        assert np.array_equal(found[name], array), name
        assert name.endswith(".step") or array.any() or "final_layer" not in name


def loaded(configs, checkpoint):
    """Return what an engine of this process holds of the optimizer after it has loaded ``checkpoint``."""
    from mindspeed_mm_dit.configs.model import load_model_config
    from mindspeed_mm_dit.models.composite import DiTModel
    from mindspeed_mm_dit.training.pytorch.engine import Engine

    words = f"--mm-model m --mm-data d --train-iters 3 {FLAGS} --optimizer muon --ema-decay 0.9"
    args = parse(words.split())
    engine = Engine(DiTModel(load_model_config(configs.folder / "model.json")), args, None)
    engine.load(checkpoint, with_optimizer=True)
    state = engine.state()["optimizer"]["state"]
    return {f"state.{name}.{kind}": x.numpy() for name, kinds in state.items() for kind, x in kinds.items()}


@pytest.fixture
def lion(monkeypatch):
    monkeypatch.setitem(registry.OPTIMIZERS, "lion", LION)


def given(flags):
    words = ["--mm-model", "m", "--mm-data", "d", "--train-iters", "1", *flags.split()]
    return checked(parse(words), 1).chosen_optimizer()


@pytest.mark.parametrize(("flags", "words"), [
    ("--optimizer mun", r"--optimizer = 'mun': unknown optimizer\n.*'muon'"),
    ("--muon-momentum 0.9", "--muon-momentum = 0.9: means nothing to --optimizer adam"),
    ("--optimizer muon --muon-momentum 1", "--muon-momentum = 1.0"),
    ("--optimizer muon --muon-num-ns-steps 0", "--muon-num-ns-steps = 0"),
    ("--optimizer muon --adam-beta2 nan", "--adam-beta2 = nan"),
    ("--optimizer muon --muon-scale-mode spectral", "--muon-scale-mode"),
])  # fmt: skip
def test_impossible_settings_are_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        given(f"--lr 1e-3 --micro-batch-size 1 {flags}")


def test_settings_travel_through_run_json(lion):
    for flags in ("", "--optimizer muon --no-muon-nesterov --adam-beta2 0.95"):
        chosen = given(f"--lr 1e-3 --micro-batch-size 1 {flags}")
        assert optimizer_from_facts(json.loads(json.dumps(registry.optimizer_facts(chosen))), "run.json") == chosen
    assert optimizer_from_facts(None, "run.json") == registry.ADAMW  # (a checkpoint of before, or of another program)


def test_name_is_taken_once(lion):
    with pytest.raises(ConfigError, match="optimizer 'lion': is registered already"):
        register_optimizer("lion", LION._replace(config=int))
