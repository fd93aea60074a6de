"""A linear layer by oneDNN is PyTorch's to rounding, gradients too, and steps aside where PyTorch does more."""

import pytest

torch = pytest.importorskip("torch")

from mindspeed_mm_dit.framework.pytorch import nn  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def products(monkeypatch):
    """Take oneDNN whatever the CPU; return the list of its products' shapes."""
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
def test_values_and_gradients_are_those_of_float64(products, shape, has_bias):
    given = (drawn(*shape), drawn(4, 7), drawn(4) if has_bias else None)
    of_output = drawn(*shape[:-1], 4)

    def computed(product, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given if x is not None]
        y = product(*leaves)
        return [y, *torch.autograd.grad(y, leaves, of_output.to(dtype))]

    ours = computed(nn.linear, torch.float32)
    exact = computed(torch.nn.functional.linear, torch.float64)
    assert len(products) == (3 if 0 not in shape else 0)
    for found, expected in zip(ours, exact, strict=True):
        assert found.shape == expected.shape and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)


def test_tensors_may_lie_in_any_order(products):
    x, weight = drawn(7, 5, 2).permute(2, 1, 0).requires_grad_(), drawn(7, 4).t().requires_grad_()
    y = nn.linear(x, weight)
    found = torch.autograd.grad(y, (x, weight), drawn(5, 2, 4).transpose(0, 1))
    theirs = torch.nn.functional.linear(x, weight)
    expected = torch.autograd.grad(theirs, (x, weight), drawn(5, 2, 4).transpose(0, 1))
    assert len(products) == 3
    for a, b in zip((y, *found), (theirs, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


def test_gradients_nobody_asked_for_are_not_computed(products):
    layer = nn.Linear(7, 4).requires_grad_(False)
    x = drawn(3, 7).requires_grad_()
    layer(x).sum().backward()
    assert len(products) == 2 and x.grad is not None


def test_other_precisions_devices_and_tensors_are_left_to_pytorch(products):
    from torch.distributed.tensor import DTensor

    layer, x = nn.Linear(7, 4), drawn(3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert layer.float().to("meta")(x.to("meta")).device.type == "meta"
    assert not nn._plain_float32(x, torch.Tensor._make_subclass(DTensor, x))
    assert not products
