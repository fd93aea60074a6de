"""Muon: its matrices, steps held to PyTorch's own (tests/golden/data/README.md), runs; an optimizer from outside."""

import json

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import PYTORCH
from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers import adam, muon, registry
from mindspeed_mm_dit.optimizers.muon import MuonConfig, orthogonalize
from mindspeed_mm_dit.optimizers.registry import optimizer_from_facts, register_optimizer
from mindspeed_mm_dit.training.flags import parse
from tests.conftest import GOLDEN
from tests.external import plugin
from tests.external.optimizer import LION
from tests.training.launch import Configs, plugged


@pytest.fixture
def room(framework):
    """The module that recomputes such a file; it is imported once a framework is active."""
    from mindspeed_mm_dit.tools.verify.reference import file as module

    return module


def compare(*given):
    from mindspeed_mm_dit.tools.verify import parity

    return parity.compare(*given)


def test_the_dit_says_which_of_its_weights_are_how_many_matrices():
    config = DiTConfig(input_size=8, num_classes=10, hidden_size=32, num_layers=1, num_heads=2)
    matrices = {name: p.matrices for name, p in parameters_of(config).items() if p.matrices}
    block = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1, "adaLN_modulation.1": 6}
    ends = {"t_embedder.mlp.0": 1, "t_embedder.mlp.2": 1, "final_layer.adaLN_modulation.1": 2}
    wanted = {**ends, **{f"blocks.0.{name}": count for name, count in block.items()}}
    assert matrices == {f"{name}.weight": count for name, count in wanted.items()}
    for name, p in parameters_of(config).items():
        assert muon.rule_of(MuonConfig(), p) is (muon.RULE if name in matrices else adam.RULE), name


@pytest.mark.parametrize("shape", [(3, 12, 8), (2, 8, 12), (1, 16, 16)])
def test_singular_values_come_near_1_in_the_same_directions(framework, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = framework.ops.numpy(orthogonalize(framework.ops.tensor(x), 5))
    assert not framework.ops.numpy(orthogonalize(framework.ops.tensor(0 * x), 5)).any()
    for matrix, made in zip(x, found):
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        of_directions = u.T @ made @ v.T
        np.testing.assert_allclose(of_directions, np.diag(np.diag(of_directions)), atol=2e-4)
        assert np.diag(of_directions)[s > 0.05 * np.linalg.norm(s)].min() > 0.5 and np.diag(of_directions).max() < 1.3


def test_every_value_of_the_golden_file_is_met(framework):
    """An iteration in bfloat16 is no nearer than a tenth of the change to any other."""
    found = {finding.name: finding for finding in compare(GOLDEN / "muon_tiny.npz", None, 1e-5, 1e-12)}
    assert len(found) == 63 and all(finding.good for finding in found.values())
    for name, finding in found.items():
        assert finding.error < (0.1 if name.startswith("bfloat16/") else 1e-5), finding


def test_in_float64_a_step_is_the_same(framework, room, monkeypatch, tmp_path):
    """MindSpore rounds a number that stands beside a tensor to float32."""
    monkeypatch.setattr(room.Muon, "dtype", np.float64)
    bound = 1e-12 if framework.active() == "pytorch" else 5e-6
    for finding in compare(part(tmp_path, "float64/original/tall", "float64/momentum_buffer/tall"), None, 1e-5, 1e-12):
        assert finding.error < bound, finding


def part(folder, *names, **more):
    """Write the golden file with these results alone, and other arrays."""
    with np.load(GOLDEN / "muon_tiny.npz") as file:
        inputs = {name: file[name] for name in file if "/" not in name or name.endswith(("/tall", "/square"))}
        given = {name: array for name, array in inputs.items() if name[:6] in ("param/", "grad/t", "grad/s")}
        settings = {name: array for name, array in inputs.items() if "/" not in name}
        np.savez(folder / "part.npz", **settings, **given, **{name: file[name] for name in names}, **more)
    return folder / "part.npz"


def test_a_planted_fault_is_seen(room, monkeypatch, tmp_path):
    monkeypatch.setattr(room, "scale_of", lambda mode, rows, columns: muon.scale_of(mode, columns, rows))
    names = ("original/tall", "bfloat16/original/tall", "original/square")
    found = compare(part(tmp_path, *names), None, 1e-5, 1e-12)
    assert {finding.name: finding.good for finding in found} == dict(zip(names, (False, False, True)))


@pytest.mark.parametrize(("key", "shape", "words"), [
    ("original/other", (5, 4, 4), "param/other is not in --reference"),
    ("original/square_split3", (5, 16, 16), "16 rows.*split into 3 matrices"),
    ("halved/square", (5, 16, 16), "halved/square in --reference is no quantity"),
    ("bfloat16/original/wide", (5, 16, 15), "param/wide is not in --reference"),
])  # fmt: skip
def test_impossible_file_is_refused(framework, tmp_path, key, shape, words):
    with pytest.raises(CheckpointError, match=words):
        compare(part(tmp_path, **{key: np.zeros(shape, np.float32)}), None, 1e-5, 1e-12)


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
    assert other.code == 2 and "--optimizer lion, but this run has --optimizer adam" in other.output
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
    ("--optimizer mun", r"--optimizer = 'mun'(?s:.*)'muon'"),
    ("--muon-momentum 0.9", "--muon-momentum = 0.9 has no effect with --optimizer adam"),
    ("--optimizer muon --muon-momentum 1", "--muon-momentum = 1.0"),
    ("--optimizer muon --muon-num-ns-steps 0", "--muon-num-ns-steps = 0"),
    ("--optimizer muon --adam-beta2 nan", "--adam-beta2 = nan"),
])  # fmt: skip
def test_impossible_settings_are_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        given(f"--lr 1e-3 --micro-batch-size 1 {flags}")


def test_settings_travel_and_a_name_is_taken_once(lion):
    for flags in ("", "--optimizer muon --no-muon-nesterov --adam-beta2 0.95"):
        chosen = given(f"--lr 1e-3 --micro-batch-size 1 {flags}")
        assert optimizer_from_facts(json.loads(json.dumps(registry.optimizer_facts(chosen))), "run.json") == chosen
    assert optimizer_from_facts(None, "run.json") == registry.ADAMW  # (a checkpoint of before, or of another program)
    with pytest.raises(ConfigError, match="'lion' is registered already"):
        register_optimizer("lion", LION._replace(config=int))
