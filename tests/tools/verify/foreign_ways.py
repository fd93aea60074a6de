"""Wrong and other right ways to compute what the network of ``foreign.py`` computes, as its ``Parts``."""

import math
from dataclasses import replace

import numpy as np

from tests.conftest import FRAMEWORK
from tests.tools.verify.foreign import PLAIN, attention, ops, places

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
