"""Solvers against equations whose solution is known: their order, and what they must not depend on."""

import numpy as np
import pytest

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.flow.path import PATHS
from mindspeed_mm_dit.tools.verify.table import relative_error

START = np.random.default_rng(0).standard_normal((4, 2, 3, 3)).astype(np.float32)


@pytest.fixture
def flow(framework):
    """The modules of tensors: ode and sde."""
    from mindspeed_mm_dit.objectives.flow import ode, sde

    return ode, sde


def gaussian_velocity(path, spread=2.0):
    """The velocity of data N(0, spread^2), under which every x_t is x_0 times the standard deviation at t."""

    def velocity(x, t):
        from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

        point = PATHS[path](t)
        variance = spread**2 * point.alpha**2 + point.sigma**2
        return (
            per_sample_factor((spread**2 * point.alpha * point.d_alpha + point.sigma * point.d_sigma) / variance, x) * x
        )

    return velocity


def errors(framework, ode, step, counts):
    ends = []
    for steps in counts:
        *_, end = ode.integrate(
            step, gaussian_velocity("linear"), framework.ops.tensor(START), np.linspace(0, 1, steps + 1)
        )
        ends.append(relative_error(framework.ops.numpy(end), 2 * START))
    return np.array(ends)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2)])
def test_the_error_of_a_fixed_grid_falls_with_the_order_of_the_solver(framework, flow, name, order):
    found = errors(framework, flow[0], getattr(flow[0], name), (10, 20, 40))
    np.testing.assert_allclose(np.log2(found[:-1] / found[1:]), order, atol=0.2)


def test_dopri5_ends_within_its_tolerance_at_every_time(framework, flow):
    times = np.array([0.0, 0.3, 1.0])
    x = framework.ops.tensor(START)
    for rtol in (1e-3, 1e-5):
        half, end = flow[0].dopri5(gaussian_velocity("gvp"), x, times, rtol=rtol, atol=1e-8)
        point = PATHS["gvp"](times[1:2])
        spread = np.sqrt(4 * point.alpha**2 + point.sigma**2)
        assert relative_error(framework.ops.numpy(half), spread * START) < rtol
        assert relative_error(framework.ops.numpy(end), 2 * START) < rtol


def test_the_steps_of_dopri5_do_not_depend_on_the_other_samples(framework, flow):
    def stiff_for_some(x, t):
        from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

        return per_sample_factor(np.array([1.0, 30.0, 3.0, 100.0])[: x.shape[0]], x) * -x

    def end(start):
        (state,) = flow[0].dopri5(stiff_for_some, framework.ops.tensor(start), np.array([0.0, 1.0]))
        return framework.ops.numpy(state)

    np.testing.assert_array_equal(end(START)[:2], end(START[:2]))


def test_times_may_fall_so_that_data_go_back_to_their_noise(framework, flow):
    ode = flow[0]
    velocity, grid = gaussian_velocity("gvp"), np.linspace(0, 1, 201)
    *_, data = ode.integrate(ode.heun, velocity, framework.ops.tensor(START), grid)
    *_, noise = ode.integrate(ode.heun, velocity, data, grid[::-1])
    assert relative_error(framework.ops.numpy(noise), START) < 1e-4  # 200 steps of second order


@pytest.mark.parametrize(("form", "last_step"), [
    ("constant", "Mean"),
    ("sigma", "Tweedie"),
    ("linear", "Euler"),
    ("linear", None),
    ("decreasing", "Mean"),
    ("increasing-decreasing", "Tweedie"),
])  # fmt: skip
def test_sde_ends_with_the_spread_of_the_data(framework, flow, form, last_step):
    """16,000 numbers: a standard deviation is known to 0.6 %; 60 steps of first order and the last one add 3 %."""
    sde, ops, draw = flow[1], framework.ops, np.random.default_rng(1)
    velocity = gaussian_velocity("linear")

    def fields(x, t):
        from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

        point = PATHS["linear"](t)
        return velocity(x, t), per_sample_factor(-1 / (4 * point.alpha**2 + point.sigma**2), x) * x

    equation = sde.Sde(fields, PATHS["linear"], sde.DiffusionCoefficient(form, last_step=last_step))
    times = np.linspace(0, 1 if last_step is None else 0.96, 61)
    start = ops.tensor(draw.standard_normal((1, 16_000)).astype(np.float32))
    walked = sde.integrate(
        sde.heun, equation, start, times, lambda step: ops.tensor(draw.standard_normal((1, 16_000)).astype(np.float32))
    )
    *_, end = walked
    assert ops.numpy(end).std() == pytest.approx(2.0, rel=0.04)


def test_heun_step_of_sde_is_its_second_order_series(framework, flow):
    sde, x, t = flow[1], framework.ops.tensor(START), np.full(len(START), 0.5)
    equation = sde.Sde(lambda x, _: (-x, 0 * x), PATHS["linear"], sde.DiffusionCoefficient())
    stepped = framework.ops.numpy(sde.heun(equation, x, t, 0.1, 0 * x))
    np.testing.assert_allclose(stepped, (1 - 0.1 + 0.1**2 / 2) * START, rtol=1e-6)


def test_impossible_diffusion_is_refused(flow):
    for setting, value in (("norm", -1), ("last_step_size", 0.0), ("last_step_size", 1.0)):
        with pytest.raises(ConfigError, match=f"--{setting.replace('_', '-')}"):
            flow[1].DiffusionCoefficient(**{setting: value})


def test_each_form_of_diffusion_has_its_published_values(flow):
    t, point = np.array([0.0, 0.25, 0.5, 1.0]), PATHS["linear"](np.array([0.0, 0.25, 0.5, 1.0]))
    cos = np.cos(np.pi * t)
    for form, wanted in {
        "constant": np.full(4, 3.0),
        "sigma": 3 * (1 - t),
        "linear": 3 * (1 - t),
        "decreasing": (3 * cos + 1) ** 2 / 4,
        "increasing-decreasing": 3 * (1 - cos**2),
    }.items():
        np.testing.assert_allclose(
            flow[1].DiffusionCoefficient(form, norm=3.0).at(t, point), wanted, atol=1e-15, err_msg=form
        )
    inner = PATHS["linear"](t[1:])
    np.testing.assert_allclose(flow[1].DiffusionCoefficient("SBDM", norm=3.0).at(t[1:], inner), 3 * (1 / t[1:] - 1))


def test_last_step_of_an_sde_is_its_formula(framework, flow):
    ops, at = framework.ops, np.full(4, 0.8)
    x, velocity, score = START, START[::-1].copy(), START**2
    for kind, wanted in {
        "Mean": x + 0.1 * (velocity + 2 * 0.2 * score),
        "Euler": x + 0.1 * velocity,
        "Tweedie": (x + 0.2**2 * score) / 0.8,
    }.items():
        diffusion = flow[1].DiffusionCoefficient("linear", norm=2.0, last_step=kind, last_step_size=0.1)
        equation = flow[1].Sde(lambda x, t: (ops.tensor(velocity), ops.tensor(score)), PATHS["linear"], diffusion)
        np.testing.assert_allclose(ops.numpy(equation.last(ops.tensor(x), at)), wanted, rtol=1e-5, atol=1e-6)
