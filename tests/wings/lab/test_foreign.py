"""Published faults, planted in somebody else's network and loop, are found and named; other right ways are not."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.wings.lab.first_wrong_module import room_of
from mindspeed_mm_dit.wings.lab.witnesses import compare_witnesses
from tests.conftest import FRAMEWORK, ROOT
from tests.mindspore.launch import needs_mindspore, run_script
from tests.wings.lab.foreign import PLAIN, C, Loop, N, Wrapped, attention, inputs, network, nn, ops, places, train

on_pytorch = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="PyTorch's own ways")


# --- ten faults ------------------------------------------------------------------------------------------------------


def causal(q, k, v, mask):
    count = q.shape[2]
    return attention(q, k, v, ops.tensor(np.tri(count, dtype=bool))[None, None] & mask)


def from_the_end_of_the_text(length, count):
    cos, sin = places(0, length + count)
    return np.concatenate([cos[:1].repeat(length, 0), cos[length:]]), np.concatenate([0 * sin[:length], sin[length:]])


NETWORKS = {
    "causal joint attention": (replace(PLAIN, attention=causal), "module blocks.0.attn"),
    "RoPE of image tokens from the text's offset": (replace(PLAIN, places=from_the_end_of_the_text), "module rope"),
    "guidance not times 1000": (replace(PLAIN, guidance=1.0), "module guidance_embedder"),
    "swapped shift and scale of the final norm": (
        replace(PLAIN, final=lambda x, scale, shift: x * (1 + shift) + scale), "module norm_out",
    ),
    "mask ignored with padding": (
        replace(PLAIN, attention=lambda q, k, v, mask: attention(q, k, v, None)), "module blocks.0.attn",
    ),
    "LoRA scale without alpha": (replace(PLAIN, lora=1.0), "module blocks.0.mlp.fc1"),
}  # fmt: skip
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


@pytest.fixture
def given(framework):
    """What both networks are asked."""
    return inputs()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fault_of_a_network_is_found_and_its_module_named(framework, given, name):
    parts, where = NETWORKS[name]
    found = dit.prove(network(framework, parts), network(framework), given)
    assert not found.good and where in found.where, (found.where, str(found))


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


@pytest.mark.parametrize("name", [*LOOPS, *NETWORKS])
def test_a_fault_of_a_loop_is_found_between_two_machines_and_named(framework, right, tmp_path, name):
    other = {"parts": NETWORKS[name][0]} if name in NETWORKS else {"loop": LOOPS[name][0]}
    found = against_right(framework, right, tmp_path / "w", **other)
    where = (NETWORKS | LOOPS)[name][1]
    assert not found.good and where in found.where, (found.where, str(found))


@on_pytorch
def test_an_ema_that_does_not_see_a_compiled_module_is_found(framework, right, tmp_path):
    import torch

    def compiled(model):
        return torch.compile(model, backend="eager")

    found = against_right(framework, right, tmp_path / "w", prepare=compiled, average=network(framework))
    assert found.where == "step 1, the average: weights are right, their average is not" and "average/" in found.named


@on_pytorch
@needs_mindspore
def test_a_module_of_pytorch_and_a_cell_of_mindspore_are_proved_in_one_process(tmp_path):
    import torch

    script, packages = ROOT / "tests/wings/lab/both_frameworks.py", Path(torch.__file__).parents[1]
    outcome = run_script([str(script), str(packages)], tmp_path)
    assert outcome.output.splitlines()[-4:] == ["right", "right", "forward: module 1", "forward: module 1"]


# --- thirty other right ways -----------------------------------------------------------------------------------------


def by_hand(q, k, v, mask):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores = ops.where(mask, scores, ops.cast_like(ops.tensor(np.float32(-1e9)), scores))
    weights = ops.exp(scores)
    return weights @ v / weights.sum(-1)[..., None]


def reordered(q, k, v, mask):
    order = np.random.default_rng(3).permutation(k.shape[2]).tolist()
    return attention(q, k[:, :, order], v[:, :, order], mask[..., order])


def in_chunks(q, k, v, mask):
    return ops.cat([attention(q[:, :, start : start + 4], k, v, mask) for start in range(0, q.shape[2], 4)], 2)


def head_by_head(q, k, v, mask):
    return ops.cat([attention(q[:, n : n + 1], k[:, n : n + 1], v[:, n : n + 1], mask) for n in range(q.shape[1])], 1)


def sample_by_sample(q, k, v, mask):
    return ops.cat([attention(q[n : n + 1], k[n : n + 1], v[n : n + 1], mask[n : n + 1]) for n in range(len(q))], 0)


def turned_in_pairs(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return ops.reshape(ops.cat([(a * cos - b * sin)[..., None], (a * sin + b * cos)[..., None]], -1), x.shape)


def of_squares(x):
    mean = x.mean(-1)[..., None]
    return (x - mean) * ((x * x).mean(-1)[..., None] - mean * mean + 1e-6) ** -0.5


FUSED = {"blocks.*.attn.qkv": tuple(f"blocks.*.attn.to_{name}" for name in "qkv")}
EITHER = {
    "attention by hand": {"attention": by_hand},
    "keys in another order": {"attention": reordered},
    "attention in chunks of queries": {"attention": in_chunks},
    "attention head by head": {"attention": head_by_head},
    "attention sample by sample": {"attention": sample_by_sample},
    "rotations as real numbers": {"rotary": turned_in_pairs},
    "variance from squares": {"norm": of_squares},
    "modulation fused": {"final": lambda x, scale, shift: ops.addcmul(shift, x, 1 + scale)},
    "modulation spelt out": {"final": lambda x, scale, shift: x + x * scale + shift},
    "the MLP's GELU as a sigmoid": {
        "gelu": lambda x: x * ops.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    },
    "linear layers as products": {"linear": lambda layer, x: x @ layer.weight.swapaxes(0, 1) + layer.bias},
    "halves of the sums": {"linear": lambda layer, x: (
        ops.linear(x[..., :9], layer.weight[:, :9]) + ops.linear(x[..., 9:], layer.weight[:, 9:]) + layer.bias
    )},
    "tables of positions in float64": {"places": lambda length, count: tuple(
        table.astype(np.float64).astype(np.float32) for table in places(length, count)
    )},
    "fused queries, keys and values": {"is_fused": True},
}  # fmt: skip


def _torch_parts():
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint

    def of_one_kernel(q, k, v, mask):
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(q, k, v, mask)

    def with_a_bias(q, k, v, mask):
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, bias)

    def by_einsum(q, k, v, mask):
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k).div(q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        return torch.einsum("bhnm,bhmd->bhnd", scores.softmax(-1), v)

    def channels_last(layer, x):
        found = functional.conv2d(
            x.transpose(1, 2)[..., None].contiguous(memory_format=torch.channels_last), layer.weight[..., None, None],
            layer.bias,
        )  # fmt: skip
        return found[..., 0].transpose(1, 2).contiguous()

    return {
        "another kernel of attention": {"attention": of_one_kernel},
        "a mask that is added": {"attention": with_a_bias},
        "attention by einsum": {"attention": by_einsum},
        "PyTorch's layer norm": {"norm": lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-6)},
        "PyTorch's GELU": {"gelu": lambda x: functional.gelu(x, approximate="tanh")},
        "layers as convolutions, channels last": {"linear": channels_last},
        "recomputed blocks": {"called": lambda block, *given: checkpoint(block, *given, use_reentrant=False)},
        "written in place": {"final": lambda x, scale, shift: x.mul(1 + scale).add_(shift)},
    }


PYTORCH = _torch_parts() if FRAMEWORK == "pytorch" else {}


@pytest.mark.parametrize("name", [*EITHER, *PYTORCH])
def test_another_right_way_to_compute_is_not_called_wrong(framework, given, name):
    parts = replace(PLAIN, **(EITHER | PYTORCH)[name])
    found = dit.prove(network(framework, parts), network(framework), given, names=FUSED if parts.is_fused else None)
    assert found.good, str(found)


@on_pytorch
@pytest.mark.parametrize("name", ["compiled", "in float64", "in bfloat16 by autocast", "in bfloat16"])
def test_another_precision_or_a_compiler_is_not_called_wrong(framework, given, name):
    import torch

    class Low(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(framework, replace(PLAIN, rotary=turned_in_pairs))

        def forward(self, **given):
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(**given)

    mine, their_inputs, names, precision = network(framework), None, None, None
    if name == "compiled":
        mine = torch.compile(mine, backend="aot_eager")
    elif name == "in float64":
        mine, their_inputs = mine.double(), given
        given = {key: value.astype(np.float64) for key, value in given.items()}
    elif name == "in bfloat16":
        mine, their_inputs = network(framework, replace(PLAIN, rotary=turned_in_pairs)).bfloat16(), given
        given = {key: torch.from_numpy(value).bfloat16() for key, value in given.items()}
    else:
        mine, names, precision = Low(), {"net": ""}, "bfloat16"
    found = dit.prove(mine, network(framework), given, their_inputs=their_inputs, names=names, precision=precision)
    assert found.good, str(found)


STEPS = {
    "the same again": {"loop": Loop(rates=TWO)},
    **({"recomputed blocks": {"parts": replace(PLAIN, **PYTORCH["recomputed blocks"])}} if PYTORCH else {}),
    "attention by hand": {"parts": replace(PLAIN, attention=by_hand), "loop": Loop(rates=TWO)},
    "keys in another order": {"parts": replace(PLAIN, attention=reordered), "loop": Loop(rates=TWO)},
    "halves of the sums": {"parts": replace(PLAIN, **EITHER["halves of the sums"])},
    "weights of the loss in another order": {"loop": Loop(weight=lambda t: t + 1.0, rates=TWO)},
    "a share in another order": {"loop": Loop(share=lambda counted, total: 1 / (total / counted))},
}


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


# --- witnesses -------------------------------------------------------------------------------------------------------


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


def odd():
    """A network that uses an activation twice, on other shapes, and few rows of a table."""
    import torch
    from torch import nn

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.act, self.a, self.b = nn.Embedding(9, 8), nn.SiLU(), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x, y):
            return self.b(self.act(self.a(x))) + self.act(self.table(y))[:, None]

    torch.manual_seed(0)
    return Odd(), [torch.randn(3, 5, 8), torch.tensor([1, 2, 2])]


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


@on_pytorch
def test_an_activation_that_is_used_twice_is_proved_and_a_closure_is_refused_as_one(tmp_path):
    (mine, given), (theirs, _) = odd(), odd()
    assert dit.prove(mine, theirs, given).good
    with pytest.raises(UserError, match=r"(?s)took no step after backward\(\).*without a closure"):
        recorded_odd(tmp_path, closure=True)


@on_pytorch
@pytest.mark.parametrize("place", ["blocks.0.mlp.fc2", "proj_out"])
def test_a_module_that_sends_no_gradient_back_is_named(framework, given, place):
    made = network(framework)
    made.get_submodule(place).register_forward_pre_hook(lambda module, asked: asked[0].detach())
    found = dit.prove(made, network(framework), given)
    assert found.where == f"backward: module {place}", str(found)


@pytest.mark.parametrize(("change", "other", "words"), [
    (math.nan, {}, "not finite, or rounding alone, and proves nothing; forward: the data: input x of the network"),
    pytest.param(1e30, {}, "not finite, or rounding alone, and proves nothing; forward: module", marks=on_pytorch),
    (1.0, {"output": lambda x: ops.permute(x, (0, 2, 1)), "loss": lambda x: (x * x).mean()},
     r"output: mine gives \(3, 4, 6\), theirs \(3, 6, 4\)"),
])  # fmt: skip
def test_what_proves_nothing_is_refused(framework, given, change, other, words):
    with pytest.raises(UserError, match=words):
        dit.prove(network(framework), network(framework), given | {"x": given["x"] * np.float32(change)},
                  **({"their_output": lambda x: x} | other))  # fmt: skip


class Tabled(nn.Module):
    """A network that adds a table, which others compute, to what it takes."""

    def __init__(self, net):
        super().__init__()
        self.net, self.table = net, nn.parameter((N, C), trained=False)

    def forward(self, x, *given):
        return self.net(x + self.table, *given)


def test_a_table_that_one_side_computes_has_no_partner_and_stays_as_it_is(framework, given):
    plain, tabled, asked = network(framework), Tabled(network(framework)), list(given.values())
    assert dit.prove(plain, tabled, asked, names={"": "net", "table": None}).good
    assert dit.prove(tabled, plain, asked, names={"net": "", "table": None}).good
    with pytest.raises(UserError, match="'tabel': names no parameter of mine or theirs"):
        dit.prove(plain, tabled, asked, names={"": "net", "tabel": None})


def test_pairs_that_do_not_fit_are_listed_first(framework, given):
    shallow = network(framework, depth=1)
    with pytest.raises(UserError, match=r"(?s)find no partner.*mine blocks\.1\.attn.*theirs has no"):
        dit.prove(network(framework), shallow, given)
    with pytest.raises(UserError, match=r"'blokcs.\*': names no parameter of mine"):
        dit.prove(network(framework), shallow, given, names={"blokcs.*": "blocks.*"})


def test_other_names_are_paired_by_a_mapping_and_one_that_names_nothing_is_refused(framework, right, tmp_path, capsys):
    names = tmp_path / "names.json"
    recorded(framework, tmp_path / "w", PLAIN, Loop(rates=TWO), Wrapped)
    recorded(framework, tmp_path / "causal", NETWORKS["causal joint attention"][0], prepare=Wrapped)
    against_right(framework, right, tmp_path / "same")
    for place, rule, code, said in (
        ("w", {"net": ""}, 0, "verdict: PASS"),
        ("causal", {"net": ""}, 1, "step 1, forward: module net.blocks.0.attn (theirs: blocks.0.attn)"),
        ("w", {"nett": ""}, 2, "'nett': names no parameter of mine"),
    ):
        names.write_text(json.dumps(rule))
        flags = ["--names", str(names), "--output", str(tmp_path / "r.html")]
        assert main(["compare", str(right), str(tmp_path / place), *flags]) == code
        assert said in "".join(capsys.readouterr())


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
