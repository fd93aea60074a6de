"""Layers and products of our own on PyTorch: x + y * z, linear layers by oneDNN, and norms under autocast."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from mindspeed_mm_dit.framework.pytorch import nn  # noqa: E402

SHAPES = [((2, 3, 4), (2, 3, 4), (2, 1, 4)), ((2, 1, 4), (2, 3, 4), (2, 1, 4)), ((4,), (2, 3, 4), (1, 3, 1)),
          ((2, 1, 1), (2, 1, 4), (2, 3, 4))]  # fmt: skip
FLOAT, HALF = torch.float32, torch.bfloat16
OURS_AND_THEIRS = (nn._AddCMul.apply, torch.addcmul)
CLOSE = {"rtol": 1e-6, "atol": 2e-6}


def inputs(shapes, dtypes):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(dtype) for shape, dtype in zip(shapes, dtypes)]


def gradients(function, shapes, dtypes, asked, autocast=False):
    given = [x.requires_grad_(is_asked) for x, is_asked in zip(inputs(shapes, dtypes), asked)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = function(*given)
    result.backward(torch.ones_like(result).cumsum(-1))
    return [result, *(x.grad for x in given)]


@pytest.mark.parametrize("shapes", SHAPES)
def test_addcmul_has_values_and_gradients_of_pytorch_to_the_bit(shapes):
    dtypes = ((FLOAT, FLOAT, FLOAT), (HALF, FLOAT, HALF), (FLOAT, HALF, FLOAT))
    asked = ((True, True, True), (True, False, True), (False, True, False))
    for case in itertools.product(dtypes, asked, (False, True)):
        found, wanted = (gradients(f, shapes, *case) for f in OURS_AND_THEIRS)
        for one, other in zip(found, wanted, strict=True):
            assert one is other is None or (one.dtype == other.dtype and torch.equal(one, other)), case


@pytest.mark.parametrize("shapes", SHAPES)
def test_addcmul_has_derivatives_of_pytorch_along_tangents(shapes):
    def derivative(function, moved):
        with torch.no_grad(), forward_ad.dual_level():
            given = inputs(shapes, [FLOAT] * 3)
            given = [forward_ad.make_dual(x, x.sin()) if n in moved else x for n, x in enumerate(given)]
            return forward_ad.unpack_dual(function(*given)).tangent

    for moved in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        found, wanted = (derivative(function, moved) for function in OURS_AND_THEIRS)
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7), moved


def test_addcmul_keeps_only_what_a_gradient_needs():
    x, y, z = inputs(SHAPES[0], [FLOAT] * 3)
    kept = nn._AddCMul.apply(x.requires_grad_(), y.requires_grad_(), z).grad_fn.saved_tensors
    assert kept[0] is None and kept[1] is z


@pytest.fixture
def products(monkeypatch):
    """Take oneDNN whatever the CPU; return the list of its products' shapes."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    seen, product = [], nn._product

    def watched(*args):
        seen.append(product(*args))
        return seen[-1]

    monkeypatch.setattr(nn, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(nn, "_product", watched)
    return seen


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 7), (2, 3, 5, 7), (0, 7)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_by_onednn_has_values_and_gradients_of_float64(products, shape, has_bias):
    given = (drawn(*shape), drawn(4, 7), drawn(4) if has_bias else None)

    def computed(product, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given if x is not None]
        y = product(*leaves)
        return [y, *torch.autograd.grad(y, leaves, drawn(*shape[:-1], 4).to(dtype))]

    ours, exact = computed(nn.linear, FLOAT), computed(torch.nn.functional.linear, torch.float64)
    assert len(products) == (3 if 0 not in shape else 0)
    for found, expected in zip(ours, exact, strict=True):
        assert found.shape == expected.shape and found.dtype == FLOAT
        torch.testing.assert_close(found.double(), expected, **CLOSE)


def test_linear_by_onednn_takes_any_order_of_axes_and_asked_gradients_alone(products):
    x, weight = drawn(7, 5, 2).permute(2, 1, 0).requires_grad_(), drawn(7, 4).t().requires_grad_()
    y, theirs = nn.linear(x, weight), torch.nn.functional.linear(x, weight)
    found, expected = (torch.autograd.grad(out, (x, weight), drawn(5, 2, 4).transpose(0, 1)) for out in (y, theirs))
    assert len(products) == 3
    for a, b in zip((y, *found), (theirs, *expected), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    x = drawn(3, 7).requires_grad_()
    nn.Linear(7, 4).requires_grad_(False)(x).sum().backward()
    assert len(products) == 3 + 2 and x.grad is not None


def test_linear_of_other_precisions_devices_and_tensors_is_left_to_pytorch(products):
    layer, x = nn.Linear(7, 4), drawn(3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert layer.float().to("meta")(x.to("meta")).device.type == "meta"
    assert not nn._plain_float32(x, torch.Tensor._make_subclass(DTensor, x))
    assert not products


def test_gradient_of_a_norms_bias_under_autocast_is_summed_in_float32():
    torch.manual_seed(0)
    norm, x, given = nn.LayerNorm(48, eps=1e-5), torch.randn(16, 48, 48).bfloat16(), torch.randn(16, 48, 48)
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    out.backward(given.to(out.dtype))
    wanted = given.double().sum((0, 1))
    # PyTorch's own kernel, given bfloat16, is off by 2.6e-2 here.
    assert (norm.bias.grad - wanted).norm() < 1e-5 * wanted.norm()
    assert nn.LayerNorm(8, elementwise_affine=False)(torch.ones(2, 8).bfloat16()).dtype == torch.bfloat16


def test_rms_norm_under_autocast_or_of_bfloat16_computes_in_float32():
    torch.manual_seed(0)
    norm, x = nn.RMSNorm(48, eps=1e-6), torch.randn(16, 48, 48).bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.float32 and torch.equal(found, norm(x.float()))
    norm, x = nn.RMSNorm(48, eps=1e-6).bfloat16(), drawn(16, 48)
    assert torch.equal(norm(x), torch.nn.RMSNorm(48, eps=1e-6)(x))
