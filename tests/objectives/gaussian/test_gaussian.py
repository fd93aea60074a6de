import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.model import GaussianDiffusionConfig
from mindspeed_mm_dit.objectives.gaussian.process import (
    GaussianDiffusion,
    discretized_gaussian_log_likelihood,
    gaussian_kl,
)

T = torch.tensor([0, 1, 500, 999])


def process(prediction_type="epsilon", variance_type="learned_range", schedule="linear"):
    return GaussianDiffusion.from_config(
        GaussianDiffusionConfig(1000, schedule, prediction_type=prediction_type, variance_type=variance_type)
    )


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 4, 8, 8, generator=draw) for _ in range(2))


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_perfect_network_has_no_simple_loss_and_gives_back_x0(prediction_type, batch):
    x_start, noise = batch
    diffusion = process(prediction_type, "fixed_small")
    x_t = diffusion.noised(x_start, T, noise)
    perfect = {"epsilon": noise, "sample": x_start, "v_prediction": diffusion.velocity(x_start, T, noise)}
    assert diffusion.loss(perfect[prediction_type], x_start, x_t, T, noise).abs().max() == 0
    recovered = diffusion.predict(perfect[prediction_type], x_t, T).x_start[:3]
    torch.testing.assert_close(recovered, x_start[:3], rtol=0, atol=1e-4)
    torch.testing.assert_close(diffusion.epsilon_from_x_start(x_t, T, x_start)[1:], noise[1:], rtol=0, atol=2e-4)


def test_the_bound_does_not_train_the_mean(batch):
    x_start, noise = batch
    diffusion = process()
    x_t = diffusion.noised(x_start, T, noise)
    output = torch.zeros(4, 8, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(diffusion.variational_bound(output, x_start, x_t, T, noise).sum(), output)
    assert gradient[:, :4].abs().max() == 0
    assert gradient[:, 4:].abs().max() > 0


def test_the_learned_variance_runs_between_its_two_bounds(batch):
    x_t = batch[0]
    diffusion = process()
    for value, table in ((1.0, "log_betas"), (-1.0, "posterior_log_variance_clipped")):
        output = torch.cat([x_t, torch.full_like(x_t, value)], 1)
        expected = diffusion.at(table, T, x_t).expand_as(x_t)
        torch.testing.assert_close(diffusion.predict(output, x_t, T).log_variance, expected)


@pytest.mark.parametrize(
    ("variance_type", "table"),
    [("fixed_small", "posterior_log_variance_clipped"), ("fixed_large", "fixed_large_log_variance")],
)
def test_a_variance_that_is_not_learned_is_its_table(batch, variance_type, table):
    diffusion, x_t = process("epsilon", variance_type), batch[0]
    torch.testing.assert_close(diffusion.predict(x_t, x_t, T).log_variance, diffusion.at(table, T, x_t).expand_as(x_t))


def test_divergence_of_gaussians_is_half_the_squared_distance():
    zero, log_variance = torch.zeros(2, 5), torch.randn(2, 5)
    assert gaussian_kl(zero, log_variance, log_variance).abs().max() < 1e-6
    torch.testing.assert_close(gaussian_kl(zero + 3, zero, zero), torch.full((2, 5), 4.5))


def test_the_discretized_likelihood_sums_to_one_over_all_pixel_values():
    values = torch.linspace(-1, 1, 256)
    log_likelihood = discretized_gaussian_log_likelihood(values, values - 0.1, torch.tensor(-1.5))
    assert log_likelihood.exp().sum().item() == pytest.approx(1.0, abs=1e-4)


def test_x_t_is_the_published_one(golden):
    x_t = process().noised(*(torch.from_numpy(golden[key]) for key in ("x0", "t", "noise")))
    np.testing.assert_allclose(x_t.numpy(), golden["x_t"], rtol=1e-6, atol=1e-6)
