"""Published faults, planted in somebody else's loop, are found between two witnesses and named; right ways are not."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.files import read_safetensors_header
from mindspeed_mm_dit.errors import DataError, UserError
from mindspeed_mm_dit.wings.lab.first_wrong_module import room_of
from mindspeed_mm_dit.wings.lab.witness_file import write
from mindspeed_mm_dit.wings.lab.witnesses import compare_witnesses
from tests.conftest import FRAMEWORK
from tests.wings.lab.foreign import PLAIN, Loop, Wrapped, network, odd, on_pytorch, train
from tests.wings.lab.foreign_ways import EITHER, FAULTS, PYTORCH, by_hand, reordered

TWO = (1e-2, 1e-2)
"""Rates of two steps."""
LOOPS = {
    "loss weighted twice": (Loop(weight=lambda t: (1 + t) ** 2), "backward: behind module the network"),
    "times of the wrong end": (Loop(time=lambda t, step: 1 - t), "forward: the data: input 1 of the network"),
    "micro-batches averaged as equals": (Loop(share=lambda counted, total: 0.5), "backward: behind module the network"),
    "times of the wrong end, later": (
        Loop(time=lambda t, step: 1 - t if step else t, rates=TWO), "step 2, forward: the data: input 1 of the network",
    ),
    "a rate of later": (Loop(rates=(1e-2, 2e-2)), "step 2, the optimizer: gradients are right"),
}  # fmt: skip
TRIED = [*LOOPS, *(FAULTS if FRAMEWORK == "pytorch" else ["causal joint attention"])]
"""On MindSpore, whose operators are slow to call, ``test_foreign.py`` finds the others."""


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return tmp_path_factory.mktemp("witness") / "right.witness"


def recorded(framework, place, parts=PLAIN, loop=Loop(), prepare=lambda model: model, average=None, seed=0):  # noqa: B008
    def witness(model, optimizer, average):
        return dit.witness(model, optimizer, place, average=average)

    train(framework, network(framework, parts, seed=seed), loop, witness, average, prepare)
    return place


def against_right(framework, right, place, **other):
    if not right.exists():
        average = network(framework) if FRAMEWORK == "pytorch" else None
        recorded(framework, right, loop=Loop(rates=TWO), average=average)
    return compare_witnesses(right, recorded(framework, place, **other))


@pytest.mark.parametrize("name", TRIED)
def test_a_fault_of_a_loop_is_found_between_two_machines_and_named(framework, right, tmp_path, name):
    other = {"parts": FAULTS[name][0]} if name in FAULTS else {"loop": LOOPS[name][0]}
    found = against_right(framework, right, tmp_path / "w", **other)
    where = (FAULTS | LOOPS)[name][1]
    assert not found.good and where in found.where, (found.where, str(found))


@on_pytorch
def test_an_ema_that_does_not_see_a_compiled_module_is_found(framework, right, tmp_path):
    import torch

    def compiled(model):
        return torch.compile(model, backend="eager")

    found = against_right(framework, right, tmp_path / "w", prepare=compiled, average=network(framework))
    assert found.where == "step 1, the average: weights are right, their average is not" and "average/" in found.named


STEPS = {
    "the same again": {"loop": Loop(rates=TWO)},
    **({"recomputed blocks": {"parts": replace(PLAIN, **PYTORCH["recomputed blocks"])}} if PYTORCH else {}),
    "attention by hand": {"parts": replace(PLAIN, attention=by_hand), "loop": Loop(rates=TWO)},
    "keys in another order": {"parts": replace(PLAIN, attention=reordered), "loop": Loop(rates=TWO)},
    "halves of the sums": {"parts": replace(PLAIN, **EITHER["halves of the sums"])},
    "weights of the loss in another order": {"loop": Loop(weight=lambda t: t + 1.0, rates=TWO)},
    "a share in another order": {"loop": Loop(share=lambda counted, total: 1 / (total / counted))},
}
if FRAMEWORK == "mindspore":
    STEPS = {name: STEPS[name] for name in ("the same again", "attention by hand", "a share in another order")}


@pytest.mark.parametrize("name", STEPS)
def test_another_right_step_is_not_called_wrong(framework, right, tmp_path, name):
    found = against_right(framework, right, tmp_path / "w", **STEPS[name])
    assert found.good, str(found)


def test_bounds_of_gradients_that_are_clipped_are_as_sharp(framework, right, tmp_path):
    found = [against_right(framework, right, tmp_path / "w"), compare_witnesses(
        *(recorded(framework, tmp_path / name, loop=Loop(clipped=0.01)) for name in "ab")
    )]  # fmt: skip
    whole, clipped = ({f.name: f.tolerance for f in each.findings if f.kind != "loss"} for each in found)
    assert found[1].good and all(clipped[name] < 2 * bound for name, bound in whole.items() if name in clipped)
    assert {name.partition("/")[0] for name in clipped} >= {"output", "gradient norm", "gradient", "step"}


@contextlib.contextmanager
def unwatched(*given):
    yield SimpleNamespace(step=lambda loss: None)


def test_a_witness_changes_no_number_of_the_run_it_watches(framework, tmp_path):
    after = []
    for witness in (unwatched, lambda *given: dit.witness(*given[:2], tmp_path / "w")):
        made = network(framework)
        train(framework, made, Loop(rates=(*TWO, 1e-2)), witness)
        room = room_of(made)
        after.append(
            {name: room.host(p) for name, p in room.parameters(made).items() if not name.endswith("to_k.bias")}
        )
    rounding = 0.0 if FRAMEWORK == "pytorch" else 1e-4  # (with hooks, MindSpore rounds in another way)
    for name, values in after[0].items():
        np.testing.assert_allclose(after[1][name], values, rtol=0, atol=rounding, err_msg=name)
    assert sum(file.stat().st_size for file in (tmp_path / "w").iterdir()) < 2**21


def test_mistakes_of_recording_are_named_with_what_to_record_again(framework, right, tmp_path):
    against_right(framework, right, tmp_path / "w")
    for words, other in {
        "are steps of other inputs, not one is the same": {"loop": Loop(seed=40)},
        "are steps of other weights: x_embedder.weight": {"seed": 1},
    }.items():
        with pytest.raises(UserError, match=words):
            compare_witnesses(right, recorded(framework, tmp_path / f"{other}"[:20], **other))
    file = next((tmp_path / "w").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="is cut short or damaged"):
        compare_witnesses(right, tmp_path / "w")
    (tmp_path / "w/step1-rank0.json").unlink()
    assert main(["compare", str(right), str(tmp_path / "w")]) == 2
    with pytest.raises(UserError, match="the model was not called"):
        train(
            framework, network(framework), Loop(), lambda model, *rest: dit.witness(network(framework), *rest[:1], "e")
        )


def recorded_odd(place, told=lambda each: each.mean(), factor=1.0, closure=False):
    import torch

    made, asked = odd()
    made.b.register_forward_hook(lambda module, given, output: output * factor)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    with dit.witness(made, optimizer, place) as w:
        for _ in range(2):

            def losses():
                optimizer.zero_grad()
                each = made(*asked).square().mean((1, 2))
                each.mean().backward()
                return each

            w.step(told(optimizer.step(losses) if closure else (losses(), optimizer.step())[0]))
    return place


@on_pytorch
@pytest.mark.parametrize(("told", "factor", "where"), [
    (lambda each: each, 1.0, ""), (lambda each: None, 1.0, ""),
    (lambda each: each.mean(), math.nan, "step 1, forward: module b"),
])  # fmt: skip
def test_two_machines_are_compared_by_what_both_told_and_a_nan_of_one_is_named(tmp_path, told, factor, where):
    found = compare_witnesses(recorded_odd(tmp_path / "a"), recorded_odd(tmp_path / "b", told, factor))
    assert (found.good, found.where) == (not where, where), str(found)
    found.save(tmp_path / "r.html")


GIVES = {
    "logs first": (lambda x, loss: {"logs": loss.detach(), "x": x, "loss": loss}, lambda it: it["x"].square().mean()),
    "two that are used": (lambda x, loss: (x, x.exp()), lambda it: it[0].square().mean() + it[1].mean()),
    "its own loss": (lambda x, loss: (loss, x.detach()), lambda it: it[0]),
}  # fmt: skip


@on_pytorch
@pytest.mark.parametrize("name", GIVES)
def test_bounds_of_a_witness_are_measured_whatever_a_model_returns(tmp_path, name):
    import torch

    gives, used = GIVES[name]

    def recorded_of(place, factor=1.0):
        made, (x, y) = odd()
        made.register_forward_hook(lambda module, given, output: gives(output * factor, output.square().mean()))
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        with dit.witness(made, optimizer, place, steps=1) as w:
            loss = used(made(x, y))
            loss.backward()
            optimizer.step()
            w.step(loss)
        return place

    noise = json.loads((Path(recorded_of(tmp_path / "a")) / "step1-rank0.json").read_text())["noise"]
    assert {each for each in noise if each.startswith("gradient/")} >= {"gradient/a.weight", "gradient/table.weight"}
    assert all(1e-9 < noise[each] < 1e-4 for each in ("gradient/a.weight", "gradient norm/1", "loss/1"))
    assert compare_witnesses(tmp_path / "a", recorded_of(tmp_path / "b", 1 + 1e-7)).good


@on_pytorch
def test_a_closure_is_refused_as_one(tmp_path):
    with pytest.raises(UserError, match=r"(?s)took no step after backward\(\).*without a closure"):
        recorded_odd(tmp_path, closure=True)


def test_other_names_are_paired_by_a_mapping_and_one_that_names_nothing_is_refused(framework, right, tmp_path, capsys):
    names = tmp_path / "names.json"
    recorded(framework, tmp_path / "w", PLAIN, Loop(rates=TWO), Wrapped)
    recorded(framework, tmp_path / "causal", FAULTS["causal joint attention"][0], prepare=Wrapped)
    against_right(framework, right, tmp_path / "same")
    for place, rule, code, said in (
        ("w", {"net": ""}, 0, "verdict: PASS"),
        ("causal", {"net": ""}, 1, "step 1, forward: module net.blocks.0.attn (theirs: blocks.0.attn)"),
        ("w", {"nett": ""}, 2, "'nett': names no parameter of mine"),
        ("w", {"net": 5}, 2, "names: 'net' = 5"),
        ("w", {"net": []}, 2, "names: 'net' = []"),
    ):
        names.write_text(json.dumps(rule))
        flags = ["--names", str(names), "--output", str(tmp_path / "r.html")]
        assert main(["compare", str(right), str(tmp_path / place), *flags]) == code
        assert said in "".join(capsys.readouterr())


@on_pytorch
@pytest.mark.parametrize("names", [None, {"blocks": "blocks"}])
def test_an_output_of_another_shape_is_wrong_with_names_as_well(framework, right, tmp_path, names):
    def cut(model):
        model.register_forward_hook(lambda module, given, output: output[:, :1])
        return model

    against_right(framework, right, tmp_path / "same")
    found = compare_witnesses(right, recorded(framework, tmp_path / "w", loop=Loop(rates=TWO), prepare=cut), names)
    assert next(f.error for f in found.findings if f.name == "output/") == math.inf


@on_pytorch
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_ranks_are_compared_one_by_one_with_replicated_and_with_sharded_weights(framework, tmp_path):
    import torch
    from torch.distributed.fsdp import fully_shard

    from tests.framework.test_sequence import on_two_ranks

    def sharded(model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def late(t, step):
        return 1 - t if torch.distributed.get_rank() and step else t

    def work():
        for name, prepare, time in (
            ("replicated", torch.nn.parallel.DistributedDataParallel, Loop.time), ("sharded", sharded, Loop.time),
            ("wrong", sharded, late),
        ):  # fmt: skip
            loop = Loop(seed=1 + 10 * torch.distributed.get_rank(), time=time, rates=TWO)
            recorded(framework, tmp_path / name, loop=loop, prepare=prepare)

    on_two_ranks(work, tmp_path)
    found = compare_witnesses(tmp_path / "replicated", tmp_path / "sharded")
    assert found.good and found.about["ranks"] == found.about["steps"] == "2", str(found)
    found = compare_witnesses(tmp_path / "replicated", tmp_path / "wrong")
    assert found.where == "step 2 of rank 1, forward: the data: input 1 of the network"


@on_pytorch
def test_the_page_of_two_witnesses_has_one_picture_of_all_errors(framework, right, tmp_path):
    against_right(framework, right, tmp_path / "w")
    assert main(["compare", str(right), str(tmp_path / "w"), "--output", str(tmp_path / "r.html")]) == 0
    page, found = (tmp_path / "r.html").read_text(), json.loads((tmp_path / "r.json").read_text())
    assert page.count("data:image/png;base64,") == 1 and "float32 products" in page
    kinds = {each["name"].partition("/")[0] for each in found["quantities"]}
    assert kinds == {"output", "loss", "gradient norm", "gradient", "step"}


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
        compare_witnesses(trace(tmp_path / "right", (4,)), tmp_path / "bad")


def test_traces_of_other_lengths_show_which_steps_are_compared(tmp_path, capsys):
    """One of them has a tensor of 8 GiB that no name lists."""
    with_tensor("large", 2**30, False)(trace(tmp_path / "two", (4,), (4,)))
    trace(tmp_path / "one", (4,))
    assert main(["compare", str(tmp_path / "two"), str(tmp_path / "one"), "--output", str(tmp_path / "r.html")]) == 0
    assert "1 of 2" in capsys.readouterr().out
    assert compare_witnesses(tmp_path / "two", tmp_path / "two").about["steps"] == "2"
