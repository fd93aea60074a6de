"""Runs by optimizer classes of PyTorch: resumed, on other ranks, planned, converted; and classes that are refused."""

import json

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import PYTORCH
from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import check_supported
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers.registry import optimizer_facts, optimizer_from_facts
from mindspeed_mm_dit.planning import optimizer_bytes, optimizer_note
from mindspeed_mm_dit.training.flags import parse
from tests.conftest import ROOT
from tests.training.launch import Configs, mm_dit

OURS = "tests.external.torch_optimizers"
KEPT = {
    f"{OURS}:Odd": {"step", "size", "is_new", "pair", "list.0", "list.1", "group.seen", "group.grown"},
    f"{OURS}:Switched": {"z", "group.k", "group.training"},
    "torch.optim:RAdam": {"step", "exp_avg", "exp_avg_sq"},
    "torch.optim:SGD": {"step"},
    "torch.optim:Adafactor": {"step", "row_var", "col_var", "variance"},
}
"""Class -> what it keeps, by the names of a checkpoint. The last one cannot step shards: it steps whole tensors."""
FLAGS = "--lr 1e-3 --lr-decay-style constant --global-batch-size 8 --log-interval 1 --ema-decay 0.5"
RANKS = pytest.mark.ranks
SAME = 2e-6


@pytest.fixture
def configs(tmp_path, few_digits):
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
    return Configs.create(tmp_path / "configs", few_digits, **small)


def chosen(flags):
    words = ["--mm-model", "m", "--mm-data", "d", "--train-iters", "1", "--lr", "1e-3", "--micro-batch-size", "1"]
    return checked(parse([*words, *flags]), 1).chosen_optimizer()


def trees_of(folder, iteration):
    return PYTORCH.read(folder / f"iter_{iteration:07}").trees


@pytest.mark.parametrize("name", KEPT)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(configs, tmp_path, name):
    flags = f"{FLAGS} --optimizer {name}"
    whole = configs.run(f"{flags} --train-iters 4 --save {tmp_path}/whole")
    assert whole.code == 0, whole.output
    configs.run(f"{flags} --train-iters 2 --save {tmp_path}/part")
    last = configs.run(f"{flags} --train-iters 4 --save {tmp_path}/part --load {tmp_path}/part")
    assert last.code == 0 and last.lines == {i: whole.lines[i] for i in (3, 4)}, last.output
    there, here = trees_of(tmp_path / "whole", 4), trees_of(tmp_path / "part", 4)
    assert there.keys() == here.keys() == {"model", "ema", "optimizer"}
    for tree, arrays in there.items():
        assert arrays.keys() == here[tree].keys()
        for key, array in arrays.items():
            assert np.array_equal(array, here[tree][key]), key
    names = {key.partition(".weight.")[2] or key.partition(".bias.")[2] for key in there["optimizer"]}
    assert names - {""} == KEPT[name]


@RANKS
@pytest.mark.parametrize("name", KEPT)
def test_ranks_and_shards_change_no_number(configs, tmp_path, name):
    """Replicated; sharded, and resumed on one rank; and the other way round; each step is validated."""
    (configs.folder / "fsdp2.yaml").write_text(
        "sharding_size: auto\nreshard_after_forward: false\nsub_modules_to_wrap:\n  - predictor.blocks.{*}\n"
    )
    sharded = f"--use-torch-fsdp2 --fsdp2-config-path {configs.folder / 'fsdp2.yaml'}"
    configs.hold_out(0.2)
    flags = f"{FLAGS} --eval-interval 1 --eval-iters 1 --optimizer {name}"
    whole = configs.run(f"{flags} --train-iters 4 --save-interval 2 --keep-last 2 --save {tmp_path}/one")
    assert whole.code == 0, whole.output
    assert configs.run(f"{flags} --train-iters 4", 2).losses == pytest.approx(whole.losses, rel=SAME)
    first = configs.run(f"{flags} {sharded} --train-iters 2 --save {tmp_path}/two", 2)
    assert ("steps whole tensors" in first.output) == (name == "torch.optim:Adafactor"), first.output
    last = configs.run(f"{flags} --train-iters 4 --load {tmp_path}/two")
    assert first.losses | last.losses == pytest.approx(whole.losses, rel=SAME), first.output + last.output
    (tmp_path / "one" / "iter_0000004").rename(tmp_path / "later")
    there = configs.run(f"{flags} {sharded} --train-iters 4 --load {tmp_path}/one", 2)
    assert there.losses == pytest.approx({i: whole.losses[i] for i in (3, 4)}, rel=SAME), there.output


def test_another_optimizer_of_a_checkpoint_is_refused_and_its_state_is_for_pytorch_alone(configs, tmp_path):
    flags, saved = f"{FLAGS} --train-iters 1 --save {tmp_path}/c", tmp_path / "c"
    assert configs.run(f"{flags} --optimizer {OURS}:Odd").code == 0
    other = configs.run(f"{FLAGS} --train-iters 2 --load {saved} --optimizer torch.optim:RAdam")
    assert other.code == 2 and f"holds the state of --optimizer {OURS}:Odd" in other.output
    assert configs.run(f"{FLAGS} --train-iters 2 --load {saved} --no-load-optim --optimizer torch.optim:SGD").code == 0
    summary = convert(str(saved), str(tmp_path / "there"), "mindspore")
    assert "optimizer" not in summary.trees and any("class of PyTorch" in note for note in summary.notes)
    convert(str(saved), str(tmp_path / "again"), "pytorch")
    there, again = trees_of(saved, 1)["optimizer"], trees_of(tmp_path / "again", 1)["optimizer"]
    assert there.keys() == again.keys() and all(np.array_equal(there[key], again[key]) for key in there)


def test_state_that_no_checkpoint_can_hold_is_refused_in_the_first_step(configs):
    run = configs.run(f"{FLAGS} --train-iters 1 --optimizer {OURS}:Generator")
    assert run.code == 2 and "keeps a Generator, which a checkpoint cannot hold" in run.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("nowhere:Adam", "needs the package nowhere, which is not installed. Install it with pip install nowhere"),
        ("torch.optimm:Adam", "names the module torch.optimm, which torch does not have"),
        ("torch.optim:Addam", "a class that torch.optim does not have. Did you mean 'Adam'"),
        ("torch.optim:", "does not name a class. Write module:Class"),
        (f"{OURS}:Plain", "is not a class of optimizers"),
        (f"{OURS}:Stateless", "has no state_dict"),
        (f"{OURS}:NoRate", "takes no lr"),
        ("torch.optim:Rprop", "takes no weight_decay, but --weight-decay is 0.01"),
        ("torch.optim:LBFGS --weight-decay 0", "computes the loss several times in a step"),
        ("torch.optim:RAdam --adam-beta1 0.8", "--adam-beta1 = 0.8 has no effect"),
        ('torch.optim:RAdam --optimizer-args {"beta":[0.8,0.9]}', "names beta, which .* Did you mean 'betas'"),
        ('torch.optim:RAdam --optimizer-args {"betas":[8,0.9]}', "cannot be made: ValueError"),
        ('torch.optim:RAdam --optimizer-args {"lr":1}', "names lr, which is not set there. Write --lr"),
        ("torch.optim:RAdam --optimizer-args eps=1", "is not a JSON object"),
        ('adam --optimizer-args {"eps":1}', "has no effect with --optimizer adam"),
        ("torch.optim:RAdam --ai-framework mindspore", "is a class of PyTorch, and MindSpore"),
    ],
)
def test_what_no_run_can_use_is_refused_by_name(flags, words):
    with pytest.raises((ConfigError, PlatformError), match=words):
        chosen(["--optimizer", *flags.split()])


@pytest.mark.parametrize("route", ["megatron", "native"])
def test_mindspeed_mm_refuses_it_by_name(route):
    flags = "--mm-model m --mm-data d --train-iters 1 --lr 1e-3 --micro-batch-size 1 --optimizer torch.optim:RAdam"
    with pytest.raises(ConfigError, match=r"--optimizer = torch\.optim:RAdam is not supported: MindSpeed-MM"):
        check_supported(parse(flags.split()), route, resumes=False)


def test_arguments_travel_through_run_json():
    one = chosen(["--optimizer", "torch.optim:RAdam", "--optimizer-args", '{"betas": [0.8, 0.9]}'])
    assert one.config.arguments() == {"betas": (0.8, 0.9)}
    assert optimizer_from_facts(json.loads(json.dumps(optimizer_facts(one))), "run.json") == one


@pytest.mark.parametrize(
    ("name", "bytes_of"),
    [
        ("torch.optim:RAdam", lambda n, shape: 8 * n),
        ("torch.optim:SGD", lambda n, shape: 0),
        (f"{OURS}:Odd", lambda n, shape: 12 * n),
        ("torch.optim:Adafactor", lambda n, shape: 4 * (n // shape[-1] + n // shape[-2]) if shape[1:] else 4 * n),
    ],
)
def test_a_plan_counts_the_state_that_a_step_leaves(name, bytes_of):
    """Also of classes that cannot step meta tensors, as Adafactor, which reads a number of them."""
    parameters = parameters_of(load_model_config(ROOT / "examples/dit/model.json").predictor)
    one = chosen(["--optimizer", name])
    counted = sum(bytes_of(int(np.prod(p.shape)), p.shape) for p in parameters.values() if p.trained)
    assert optimizer_bytes(parameters, one) == counted and optimizer_note(parameters, one) == ""


def test_a_class_that_steps_large_tensors_of_a_cpu_alone_is_scaled_up(monkeypatch):
    monkeypatch.setattr("mindspeed_mm_dit.optimizers.registry.EXACT_ELEMENTS", 2000)
    config = chosen(["--optimizer", f"{OURS}:Reading"])
    size = config.optimizer.state_size(config.config, (300, 20))
    assert size.num_bytes == 4 * 6000 and "scaled up from smaller tensors" in size.note


def test_plan_prints_it():
    model = ROOT / "examples/dit/imagenet256/model.json"
    said = mm_dit("plan", "--model", model, "--world-size", 1, "--optimizer", "torch.optim:RAdam").output
    assert said == mm_dit("plan", "--model", model, "--world-size", 1).output
