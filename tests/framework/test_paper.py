"""Paper against PyTorch: of each operator shape, layout in memory, multiply-adds, and what its backward keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.meta import nn, ops
from mindspeed_mm_dit.framework.meta.nn import meta_reference
from mindspeed_mm_dit.framework.meta.tensor import ForwardCost, Tensor, recording

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from mindspeed_mm_dit.framework.pytorch import nn as real_nn  # noqa: E402
from mindspeed_mm_dit.framework.pytorch import ops as real  # noqa: E402
from mindspeed_mm_dit.models import dit  # noqa: E402

pytestmark = pytest.mark.pytorch

size = st.integers(1, 6)
heads = st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3)])  # heads, or tokens, outside
shapes = st.lists(size, min_size=1, max_size=5).map(tuple)


def permuted(draw, shape):
    """A shape, and an order in which its axes lie in memory."""
    return shape, draw(st.permutations(range(len(shape))))


@st.composite
def calls(draw):
    """An operator, and the shapes and other arguments that it is called with."""
    B, N, M, D, H = (draw(size) for _ in range(5))
    d, whole = 2 * draw(size), draw(shapes)
    halves = tuple(draw(st.sampled_from([1, side])) for side in whole)
    parts = draw(st.sampled_from([k for k in range(1, N * M + 1) if (N * M) % k == 0]))
    one = [permuted(draw, whole)]
    table = {
        "cat": ([[permuted(draw, (B, N, D)), permuted(draw, (B, M, D))]], (1,)),
        "chunk": ([permuted(draw, (B, N * M, D))], (parts, 1)),
        "reshape": ([permuted(draw, (B, N, M * D))], (draw(st.sampled_from([(B * N, M, D), (B, -1), (B, N, M, D)])),)),
        "permute": (one, (draw(st.permutations(range(len(whole)))),)),
        "contiguous": (one, ()),
        "broadcast_to": ([(halves, range(len(whole)))], (whole,)),
        "linear": ([(draw(st.sampled_from([(B, N, D), (B, D)])), None), ((M, D), None), ((M,), None)], ()),
        "addcmul": ([permuted(draw, whole), permuted(draw, whole), (halves, None)], ()),
        "cosine_similarity": ([permuted(draw, whole), permuted(draw, whole)], (draw(st.integers(0, len(whole) - 1)),)),
        "mean_per_sample": ([permuted(draw, (B, N, M))], ()),
        "pad": ([((B, N, M), None)], ((draw(size), 0, draw(size), 1),)),
        "upsample_nearest_2x": ([((B, D, N, M), None)], ()),
        "attention": ([((B, H, n, d), draw(heads)) for n in (N, M, M)], ()),
        "rotary": ([((B, H, N, d), draw(heads))], ()),
        "clamp": (one, (0.1, None)),
        **{name: (one, ()) for name in ("exp", "expm1", "sigmoid", "log", "sin", "cos", "to_float32", "stop_gradient")},
    }
    name = draw(st.sampled_from(sorted(table)))
    return (name, *table[name])


def both(given):
    """The same tensor on PyTorch and on the meta backend, with a gradient; lists of them for a list."""
    if isinstance(given, list):
        return tuple(map(list, zip(*map(both, given))))
    shape, order = given
    order = range(len(shape)) if order is None else list(order)
    stored, back = [shape[axis] for axis in order], [list(order).index(axis) for axis in range(len(shape))]
    theirs = torch.rand(stored, requires_grad=True).permute(back)
    return theirs, ops.permute(Tensor(stored, needs_gradient=True), back)


def kept_of(call, weights=()):
    """The result of a call, and the bytes that it leaves for backward besides weights."""
    weights, kept = {weight.untyped_storage().data_ptr() for weight in weights}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = call()
    return made, sum(nbytes for nbytes, _ in kept.values())


def keep_as_a_gpu_does(x, shape, weight, eps):
    """RMSNorm that keeps its input and a number a row, as GPUs do; a CPU keeps what it has normed too."""

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            context.save_for_backward(x, x.new_empty(x.shape[:-1]))
            return torch.rms_norm(x, shape, weight, eps)

    return RMSNorm.apply(x, weight)


@settings(deadline=None, max_examples=100)
@given(calls())
def test_an_operator_costs_on_paper_what_it_costs_on_pytorch(call):
    name, tensors, others = call
    theirs, ours = zip(*map(both, tensors))
    if name == "rotary":
        turned = (theirs[0].shape[2], theirs[0].shape[3] // 2)
        theirs, ours = (*theirs, torch.rand(turned), torch.rand(turned)), (*ours, Tensor(turned), Tensor(turned))
    with recording(ForwardCost()) as trace:
        found = getattr(ops, name)(*ours, *others)
    wanted, kept = kept_of(lambda: getattr(real, name)(*theirs, *others))
    for here, there in zip(*((made if isinstance(made, tuple) else (made,)) for made in (found, wanted))):
        assert here.shape == tuple(there.shape) and here.needs_gradient == there.requires_grad
        strides = [(a, b) for a, b, n in zip(here.strides, there.stride(), there.shape) if n > 1]
        assert len(tensors) > 1 or all(a == b for a, b in strides)
    if name not in ("cosine_similarity", "rotary"):  # (a loss's; a CPU keeps a table of complex numbers)
        assert trace.saved_bytes() == kept
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        if name == "linear":
            torch.nn.functional.linear(*theirs)
        elif name == "attention":
            real.attention(*theirs)
    assert 2 * trace.multiply_adds == counter.get_total_flops()


LAYERS = {
    "Linear": ((6, 4), (2, 5, 6)),
    "Conv2d": ((3, 8, 3, 2, 1), (2, 3, 9, 6)),
    "LayerNorm": ((8,), (2, 3, 8)),
    "RMSNorm": ((8,), (2, 3, 8)),
    "GroupNorm": ((2, 4), (2, 4, 5, 3)),
    "SiLU": ((), (2, 3)),
    "GELU": (("tanh",), (2, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_costs_on_paper_what_it_costs_on_pytorch(name, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "rms_norm", keep_as_a_gpu_does)
    monkeypatch.setattr(real_nn, "onednn_is_faster", lambda: False)  # whose products the counter does not know
    sizes, shape = LAYERS[name]
    layer, counter = getattr(real_nn, name)(*sizes), FlopCounterMode(display=False)
    x = torch.rand(shape, requires_grad=True)
    wanted, kept = kept_of(lambda: layer(x), layer.parameters())
    with recording(ForwardCost()) as trace:
        found = getattr(nn, name)(*sizes)(Tensor(shape, needs_gradient=True))
    with counter, torch.no_grad():
        layer(x)
    assert found.shape == tuple(wanted.shape) and trace.saved_bytes() == kept
    assert 2 * trace.multiply_adds == counter.get_total_flops()


def test_ranks_that_share_a_sample_hold_parts_of_it():
    with recording(ForwardCost(ranks=4)):
        part = ops.split_tokens(Tensor((1, 16, 8)))
        heads = ops.tokens_to_heads(Tensor((1, 8, 4, 2)))
        assert part.shape == (1, 4, 8) and ops.gather_tokens(part).shape == (1, 16, 8)
        assert heads.shape == (1, 2, 16, 2) and ops.heads_to_tokens(heads).shape == (1, 8, 4, 2)


def test_a_block_that_is_computed_again_keeps_only_its_input():
    class Block(nn.Module):
        def __init__(self):
            self.layer, self.act = nn.Linear(4, 4), nn.SiLU()

        def forward(self, x):
            return x + self.act(self.layer(x))

    blocks = nn.Blocks([Block(), Block()])
    with recording(ForwardCost()) as trace:
        x = Tensor((3, 4))
        for block in blocks:
            x = block(x)
    assert trace.saved_bytes() == 4 * (4 * 3 * 4) and trace.saved_bytes(recompute=True) == 2 * (4 * 3 * 4)
    assert trace.largest_block_bytes() == 2 * (4 * 3 * 4)


def test_a_network_on_paper_leaves_the_one_of_the_framework_alone():
    paper = meta_reference("mindspeed_mm_dit.models.dit:DiT")
    assert paper is meta_reference("mindspeed_mm_dit.models.dit:DiT") and paper is not dit.DiT
    assert issubclass(paper, nn.Module) and issubclass(dit.DiT, torch.nn.Module)
    assert paper.__init__.__globals__["DiTConfig"] is dit.DiTConfig  # what knows no framework is not imported twice
    assert paper.__init__.__globals__["FullWidthNormAttention"] is not dit.FullWidthNormAttention


def test_a_network_that_cannot_be_imported_for_paper_is_named():
    for reference, words in (
        ("nowhere.network:Net", "No module named 'nowhere'"),
        ("mindspeed_mm_dit.models.dit", "cannot be imported"),
        ("mindspeed_mm_dit.models.dit:Dit", "no attribute 'Dit'"),
        ("mindspeed_mm_dit.models.composite:DiTModel", "cannot be imported for the meta backend"),
    ):
        with pytest.raises(ConfigError, match=words):
            meta_reference(reference)
