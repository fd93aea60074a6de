"""A third-party transformer of images and texts, and the loop that trains it: small, each part exchangeable.

A fault or another right way to compute is a part that is exchanged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mindspeed_mm_dit.framework import activate
from tests.conftest import FRAMEWORK

activate(FRAMEWORK)
from mindspeed_mm_dit.framework import nn, ops  # noqa: E402

D, HEADS, L, N, C = 24, 2, 5, 6, 4
RANK, ALPHA, ROOT = 2, 1.0, math.sqrt(2 / math.pi)


def rows(names, often):
    """Return the rows of a table, of which ``make test`` runs those in ``often``, and ``make test-all`` every one."""
    return [name if name in often else pytest.param(name, marks=pytest.mark.extended) for name in names]


def attention(q, k, v, mask):
    return ops.attention(q, k, v, mask)


def norm(x):
    centred = x - x.mean(-1)[..., None]
    return centred / ((centred * centred).mean(-1)[..., None] + 1e-6) ** 0.5


def places(length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions: all of a text at 0, an image's tokens from 0."""
    at = np.concatenate([np.zeros(length), np.arange(count)])
    angles = at[:, None] * 100.0 ** -(np.arange(D // HEADS // 2) / (D // HEADS // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def gelu(x):
    return 0.5 * x * (1 + ops.tanh(ROOT * (x + 0.044715 * x * x * x)))


def modulated(x, scale, shift):
    return x * (1 + scale) + shift


@dataclass(frozen=True)
class Parts:
    """What can be computed in another way."""

    attention: Callable[..., Any] = attention
    norm: Callable[..., Any] = norm
    places: Callable[..., Any] = places
    gelu: Callable[..., Any] = gelu
    linear: Callable[..., Any] = lambda layer, x: layer(x)
    rotary: Callable[..., Any] = lambda x, cos, sin: ops.rotary(x, cos, sin)
    final: Callable[..., Any] = modulated
    called: Callable[..., Any] = lambda block, *given: block(*given)
    guidance: float = 1000.0
    lora: float = ALPHA / RANK
    is_fused: bool = False


PLAIN = Parts()


class Part(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts


class Rope(Part):
    def forward(self, text, x):
        cos, sin = self.parts.places(text.shape[1], x.shape[1])
        return ops.cast_like(ops.tensor(cos), x), ops.cast_like(ops.tensor(sin), x)


class Norm(Part):
    def forward(self, x):
        return self.parts.norm(x)


class Attention(Part):
    def __init__(self, parts):
        super().__init__(parts)
        if parts.is_fused:
            self.qkv = nn.Linear(D, 3 * D)
        else:
            self.to_q, self.to_k, self.to_v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.to_out = nn.Linear(D, D)

    def forward(self, both, cos, sin, mask):
        linear = self.parts.linear
        if self.parts.is_fused:
            q, k, v = ops.chunk(linear(self.qkv, both), 3, 2)
        else:
            q, k, v = linear(self.to_q, both), linear(self.to_k, both), linear(self.to_v, both)
        q, k, v = (ops.permute(ops.reshape(x, (*x.shape[:2], HEADS, D // HEADS)), (0, 2, 1, 3)) for x in (q, k, v))
        q, k = self.parts.rotary(q, cos, sin), self.parts.rotary(k, cos, sin)
        found = ops.permute(self.parts.attention(q, k, v, mask), (0, 2, 1, 3))
        return linear(self.to_out, ops.reshape(found, both.shape))


class Lora(Part):
    def __init__(self, parts):
        super().__init__(parts)
        self.base = nn.Linear(D, 2 * D)
        self.down, self.up = nn.Linear(D, RANK, bias=False), nn.Linear(RANK, 2 * D, bias=False)

    def forward(self, x):
        return self.base(x) + self.parts.lora * self.up(self.down(x))


class Mlp(Part):
    def __init__(self, parts):
        super().__init__(parts)
        self.fc1, self.fc2 = Lora(parts), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.parts.linear(self.fc2, self.parts.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = Norm(parts), Attention(parts), Norm(parts), Mlp(parts)

    def forward(self, both, cos, sin, mask):
        both = both + self.attn(self.norm1(both), cos, sin, mask)
        return both + self.mlp(self.norm2(both))


class Code(nn.Module):
    """Embed numbers by sines and cosines of ``scale`` times them."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.fc = scale, nn.Linear(8, D)

    def forward(self, t):
        angles = (self.scale * t)[:, None] * ops.cast_like(ops.tensor(np.exp(-np.arange(4, dtype=np.float32))), t)
        return self.fc(ops.cat([ops.cos(angles), ops.sin(angles)], 1))


class FinalNorm(Part):
    def __init__(self, parts):
        super().__init__(parts)
        self.norm, self.linear = Norm(parts), nn.Linear(D, 2 * D)

    def forward(self, x, c):
        scale, shift = ops.chunk(self.linear(c), 2, 1)
        return self.parts.final(self.norm(x), scale[:, None], shift[:, None])


class Network(nn.Module):
    """Tokens of an image (B, N, C), their time (B,), a text (B, L, D) with its mask, guidance (B,) -> (B, N, C)."""

    def __init__(self, parts, depth):
        super().__init__()
        self.parts, self.rope = parts, Rope(parts)
        self.x_embedder, self.text_embedder = nn.Linear(C, D), nn.Linear(D, D)
        self.time, self.guidance_embedder = Code(1000.0), Code(parts.guidance)
        self.blocks = nn.ModuleList([Block(parts) for _ in range(depth)])
        self.norm_out, self.proj_out = FinalNorm(parts), nn.Linear(D, C)

    def forward(self, x, t, text, mask, guidance):
        c = self.time(t) + self.guidance_embedder(guidance)
        x, text = self.x_embedder(x) + c[:, None], self.text_embedder(text)
        cos, sin = self.rope(text, x)
        seen = ops.cat([mask, x[:, :, 0] * 0 + 1], 1)[:, None, None] > 0  # (B, 1, 1, L + N)
        both = ops.cat([text, x], 1)
        for block in self.blocks:
            both = self.parts.called(block, both, cos, sin, seen)
        return self.proj_out(self.norm_out(both[:, text.shape[1] :], c))


class Wrapped(nn.Module):
    """A network of which every name has one part more."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *given):
        return self.net(*given)


def network(framework, parts=PLAIN, depth=2, seed=0):
    """A network with weights drawn from ``seed``."""
    made, draw = Network(parts, depth), np.random.default_rng(seed)
    shapes = framework.runtime.shapes(made)
    values = {n: (draw.standard_normal(s) / math.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}
    framework.runtime.load_arrays(made, values)
    return made


def inputs(seed=1, batch=3) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    mask = np.ones((batch, L), np.float32)
    mask[0, 3:] = 0
    return {
        "x": draw.standard_normal((batch, N, C), np.float32), "t": draw.uniform(0.2, 0.8, batch).astype(np.float32),
        "text": draw.standard_normal((batch, L, D), np.float32), "mask": mask,
        "guidance": draw.uniform(1, 4, batch).astype(np.float32),
    }  # fmt: skip


def odd():
    """A network that uses an activation twice, on other shapes, and few rows of a table."""
    import torch
    from torch.nn import Embedding, Linear, Module, SiLU

    class Odd(Module):
        def __init__(self):
            super().__init__()
            self.table, self.act, self.a, self.b = Embedding(9, 8), SiLU(), Linear(8, 16), Linear(16, 8)

        def forward(self, x, y):
            return self.b(self.act(self.a(x))) + self.act(self.table(y))[:, None]

    torch.manual_seed(0)
    return Odd(), [torch.randn(3, 5, 8), torch.tensor([1, 2, 2])]


# --- a loop ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """Flow matching with micro-batches of unequal numbers of tokens that count."""

    time: Callable[[Any, int], Any] = lambda t, step: t
    weight: Callable[[Any], Any] = lambda t: 1 + t
    share: Callable[[float, float], float] = lambda counted, total: counted / total
    seed: int = 1
    rates: tuple[float, ...] = (1e-2,)
    """The learning rate of each step."""
    clipped: float = 1.0
    """What gradients are multiplied with before the optimizer gets them."""

    def losses(self, made, total, step):
        """Yield a function for each micro-batch of a step, from 0, which returns its part of the loss."""
        for number, counted in enumerate((3, 1)):
            given = {name: ops.tensor(value) for name, value in inputs(self.seed + number, counted).items()}
            noise = ops.tensor(np.random.default_rng(7 + number).standard_normal((counted, N, C), np.float32))

            def loss(given=given, noise=noise, counted=counted):
                t = given["t"]
                x_t = given["x"] * (1 - t)[:, None, None] + noise * t[:, None, None]
                found = made(x_t, self.time(t, step), given["text"], given["mask"], given["guidance"])
                each = ops.mean_per_sample((found - (noise - given["x"])) ** 2) * self.weight(t)
                return each.mean() * self.share(counted, total)

            yield loss


def train(framework, made, loop, record_trace, average=None, prepare=lambda model: model):
    """Take the steps of a loop; ``record_trace``: (model, optimizer, average) -> a recorder, or a plain context."""
    take = _on_pytorch if framework.active() == "pytorch" else _on_mindspore
    return take(made, loop, record_trace, average, prepare)


def _on_pytorch(made, loop, record_trace, average, prepare):
    import torch

    model = prepare(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    with record_trace(model, optimizer, average) as w:
        for step, rate in enumerate(loop.rates):
            total, optimizer.param_groups[0]["lr"] = 0.0, rate
            for loss in loop.losses(model, 4, step):
                value = loss()
                value.backward()
                total += value.item()
            for parameter in made.parameters():
                parameter.grad *= loop.clipped
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                own = dict(model.named_parameters())
                with torch.no_grad():
                    for name, mean in average.named_parameters():
                        if name in own:  # a compiled module's begin with _orig_mod.
                            mean.lerp_(own[name], 0.5)
            w.step(total)


def _on_mindspore(made, loop, record_trace, average, prepare):
    import mindspore
    from mindspore import nn as msnn

    optimizer, model = msnn.AdamWeightDecay(made.trainable_params(), 1e-2), prepare(made)
    with record_trace(model, optimizer, average) as w:
        for step, rate in enumerate(loop.rates):
            mindspore.ops.assign(optimizer.learning_rate, mindspore.Tensor(rate, mindspore.float32))
            total, gradients = 0.0, None
            for loss in loop.losses(model, 4, step):
                value, found = mindspore.value_and_grad(loss, None, made.trainable_params())()
                gradients = found if gradients is None else tuple(a + b for a, b in zip(gradients, found))
                total += float(value)
            optimizer(tuple(gradient * loop.clipped for gradient in gradients))
            w.step(total)


# --- wrong -----------------------------------------------------------------------------------------------------------


def causal(q, k, v, mask):
    count = q.shape[2]
    return attention(q, k, v, ops.tensor(np.tri(count, dtype=bool))[None, None] & mask)


def from_the_end_of_the_text(length, count):
    cos, sin = places(0, length + count)
    return np.concatenate([cos[:1].repeat(length, 0), cos[length:]]), np.concatenate([0 * sin[:length], sin[length:]])


FAULTS = {
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


# --- right -----------------------------------------------------------------------------------------------------------


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
    "the MLP's GELU as a sigmoid": {"gelu": lambda x: x * ops.sigmoid(2 * ROOT * (x + 0.044715 * x**3))},
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
