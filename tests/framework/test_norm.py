"""Under autocast norms compute in float32, and the gradients of their weights are sums in float32."""

import pytest

torch = pytest.importorskip("torch")


def test_what_cancels_in_the_gradient_of_a_norms_bias_is_not_lost_under_autocast():
    from mindspeed_mm_dit.framework.pytorch.nn import LayerNorm

    torch.manual_seed(0)
    norm, x = LayerNorm(48, eps=1e-5), torch.randn(16, 48, 48).bfloat16()
    given = torch.randn(16, 48, 48)
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    out.backward(given.to(out.dtype))
    wanted = given.double().sum((0, 1))
    # PyTorch's own kernel, given bfloat16, is off by 2.6e-2 here.
    assert (norm.bias.grad - wanted).norm() < 1e-5 * wanted.norm()


def test_a_norm_without_weights_keeps_the_precision_of_what_it_is_given():
    from mindspeed_mm_dit.framework.pytorch.nn import LayerNorm

    assert LayerNorm(8, elementwise_affine=False)(torch.ones(2, 8).bfloat16()).dtype == torch.bfloat16


def test_an_rmsnorm_under_autocast_is_that_of_float32_to_the_bit():
    from mindspeed_mm_dit.framework.pytorch.nn import RMSNorm

    torch.manual_seed(0)
    norm, x = RMSNorm(48, eps=1e-6), torch.randn(16, 48, 48).bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.float32 and torch.equal(found, norm(x.float()))


def test_an_rmsnorm_of_bfloat16_does_not_round_what_it_is_given():
    from mindspeed_mm_dit.framework.pytorch.nn import RMSNorm

    norm, x = RMSNorm(48, eps=1e-6).bfloat16(), torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(norm(x), torch.nn.RMSNorm(48, eps=1e-6)(x))
