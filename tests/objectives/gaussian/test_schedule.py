import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.gaussian.process import (
    TABLES,
    GaussianDiffusion,
    discretized_gaussian_log_likelihood,
    gaussian_kl,
)
from mindspeed_mm_dit.objectives.gaussian.schedule import Schedule, make_betas, respaced_steps


def test_tables_and_respacing_are_the_published_ones(golden):
    schedule = Schedule.create("linear", 1000)
    for name in [key for key in golden if key.startswith("table/")]:
        np.testing.assert_allclose(getattr(schedule, name[6:]), golden[name], rtol=1e-12, atol=1e-15)
    for respacing in ("10", "ddim10"):
        np.testing.assert_array_equal(respaced_steps(1000, respacing), golden[f"timestep_map/{respacing}"])
    steps = respaced_steps(300, "10,15,20")
    assert [((steps >= low) & (steps < low + 100)).sum() for low in (0, 100, 200)] == [10, 15, 20]


@pytest.mark.parametrize("noise_schedule", ["linear", "squaredcos_cap_v2"])
def test_a_respaced_chain_keeps_the_marginals(noise_schedule):
    schedule = Schedule.create(noise_schedule, 1000)
    steps = respaced_steps(1000, "37")
    np.testing.assert_allclose(schedule.respaced(steps).alphas_cumprod, schedule.alphas_cumprod[steps], rtol=1e-10)
    schedule = Schedule.create(noise_schedule, 100)
    np.testing.assert_allclose(schedule.respaced(respaced_steps(100, "100")).betas, schedule.betas, rtol=1e-10)


def test_the_cosine_schedule_follows_its_formula():
    alphas_cumprod = np.cumprod(1 - make_betas("squaredcos_cap_v2", 1000))
    t = np.arange(1, 1001) / 1000
    expected = np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2 / np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(alphas_cumprod[:-2], expected[:-2], rtol=1e-9)  # the last steps are capped


def test_every_table_is_its_formula():
    """Ho et al. 2020, eqs. 4 and 7, term by term; the second posterior variance stands for the first, which is 0."""
    schedule = Schedule.create("linear", 30)
    beta = schedule.betas
    signal = np.array([np.prod(1 - beta[: t + 1]) for t in range(30)])
    before = np.concatenate([[1.0], signal[:-1]])
    posterior = beta * (1 - before) / (1 - signal)
    expected = {
        "alphas_cumprod": signal,
        "alphas_cumprod_prev": before,
        "sqrt_alphas_cumprod": signal**0.5,
        "sqrt_one_minus_alphas_cumprod": (1 - signal) ** 0.5,
        "sqrt_recip_alphas_cumprod": signal**-0.5,
        "sqrt_recipm1_alphas_cumprod": ((1 - signal) / signal) ** 0.5,
        "posterior_variance": posterior,
        "posterior_log_variance_clipped": np.log([posterior[1], *posterior[1:]]),
        "log_betas": np.log(beta),
        "fixed_large_log_variance": np.log([posterior[1], *beta[1:]]),
        "posterior_mean_coef1": before**0.5 * beta / (1 - signal),
        "posterior_mean_coef2": (1 - beta) ** 0.5 * (1 - before) / (1 - signal),
    }
    assert set(TABLES) < set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(schedule, name), values, rtol=1e-10, atol=1e-15, err_msg=name)


def test_a_step_of_the_solver_is_measured_in_half_log_signal_to_noise():
    """Lu et al. 2022, eq. 9, for a constant x_0: x_{t-1} = (sigma' / sigma) x_t + alpha' (1 - exp(-h)) x_0."""
    schedule = Schedule.create("linear", 50)
    alpha, sigma = schedule.sqrt_alphas_cumprod, schedule.sqrt_one_minus_alphas_cumprod
    for index in (1, 20, 49):
        h = np.log(alpha[index - 1] / sigma[index - 1]) - np.log(alpha[index] / sigma[index])
        expected = sigma[index - 1] / sigma[index], alpha[index - 1] * (1 - np.exp(-h)), h
        np.testing.assert_allclose(schedule.solution_weights(index), expected, rtol=1e-9)
    assert schedule.solution_weights(0) == (0.0, 1.0, np.inf)


def test_short_chains_have_the_variances_of_their_steps():
    """Of the first step of a chain the posterior variance is zero, and the second stands for it."""
    one = Schedule.create("linear", 1000).respaced(np.array([400]))
    for table in ("posterior_log_variance_clipped", "fixed_large_log_variance"):
        np.testing.assert_allclose(getattr(one, table), np.log(one.betas))
    assert len(one) == 1 and one.timestep_map.tolist() == [400]
    two = Schedule.create("linear", 1000).respaced(np.array([200, 400]))
    second = np.log(two.posterior_variance[1])
    np.testing.assert_allclose(two.posterior_log_variance_clipped, [second, second])
    np.testing.assert_allclose(two.fixed_large_log_variance, [second, np.log(two.betas[1])])


@pytest.mark.parametrize(("noise_schedule", "steps"), [("linear", 21), ("squaredcos_cap_v2", 2)])
def test_the_shortest_chains_that_are_allowed_have_finite_tables(noise_schedule, steps):
    schedule = Schedule.create(noise_schedule, steps)
    for table in TABLES:
        assert np.isfinite(getattr(schedule, table)).all() and len(getattr(schedule, table)) == steps


def test_the_posterior_is_bayes_rule():
    """q(x_{t-1} | x_t, x_0) from the joint of two Gaussians, in closed form."""
    schedule = Schedule.create("linear", 50)
    t = 20
    prior_variance = 1 - schedule.alphas_cumprod_prev[t]
    precision = 1 / prior_variance + (1 - schedule.betas[t]) / schedule.betas[t]
    assert schedule.posterior_variance[t] == pytest.approx(1 / precision, rel=1e-12)
    weight_of_x0 = np.sqrt(schedule.alphas_cumprod_prev[t]) / prior_variance / precision
    assert schedule.posterior_mean_coef1[t] == pytest.approx(weight_of_x0, rel=1e-12)


def test_impossible_respacing_is_refused():
    for respacing in ("0", "-1", "1001", "ddim0", "ddim300", "ddim1001", "ten", "400,700,5", "335,1,1", ""):
        with pytest.raises(ConfigError):
            respaced_steps(1000, respacing)


@pytest.mark.parametrize(("respacing", "steps"), [
    ("1", [0]), ("2", [0, 999]), ("ddim1", [0]), ("ddim2", [0, 500]), ("ddim1000", range(1000)),
    ("1000", range(1000)), ("334,1,1", [*range(334), 334, 667]), ("1,1,2", [0, 334, 667, 999]),
])  # fmt: skip
def test_chains_reach_from_one_step_to_all_there_are(respacing, steps):
    chosen = respaced_steps(1000, respacing)
    assert chosen.tolist() == list(steps) and chosen.dtype == np.int64


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
    x_t = diffusion.add_noise(x_start, T, noise)
    perfect = {"epsilon": noise, "sample": x_start, "v_prediction": diffusion.velocity(x_start, T, noise)}
    assert diffusion.loss(perfect[prediction_type], x_start, x_t, T, noise).abs().max() == 0
    recovered = diffusion.predict(perfect[prediction_type], x_t, T).x_start[:3]
    torch.testing.assert_close(recovered, x_start[:3], rtol=0, atol=1e-4)
    torch.testing.assert_close(diffusion.epsilon_from_x_start(x_t, T, x_start)[1:], noise[1:], rtol=0, atol=2e-4)


def test_the_bound_does_not_train_the_mean(batch):
    x_start, noise = batch
    diffusion = process()
    x_t = diffusion.add_noise(x_start, T, noise)
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


def test_losses_have_closed_forms():
    zero, log_variance = torch.zeros(2, 5), torch.randn(2, 5)
    assert gaussian_kl(zero, log_variance, log_variance).abs().max() < 1e-6
    torch.testing.assert_close(gaussian_kl(zero + 3, zero, zero), torch.full((2, 5), 4.5))
    values = torch.linspace(-1, 1, 256)
    log_likelihood = discretized_gaussian_log_likelihood(values, values - 0.1, torch.tensor(-1.5))
    assert log_likelihood.exp().sum().item() == pytest.approx(1.0, abs=1e-4)


def test_x_t_is_the_published_one(golden):
    x_t = process().add_noise(*(torch.from_numpy(golden[key]) for key in ("x0", "t", "noise")))
    np.testing.assert_allclose(x_t.numpy(), golden["x_t"], rtol=1e-6, atol=1e-6)
