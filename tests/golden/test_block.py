"""A block and the last layer are their formulas in float64, also on tokens so small that the epsilon of a norm shows.

Peebles & Xie 2023, figure 3. With tokens of about 1e-3 their variance equals the epsilon, 1e-6: without it, or with
another, the results are off by tens of percent.
"""

import math

import numpy as np
import pytest

from mindspeed_mm_dit.configs.dit import DiTConfig

WIDTH, HEADS = 16, 2


def draw(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def modulated(x, shift, scale):
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


def silu(x):
    return x / (1 + np.exp(-x))


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def attention(weights, x):
    B, N, D = x.shape
    q, k, v = linear(weights, "attn.qkv", x).reshape(B, N, 3, HEADS, D // HEADS).transpose(2, 0, 3, 1, 4)
    scores = np.exp(q @ k.transpose(0, 1, 3, 2) / math.sqrt(D // HEADS))
    mixed = scores / scores.sum(-1, keepdims=True) @ v
    return linear(weights, "attn.proj", mixed.transpose(0, 2, 1, 3).reshape(B, N, D))


def mlp(weights, x):
    h = linear(weights, "mlp.fc1", x)
    return linear(weights, "mlp.fc2", 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))))


def block(weights, x, c):
    shift1, scale1, gate1, shift2, scale2, gate2 = np.split(linear(weights, "adaLN_modulation.1", silu(c)), 6, 1)
    x = x + gate1[:, None] * attention(weights, modulated(x, shift1, scale1))
    return x + gate2[:, None] * mlp(weights, modulated(x, shift2, scale2))


def final_layer(weights, x, c):
    shift, scale = np.split(linear(weights, "adaLN_modulation.1", silu(c)), 2, 1)
    return linear(weights, "linear", modulated(x, shift, scale))


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize(("part", "expected"), [("blocks.0", block), ("final_layer", final_layer)])
def test_a_part_of_the_network_is_its_formula(framework, part, expected, size):
    from mindspeed_mm_dit.models.dit import DiT

    ops, runtime = framework.ops, framework.runtime
    model = DiT(DiTConfig(8, 10, 4, 2, WIDTH, 1, HEADS))
    shapes = enumerate(runtime.shapes(model).items(), 1)
    weights = {name: draw(*shape, seed=seed, scale=0.3) for seed, (name, shape) in shapes if name.startswith(part)}
    for name in weights:
        if name.endswith("adaLN_modulation.1.bias"):  # what branches add is as small as the tokens they are added to
            weights[name][2 * WIDTH :] *= size
            weights[name[:-4] + "weight"][2 * WIDTH :] *= size
    runtime.load_arrays(model, weights)
    runtime.to_runtime_device(model)
    x, c = draw(2, 5, WIDTH, scale=size), draw(2, WIDTH, seed=99)
    module = dict(model.named_modules())[part]
    found = ops.numpy(module(ops.tensor(x), ops.tensor(c)))
    exact = {name.removeprefix(f"{part}."): array.astype(np.float64) for name, array in weights.items()}
    wanted = expected(exact, x.astype(np.float64), c.astype(np.float64))
    # float32 sums of some tens of terms; 1e-5 in the place of 1e-6 is off by more than 0.3
    assert np.linalg.norm(found - wanted) < 2e-6 * np.linalg.norm(wanted)
