"""Published faults in a third-party loop are found between two step traces and named; right ways are not."""

import contextlib
import json
import math
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.files import read_safetensors_header
from mindspeed_mm_dit.errors import DataError, UserError
from mindspeed_mm_dit.tools.verify.compare_traces import compare_traces
from mindspeed_mm_dit.tools.verify.module_recorder import functions_for
from mindspeed_mm_dit.tools.verify.step_trace import write
from tests.conftest import FRAMEWORK
from tests.tools.verify.foreign import EITHER, FAULTS, PLAIN, PYTORCH, Loop, Wrapped, network, odd, rows, train

TWO = (1e-2, 1e-2)
"""Rates of two steps."""
LOOPS = {
    "loss weighted twice": (Loop(weight=lambda t: (1 + t) ** 2), "backward: behind module the network"),
    "times of the wrong end": (Loop(time=lambda t, step: 1 - t), "forward: the data: input 1 of the network"),
    "micro-batches averaged as equals": (Loop(share=lambda counted, total: 0.5), "backward: behind module the network"),
    "times of the wrong end, later": (
        Loop(time=lambda t, step: 1 - t if step else t, rates=TWO), "step 2, forward: the data: input 1 of the network",
    ),
    "another rate": (Loop(rates=(2e-2,)), "step 1, the optimizer: gradients are right"),
    "a rate of later": (Loop(rates=(1e-2, 2e-2)), "step 2, the optimizer: gradients are right"),
}  # fmt: skip
FEW = ("loss weighted twice", *(() if FRAMEWORK == "mindspore" else ("another rate", "causal joint attention")))


@pytest.fixture(scope="module")
def right(framework, tmp_path_factory):
    """The trace of a right step."""
    average = network(framework, depth=1) if FRAMEWORK == "pytorch" else None
    return recorded(framework, tmp_path_factory.mktemp("trace") / "w", average=average)


@pytest.fixture(scope="module")
def two_right(framework, tmp_path_factory):
    """The same of two steps."""
    return recorded(framework, tmp_path_factory.mktemp("trace") / "w", loop=Loop(rates=TWO))


def recorded(framework, place, parts=PLAIN, loop=Loop(), prepare=lambda model: model, average=None, seed=0):  # noqa: B008
    def record_trace(model, optimizer, average):
        return dit.record_trace(model, optimizer, place, average=average)

    train(framework, network(framework, parts, depth=1, seed=seed), loop, record_trace, average, prepare)
    return place


@pytest.mark.parametrize("name", rows([*LOOPS, *(FAULTS if FRAMEWORK == "pytorch" else ())], FEW))
def test_first_difference_of_two_traces_is_named(framework, request, tmp_path, name):
    other = {"parts": FAULTS[name][0]} if name in FAULTS else {"loop": LOOPS[name][0]}
    where = (FAULTS | LOOPS)[name][1]
    right = request.getfixturevalue("two_right" if "step 2" in where else "right")
    found = compare_traces(right, recorded(framework, tmp_path / "w", **other))
    assert not found.good and where in found.where, (found.where, str(found))


@pytest.mark.extended
@pytest.mark.pytorch
def test_average_that_misses_a_compiled_module_is_named(framework, right, tmp_path):
    import torch

    def compiled(model):
        return torch.compile(model, backend="eager")

    average = network(framework, depth=1)
    found = compare_traces(right, recorded(framework, tmp_path / "w", prepare=compiled, average=average))
    assert found.where == "step 1, the average: weights are right, their average is not" and "average/" in found.named


WAYS = ("attention by hand", "keys in another order", "halves of the sums", "recomputed blocks")
STEPS = {
    "the same again": {},
    **{name: {"parts": replace(PLAIN, **parts)} for name, parts in {**EITHER, **PYTORCH}.items() if name in WAYS},
    "weights of the loss in another order": {"loop": Loop(weight=lambda t: t + 1.0)},
    "a share in another order": {"loop": Loop(share=lambda counted, total: 1 / (total / counted))},
}


@pytest.mark.parametrize("name", rows(STEPS, ["keys in another order"]))
def test_step_computed_another_right_way_is_right(framework, right, tmp_path, name):
    found = compare_traces(right, recorded(framework, tmp_path / "w", **STEPS[name]))
    assert found.good, str(found)
    assert {each.kind for each in found.findings} >= {"output", "loss", "gradient norm", "gradient", "step"}


@pytest.mark.extended
@pytest.mark.pytorch
def test_bounds_of_clipped_gradients_are_as_sharp(framework, right, tmp_path):
    places = [recorded(framework, tmp_path / name, loop=Loop(clipped=0.01)) for name in "ab"]
    found = [compare_traces(right, right), compare_traces(*places)]
    whole, clipped = ({f.name: f.tolerance for f in each.findings if f.kind != "loss"} for each in found)
    assert found[1].good and all(clipped[name] < 2 * bound for name, bound in whole.items() if name in clipped)
    assert {name.partition("/")[0] for name in clipped} >= {"output", "gradient norm", "gradient", "step"}


def test_trace_changes_no_number_of_the_run(framework, tmp_path):
    after, unwatched = [], contextlib.nullcontext(SimpleNamespace(step=lambda loss: None))
    for record_trace in (lambda *given: unwatched, lambda *given: dit.record_trace(*given[:2], tmp_path / "w")):
        made = network(framework, depth=1)
        train(framework, made, Loop(), record_trace)
        room = functions_for(made)
        after.append({name: room.to_numpy(p) for name, p in room.parameters(made).items() if "to_k.bias" not in name})
    rounding = 0.0 if FRAMEWORK == "pytorch" else 1e-4  # (with hooks, MindSpore rounds in another way)
    for name, values in after[0].items():
        np.testing.assert_allclose(after[1][name], values, rtol=0, atol=rounding, err_msg=name)
    assert sum(file.stat().st_size for file in (tmp_path / "w").iterdir()) < 2**21


@pytest.mark.pytorch
def test_traces_that_cannot_be_compared_are_refused(framework, right, tmp_path):
    for words, other in (("no input in common", {"loop": Loop(seed=40)}), ("different weights, such as", {"seed": 1})):
        with pytest.raises(UserError, match=words):
            compare_traces(right, recorded(framework, tmp_path / words, **other))
    damaged = shutil.copytree(right, tmp_path / "w")
    file = next(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="damaged"):
        compare_traces(right, damaged)
    (damaged / "step1-rank0.json").unlink()
    assert main(["compare", str(right), str(damaged)]) == 2
    other = network(framework)
    with pytest.raises(UserError, match="the model was not called"):
        train(framework, other, Loop(), lambda model, *more: dit.record_trace(network(framework), more[0], "e"))


def of_mean(each):
    return each.mean()


def recorded_odd(place, told=of_mean, factor=1.0, closure=False):
    import torch

    made, asked = odd()
    made.b.register_forward_hook(lambda module, given, output: output * factor)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)

    def losses():
        optimizer.zero_grad()
        each = made(*asked).square().mean((1, 2))
        each.mean().backward()
        return each

    with dit.record_trace(made, optimizer, place) as w:
        for _ in range(2):
            w.step(told(optimizer.step(losses) if closure else (losses(), optimizer.step())[0]))
    return place


@pytest.mark.pytorch
def test_traces_are_compared_by_what_both_have(tmp_path):
    right, nan = recorded_odd(tmp_path / "right"), "step 1, forward: module b"
    for told, factor, where in ((lambda each: each, 1.0, ""), (lambda each: None, 1.0, ""), (of_mean, math.nan, nan)):
        found = compare_traces(right, recorded_odd(tmp_path / f"{factor}{told}", told, factor))
        assert (found.good, found.where) == (not where, where), str(found)
        found.save(tmp_path / "r.html")
    with pytest.raises(UserError, match="closure"):
        recorded_odd(tmp_path / "closure", closure=True)


RETURNS = {
    "logs first": (lambda x, loss: {"logs": loss.detach(), "x": x, "loss": loss}, lambda it: it["x"].square().mean()),
    "two that are used": (lambda x, loss: (x, x.exp()), lambda it: it[0].square().mean() + it[1].mean()),
    "its own loss": (lambda x, loss: (loss, x.detach()), lambda it: it[0]),
}  # fmt: skip


@pytest.mark.pytorch
@pytest.mark.parametrize("name", RETURNS)
def test_bounds_are_measured_whatever_the_model_returns(tmp_path, name):
    import torch

    gives, used = RETURNS[name]

    def recorded_of(place, factor=1.0):
        made, (x, y) = odd()
        made.register_forward_hook(lambda module, given, output: gives(output * factor, output.square().mean()))
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        with dit.record_trace(made, optimizer, place, steps=1) as w:
            loss = used(made(x, y))
            loss.backward()
            optimizer.step()
            w.step(loss)
        return place

    noise = json.loads((recorded_of(tmp_path / "a") / "step1-rank0.json").read_text())["noise"]
    assert {each for each in noise if each.startswith("gradient/")} >= {"gradient/a.weight", "gradient/table.weight"}
    assert all(1e-9 < noise[each] < 1e-4 for each in ("gradient/a.weight", "gradient norm/1", "loss/1"))
    assert compare_traces(tmp_path / "a", recorded_of(tmp_path / "b", 1 + 1e-7)).good


@pytest.mark.pytorch
def test_other_names_are_paired_by_a_mapping(framework, right, tmp_path, capsys):
    names = tmp_path / "names.json"
    recorded(framework, tmp_path / "w", prepare=Wrapped)
    recorded(framework, tmp_path / "causal", FAULTS["causal joint attention"][0], prepare=Wrapped)
    for place, rule, code, said in (
        ("w", {"net": ""}, 0, "verdict: PASS"),
        ("causal", {"net": ""}, 1, "step 1, forward: module net.blocks.0.attn (theirs: blocks.0.attn)"),
        ("w", {"nett": ""}, 2, "'nett'"), ("w", {"net": 5}, 2, "'net' = 5"), ("w", {"net": []}, 2, "'net' = []"),
    ):  # fmt: skip
        names.write_text(json.dumps(rule))
        flags = ["--names", str(names), "--output", str(tmp_path / "r.html")]
        assert main(["compare", str(right), str(tmp_path / place), *flags]) == code
        assert said in "".join(capsys.readouterr())


@pytest.mark.pytorch
def test_output_of_another_shape_is_wrong(framework, right, tmp_path):
    def cut(model):
        model.register_forward_hook(lambda module, given, output: output[:, :1])
        return model

    recorded(framework, tmp_path / "w", prepare=cut)
    for names in (None, {"blocks": "blocks"}):
        found = compare_traces(right, tmp_path / "w", names)
        assert next(f.error for f in found.findings if f.name == "output/") == math.inf


@pytest.mark.extended
@pytest.mark.pytorch
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_ranks_are_compared_one_by_one(framework, tmp_path):
    import torch
    from torch.distributed.fsdp import fully_shard

    from tests.framework.test_sequence import on_two_ranks

    def sharded(model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def late(t, step):
        return 1 - t if torch.distributed.get_rank() else t

    ways = (("replicated", torch.nn.parallel.DistributedDataParallel, Loop.time), ("sharded", sharded, Loop.time))

    def work():
        for name, prepare, time in (*ways, ("wrong", sharded, late)):
            loop = Loop(seed=1 + 10 * torch.distributed.get_rank(), time=time)
            recorded(framework, tmp_path / name, loop=loop, prepare=prepare)

    on_two_ranks(work, tmp_path)
    found = compare_traces(tmp_path / "replicated", tmp_path / "sharded")
    assert found.good and found.about["ranks"] == "2", str(found)
    found = compare_traces(tmp_path / "replicated", tmp_path / "wrong")
    assert found.where == "step 1 of rank 1, forward: the data: input 1 of the network"


def trace(folder, *shapes):
    """Write a trace without a model: a step for each shape of its parameter."""
    for step, shape in enumerate(shapes, 1):
        names = ("gradient/w", "moved/w", "step/w", "start/step/w", "input//0", "output/", f"gradient norm/{step}")
        facts = {"unit": 2**-24, "shapes": {"w": shape}, "settings": {}, "model": "Net", "micro_batches": 1}
        write(folder, step, 0, {name: np.arange(1.0, 5).reshape(shape) for name in names}, {"gradient/w": 1e-6}, facts)
    return folder


def edited(**changes):
    def edit(folder):
        file = folder / "step2-rank0.json"
        content = json.loads(file.read_text())
        for part in (content, content["facts"]):
            part |= {key: value for key, value in changes.items() if key in part}
        file.write_text(json.dumps(content))

    return edit


def with_tensor(name, entries, listed):
    def edit(folder):
        (file,) = folder.glob("step2*.safetensors")
        header = read_safetensors_header(file)
        content, size = file.read_bytes()[header.start :], 8 * entries
        tensor = {"dtype": "F64", "shape": [entries], "data_offsets": [len(content), len(content) + size]}
        head = json.dumps({**header.tensors, name: tensor}).encode()
        file.write_bytes(len(head).to_bytes(8, "little") + head + content)
        os.truncate(file, file.stat().st_size + size)  # (takes no disk)
        names = json.loads((folder / "step2-rank0.json").read_text())["names"]
        edited(files={file.name: file.stat().st_size}, names=[*names, *([name] if listed else [])])(folder)

    return edit


DAMAGE = {
    **{f"{key} = {value}"[:40]: edited(**{key: value})
       for key, values in {
           "form": ["mm-dit witness 2"], "files": [{}, [], {"../right.safetensors": 1}, {"/dev/zero": 0}],
           "names": [[], ["gradient/b"], [["gradient/w"]], None], "facts": [None, {}, []],
           "noise": [{"a": -1e-9}, {"a": math.nan}, {"a": None}, {"a": 10**400}, []],
           "unit": [-1e-9, math.nan, 1.0, "", True], "shapes": [{"w": [-1]}, {"w": 4}, []], "settings": [{"a": 1}, 1],
           "model": [5], "micro_batches": [1.5],
       }.items() for value in values},
    "no JSON": lambda folder: (folder / "step2-rank0.json").write_text("{"),
    "deep JSON": lambda folder: (folder / "step2-rank0.json").write_text("[" * 100_000),
    "step 2 has no JSON": lambda folder: (folder / "step2-rank0.json").unlink(),
    "step 10**9": lambda folder: (folder / "step1000000000-rank0.json").touch(),
    "rank 10**99": lambda folder: (folder / f"step1-rank1{99 * '0'}.json").touch(),
    "large tensor": with_tensor("large", 2**30, True),
    "other shape in step 2": lambda folder: trace(folder, (4,), (2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_traces_are_refused_by_name(tmp_path, damage):
    DAMAGE[damage](trace(tmp_path / "bad", (4,), (4,)))
    with pytest.raises(DataError, match=str(tmp_path / "bad")):
        compare_traces(trace(tmp_path / "right", (4,)), tmp_path / "bad")


def test_traces_of_other_lengths_show_which_steps_are_compared(tmp_path, capsys):
    """One of them has a tensor of 8 GiB that no name lists."""
    with_tensor("large", 2**30, False)(trace(tmp_path / "two", (4,), (4,)))
    trace(tmp_path / "one", (4,))
    assert main(["compare", str(tmp_path / "two"), str(tmp_path / "one"), "--output", str(tmp_path / "r.html")]) == 0
    assert "1 of 2" in capsys.readouterr().out
    assert compare_traces(tmp_path / "two", tmp_path / "two").about["steps"] == "2"
