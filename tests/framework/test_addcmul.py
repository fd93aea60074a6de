"""x + y * z: values, gradients and derivatives are PyTorch's own, to the bit."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad

from mindspeed_mm_dit.framework.pytorch.nn import _AddCMul

SHAPES = [
    ((2, 3, 4), (2, 3, 4), (2, 1, 4)), ((2, 1, 4), (2, 3, 4), (2, 1, 4)), ((4,), (2, 3, 4), (1, 3, 1)),
    ((2, 1, 1), (2, 1, 4), (2, 3, 4)),
]  # fmt: skip
FLOAT, HALF = torch.float32, torch.bfloat16


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
def test_values_and_gradients_are_those_of_pytorch(shapes):
    dtypes = ((FLOAT, FLOAT, FLOAT), (HALF, FLOAT, HALF), (FLOAT, HALF, FLOAT))
    asked = ((True, True, True), (True, False, True), (False, True, False))
    for case in itertools.product(dtypes, asked, (False, True)):
        found, wanted = (gradients(f, shapes, *case) for f in (_AddCMul.apply, torch.addcmul))
        for one, other in zip(found, wanted, strict=True):
            assert one is other is None or (one.dtype == other.dtype and torch.equal(one, other)), case


@pytest.mark.parametrize("shapes", SHAPES)
def test_derivatives_along_tangents_are_those_of_pytorch(shapes):
    def derivative(function, moved):
        with torch.no_grad(), forward_ad.dual_level():
            given = inputs(shapes, [FLOAT] * 3)
            given = [forward_ad.make_dual(x, x.sin()) if n in moved else x for n, x in enumerate(given)]
            return forward_ad.unpack_dual(function(*given)).tangent

    for moved in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        found, wanted = (derivative(function, moved) for function in (_AddCMul.apply, torch.addcmul))
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7), moved


def test_what_no_gradient_needs_is_not_kept():
    x, y, z = inputs(SHAPES[0], [FLOAT] * 3)
    kept = _AddCMul.apply(x.requires_grad_(), y.requires_grad_(), z).grad_fn.saved_tensors
    assert kept[0] is None and kept[1] is z
