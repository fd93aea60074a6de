"""Each framework offers every name of the contract, and each name does what NumPy says it should."""

import importlib
import math
import re

import numpy as np
import pytest

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework import contract, meta
from mindspeed_mm_dit.tools.verify.table import relative_error
from tests.conftest import ROOT, gradient

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums of some tens of terms
EXACT_ENOUGH = {"rtol": 1e-6, "atol": 1e-7}  # elementary functions: a few units in the last place


def draw(*shape, seed=0, low=-2.0, high=2.0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def load(framework, module, **arrays):
    framework.runtime.load_arrays(module, arrays)
    return module


def test_every_name_of_the_contract_exists_and_every_layer_and_operator_is_in_it(framework):
    for names, room in ((contract.RUNTIME, framework.runtime), (contract.OPTIM, framework.optim)):
        assert [name for name in names if not hasattr(room, name)] == []
    importlib.import_module("mindspeed_mm_dit.framework.meta.nn")
    assert set(framework.nn.__all__) == set(contract.NN) and set(framework.ops.__all__) == set(contract.OPS)
    assert set(contract.NN) <= vars(meta.nn).keys() and set(contract.OPS) <= vars(meta.ops).keys()


def test_what_the_rooms_use_of_a_framework_is_the_contract_and_all_of_it_is_used():
    """Files that know no framework call nothing else; those of one framework may know more of it."""
    package, own = ROOT / "mindspeed_mm_dit", re.compile(r"^import torch|framework\.(pytorch|mindspore)", re.M)
    frameworks = [package / "framework" / name for name in ("pytorch", "mindspore", "meta")]
    texts = [path.read_text() for path in package.rglob("*.py") if not {*frameworks} & {*path.parents}]
    for room, names in (("runtime", contract.RUNTIME), ("optim", contract.OPTIM)):
        used = {text: set(re.findall(rf"\b{room}\.([A-Za-z]\w+)", text)) for text in texts}
        assert set(names) <= set().union(*used.values()), room
        assert set().union(*(found for text, found in used.items() if not own.search(text))) <= set(names), room


@pytest.mark.parametrize("name", ["exp", "expm1", "log", "tanh", "sin", "cos"])
def test_elementary_functions(framework, name):
    x = draw(10_000, low=-8.0, high=8.0) if name != "log" else draw(10_000, low=1e-6, high=8.0)
    found = framework.ops.numpy(getattr(framework.ops, name)(framework.ops.tensor(x)))
    np.testing.assert_allclose(found, getattr(np, name)(x.astype(np.float64)), **EXACT_ENOUGH)


def test_expm1_and_sigmoid_keep_their_digits_near_zero_and_stay_finite(framework):
    ops, small, negative = framework.ops, draw(1000, low=-1e-3, high=1e-3), draw(1000, low=-80, high=0)
    np.testing.assert_allclose(ops.numpy(ops.expm1(ops.tensor(small))), np.expm1(small.astype(np.float64)), rtol=1e-6)
    wanted = 1 / (1 + np.exp(-negative.astype(np.float64)))
    np.testing.assert_allclose(ops.numpy(ops.sigmoid(ops.tensor(negative))), wanted, rtol=1e-6)
    (slope,) = gradient(framework, ops.sigmoid, negative)
    np.testing.assert_allclose(slope, wanted * (1 - wanted), rtol=2e-6)
    ends = np.array([-3e38, 3e38], np.float32)
    assert ops.numpy(ops.sigmoid(ops.tensor(ends))).tolist() == [0, 1]
    assert gradient(framework, ops.sigmoid, ends)[0].tolist() == [0, 0]


def test_operators_that_move_numbers(framework):
    ops, x, y = framework.ops, draw(4, 6, 5), draw(4, 2, 5, seed=1)
    t, u = ops.tensor(x), ops.tensor(y)
    assert (ops.numpy(ops.cat([t, u], 1)) == np.concatenate([x, y], 1)).all()
    parts = ops.chunk(t, 3, 1)
    assert len(parts) == 3 and all((ops.numpy(a) == b).all() for a, b in zip(parts, np.split(x, 3, 1), strict=True))
    assert (ops.numpy(ops.reshape(t, (4, -1))) == x.reshape(4, -1)).all()
    assert (ops.numpy(ops.permute(t, (2, 0, 1))) == x.transpose(2, 0, 1)).all()
    assert (ops.numpy(ops.clamp(t, -1.0, None)) == np.clip(x, -1, None)).all()
    assert (ops.numpy(ops.clamp(t, None, 0.5)) == np.clip(x, None, 0.5)).all()
    assert (ops.numpy(ops.clamp(t, -1.0, 0.5)) == np.clip(x, -1, 0.5)).all()
    assert (ops.numpy(ops.where(t > 0, t, -t)) == np.abs(x)).all()
    images = draw(2, 3, 4, 5)
    padded = np.pad(images, ((0, 0), (0, 0), (3, 4), (1, 2)))  # left, right, top, bottom
    assert (ops.numpy(ops.pad(ops.tensor(images), (1, 2, 3, 4))) == padded).all()
    assert (ops.numpy(ops.upsample_nearest_2x(ops.tensor(images))) == images.repeat(2, 2).repeat(2, 3)).all()
    np.testing.assert_allclose(ops.numpy(ops.mean_per_sample(ops.tensor(images))), images.mean((1, 2, 3)), **CLOSE)
    table, index = draw(7, 4), np.array([6, 0, 0, 3])
    assert (ops.numpy(ops.take(ops.tensor(table[:, 0]), ops.tensor(index))) == table[index, 0]).all()
    layer = load(framework, framework.nn.Embedding(7, 4), weight=table)
    assert (ops.numpy(layer(ops.tensor(index))) == table[index]).all()


def softmax_attention(q, k, v, mask=True):
    weights = np.where(mask, np.exp(q @ k.transpose(0, 1, 3, 2) / math.sqrt(8)), 0)
    return weights / weights.sum(-1, keepdims=True) @ v


def test_attention_is_softmax_of_scaled_products_where_the_mask_is_true(framework):
    """Five queries, as many keys, and then three, of which each sample hides another, which gets no gradient."""
    ops, q, k, v = framework.ops, draw(2, 3, 5, 8), draw(2, 3, 5, 8, seed=1), draw(2, 3, 5, 8, seed=2)
    found = ops.numpy(ops.attention(*map(ops.tensor, (q, k, v))))
    np.testing.assert_allclose(found, softmax_attention(q, k, v), **CLOSE)
    k, v = draw(2, 3, 3, 8, seed=1), draw(2, 3, 3, 8, seed=2)
    mask = np.array([[True, True, False], [True, False, True]]).reshape(2, 1, 1, 3)
    found = ops.numpy(ops.attention(*map(ops.tensor, (q, k, v, mask))))
    np.testing.assert_allclose(found, softmax_attention(q, k, v, mask), **CLOSE)
    hidden = np.broadcast_to(~mask.reshape(2, 1, 3, 1), v.shape)
    weight = draw(2, 3, 5, 8, seed=3)
    slopes = gradient(framework, lambda q, k, v: ops.attention(q, k, v, ops.tensor(mask)) * ops.tensor(weight), q, k, v)
    assert not slopes[1][hidden].any() and not slopes[2][hidden].any() and all(np.abs(s).max() > 0 for s in slopes)


def test_rotary_turns_pairs_by_position(framework):
    ops, x, angles = framework.ops, draw(2, 3, 5, 8), draw(5, 4, seed=1)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    wanted = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    tables = [ops.tensor(f(angles)) for f in (np.cos, np.sin)]
    np.testing.assert_allclose(ops.numpy(ops.rotary(ops.tensor(x), *tables)), wanted, **CLOSE)
    (slope,) = gradient(framework, lambda t: ops.rotary(t, *tables) * ops.tensor(wanted.astype(np.float32)), x)
    np.testing.assert_allclose(slope, x, **CLOSE)  # a rotation turned back
    if framework.active() == "pytorch":  # fsdp2.yaml's cast_forward_inputs gives a block's tables in bfloat16 too
        low = [each.bfloat16() for each in (ops.tensor(x), *tables)]
        np.testing.assert_allclose(ops.numpy(ops.rotary(*low)), wanted, atol=0.05)


def test_casts_keep_values(framework):
    ops = framework.ops
    integers = ops.tensor(np.array([0, 3, 255], np.uint8))
    floats = ops.to_float32(integers)
    assert ops.numpy(floats).dtype == np.float32 and ops.numpy(floats).tolist() == [0, 3, 255]
    assert ops.numpy(ops.cast_like(floats, ops.tensor(np.array([1.0])))).dtype == np.float64
    assert ops.numpy(ops.tensor(np.array([0.5], np.float16))).dtype == np.float32


def test_scalars_that_are_read_later(framework):
    values = [framework.ops.tensor(np.array(value, np.float32)) for value in (0.5, -3.0)]
    read = framework.runtime.read_later(values)
    assert read.is_ready() and read.wait() == [0.5, -3.0]  # on a CPU


def test_no_gradient_passes_stop_gradient_and_no_grad(framework):
    ops = framework.ops

    def product_under_no_grad(x):
        with ops.no_grad():
            y = x * 2
        return y * x

    x = draw(4)
    np.testing.assert_allclose(gradient(framework, lambda t: ops.stop_gradient(t * 2) * t, x)[0], 2 * x, **CLOSE)
    np.testing.assert_allclose(gradient(framework, product_under_no_grad, x)[0], 2 * x, **CLOSE)


@pytest.mark.parametrize("name", ["split_tokens", "gather_tokens", "tokens_to_heads", "heads_to_tokens"])
def test_tokens_stay_where_they_are_unless_ranks_share_samples(framework, name):
    x = draw(2, 3, 4, 5)
    assert np.array_equal(framework.ops.numpy(getattr(framework.ops, name)(framework.ops.tensor(x))), x)
    assert (framework.runtime.data_parallel_rank(), framework.runtime.data_parallel_size()) == (0, 1)


def test_linear_with_a_weight_of_its_own_and_its_gradients(framework):
    ops, w, b, x = framework.ops, draw(5, 7), draw(5, seed=1), draw(2, 3, 7, seed=2)
    np.testing.assert_allclose(ops.numpy(ops.linear(*map(ops.tensor, (x, w, b)))), x @ w.T + b, **CLOSE)
    of_x, of_w, of_b = gradient(framework, ops.linear, x, w, b)
    np.testing.assert_allclose(of_x, np.broadcast_to(w.sum(0), x.shape), **CLOSE)
    np.testing.assert_allclose(of_w, np.broadcast_to(x.sum((0, 1)), w.shape), **CLOSE)
    assert of_b.tolist() == [6] * 5


def test_gradients_are_of_the_mean_and_a_first_step_of_adamw_goes_its_rate_against_each(framework):
    ops, w, b, x = framework.ops, draw(5, 7), draw(5), draw(3, 7)
    layer = load(framework, framework.nn.Linear(7, 5), weight=w, bias=b)

    def losses():
        return layer(ops.tensor(x)).mean(1)

    values, found = framework.optim.gradients(layer, losses)
    np.testing.assert_allclose(values, (x @ w.T + b).mean(1), **CLOSE)
    np.testing.assert_allclose(found["weight"], np.broadcast_to(x.mean(0) / 5, w.shape), **CLOSE)
    np.testing.assert_allclose(found["bias"], np.full(5, 0.2), **CLOSE)
    framework.optim.adamw_step(layer, losses, lr=1e-2)
    w, b = w - 1e-2 * np.sign(found["weight"]), b - 1e-2 * np.sign(found["bias"])
    np.testing.assert_allclose(ops.numpy(layer(ops.tensor(x))), x @ w.T + b, **CLOSE)


def test_broadcasting_repeats_and_its_gradient_adds_up(framework):
    ops, x, weight = framework.ops, draw(2, 1, 3, 1), draw(2, 4, 3, 5, seed=1)
    assert (ops.numpy(ops.broadcast_to(ops.tensor(x), (2, 4, 3, 5))) == np.broadcast_to(x, (2, 4, 3, 5))).all()
    (slope,) = gradient(framework, lambda t: ops.broadcast_to(t, weight.shape) * ops.tensor(weight), x)
    np.testing.assert_allclose(slope, weight.sum((1, 3), keepdims=True), **CLOSE)


def convolution(x, w, b, stride, padding):
    """Cross-correlation by its definition."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    return np.einsum("bchwij,ocij->bohw", windows, w) + b[:, None, None]


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"), [(8, 2, 2, 0), (9, 3, 1, 1), (9, 3, 2, 0), (8, 1, 1, 0), (8, 3, 2, 1)]
)
def test_convolution_and_its_gradient(framework, size, kernel, stride, padding):
    ops, x, w, b = framework.ops, draw(2, 3, size, size), draw(4, 3, kernel, kernel, seed=1), draw(4, seed=2)
    layer = load(framework, framework.nn.Conv2d(3, 4, kernel, stride=stride, padding=padding), weight=w, bias=b)
    wanted = convolution(x, w, b, stride, padding)
    np.testing.assert_allclose(ops.numpy(layer(ops.tensor(x))), wanted, rtol=1e-5, atol=1e-5)
    (found,) = gradient(framework, layer, x)
    for place in [(0, 0, 0, 0), (1, 2, size - 2, 3), (0, 1, size // 2, size // 2)]:
        moved = x.astype(np.float64)
        moved[place] += 1  # a convolution is linear: a finite difference of any size is exact, but for rounding
        slope = (convolution(moved, w, b, stride, padding) - wanted).sum()
        assert found[place] == pytest.approx(slope, rel=1e-4, abs=1e-4)


def normed(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


SMALL = 1e-3
"""Inputs whose variance is about the epsilon of the norms, so that it shows."""


@pytest.mark.parametrize("size", [1.0, SMALL])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_and_its_gradients(framework, affine, size):
    ops, x, w, b = framework.ops, draw(2, 3, 16) * np.float32(size), draw(16, seed=1), draw(16, seed=2)
    layer = framework.nn.LayerNorm(16, eps=1e-6, elementwise_affine=affine)
    assert sorted(name for name, _ in layer.named_parameters()) == (["bias", "weight"] if affine else [])
    wanted = normed(x, -1, 1e-6)
    if affine:
        load(framework, layer, weight=w, bias=b)
        wanted = wanted * w + b
        root = np.sqrt(x.astype(np.float64).var(-1, keepdims=True) + 1e-6)
        plain = (x - x.mean(-1, keepdims=True)) / root
        slope = (w - w.mean() - plain * (plain * w).mean(-1, keepdims=True)) / root
        assert relative_error(gradient(framework, layer, x)[0], slope) < 2e-6
    np.testing.assert_allclose(ops.numpy(layer(ops.tensor(x))), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, SMALL])
def test_rms_norm_and_its_gradients(framework, size):
    ops, x, w = framework.ops, draw(2, 3, 16) * np.float32(size), draw(16, seed=1)
    layer = load(framework, framework.nn.RMSNorm(16, eps=1e-6), weight=w)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(ops.numpy(layer(ops.tensor(x))), x / root * w, rtol=1e-5, atol=1e-6)
    (slope,) = gradient(framework, layer, x)
    wanted = w / root - x / root**3 * (x * w).mean(-1, keepdims=True)
    assert relative_error(slope, wanted) < 2e-6


@pytest.mark.parametrize("size", [1.0, SMALL])
def test_group_norm(framework, size):
    ops, x, w, b = framework.ops, draw(2, 8, 4, 5) * np.float32(size), draw(8, seed=1), draw(8, seed=2)
    layer = load(framework, framework.nn.GroupNorm(4, 8, eps=1e-6), weight=w, bias=b)
    wanted = normed(x.reshape(2, 4, 2, 4, 5), (2, 3, 4), 1e-6).reshape(x.shape) * w[:, None, None] + b[:, None, None]
    np.testing.assert_allclose(ops.numpy(layer(ops.tensor(x))), wanted, rtol=1e-4, atol=1e-5)


def test_gelu_and_its_gradient(framework):
    """By the norm, from float64: PyTorch 1e-8 and 2e-7, MindSpore 1e-8 and 4e-7 by the sigmoid."""
    x, gelu = draw(10_000, low=-12, high=12), framework.nn.GELU(approximate="tanh")
    exact = x.astype(np.float64)
    tanh = np.tanh(math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3))
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * exact**2)
    values, gradients = 0.5 * exact * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * exact * (1 - tanh**2) * slope
    assert relative_error(framework.ops.numpy(gelu(framework.ops.tensor(x))), values) < 1e-6
    assert relative_error(gradient(framework, gelu, x)[0], gradients) < 1e-6


def small_module(nn):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.parameter((3,), lambda _, shape: draw(*shape), trained=False)
            self.gain = nn.parameter((3,))
            nn.set_constant(self, "constant", (3,), lambda: draw(3, seed=1))
            self.table = nn.Embedding(2, 3)
            self.layers = nn.ModuleList([nn.Sequential(nn.SiLU(), nn.Linear(3, 3)), nn.Linear(3, 1, bias=False)])

        def forward(self, x):
            x = x + self.frozen + self.constant + self.gain
            for layer in self.layers:
                x = layer(x)
            return x

    return Small()


def test_a_module_has_dotted_names_and_constants_and_trains_nothing_once_frozen(framework):
    ops, module, w = framework.ops, small_module(framework.nn), draw(3, 3)
    names = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    assert names == {"gain": True, "frozen": False, "table.weight": True, "layers.0.1.weight": True,
                     "layers.0.1.bias": True, "layers.1.weight": True}  # fmt: skip
    ones = np.ones((1, 3), np.float32)
    load(framework, module, **{"layers.0.1.weight": w, "layers.0.1.bias": draw(3), "layers.1.weight": ones})
    x = draw(2, 3) + draw(3) + draw(3, seed=1)
    wanted = ((x / (1 + np.exp(-x))) @ w.T + draw(3)).sum(1, keepdims=True)
    np.testing.assert_allclose(ops.numpy(module(ops.tensor(draw(2, 3)))), wanted, **CLOSE)
    frozen = framework.runtime.prepare_frozen(module, "fp32")
    assert not any(parameter.requires_grad for _, parameter in frozen.named_parameters())


def test_alone_the_runtime_is_rank_0_of_1(framework):
    ops, runtime = framework.ops, framework.runtime
    assert (runtime.rank(), runtime.world_size()) == (0, 1)
    means = runtime.mean_over_ranks([ops.tensor(np.float32(2)), ops.tensor(np.float32(3))])
    assert [float(ops.numpy(mean)) for mean in means] == [2.0, 3.0]
    assert runtime.any_over_ranks(True) is True and runtime.any_over_ranks(False) is False
    assert runtime.each_any_over_ranks([True, False]) == [True, False]
    runtime.barrier()
    batch = runtime.to_device({"pixels": np.arange(6, dtype=np.uint8).reshape(1, 6), "labels": np.array([3])})
    assert ops.numpy(batch["pixels"]).dtype == np.uint8 and ops.numpy(batch["labels"]).dtype == np.int64
    assert runtime.device_name() and "numpy" in runtime.versions()
    if runtime.device_name().startswith("CPU"):
        with pytest.raises(PlatformError, match="--distributed-backend = hccl"):
            runtime.check_backend("hccl")


def test_a_table_made_on_the_host_is_a_constant_in_a_compiled_network_too(framework, all_compiled):
    table = framework.ops.from_host(lambda rows, columns: (rows, columns))(_counted)

    class Net(framework.nn.Module):
        def forward(self, x):
            return x + table(x.shape[0], x.shape[1])

    for rows, columns in ((2, 3), (3, 2)):
        for net in (Net(), framework.runtime.jit_forward(Net())):
            found = framework.ops.numpy(net(framework.ops.tensor(np.zeros((rows, columns), np.float32))))
            np.testing.assert_array_equal(found, _counted(rows, columns))


def _counted(rows, columns):
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
