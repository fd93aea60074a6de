"""Solvers against equations whose solution is known: order, steps of dopri5, samplers as sampling asks them."""

import numpy as np
import pytest
from scipy.integrate import RK45

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.flow.objective import FLOW_MATCHING
from mindspeed_mm_dit.objectives.flow.path import PATHS
from mindspeed_mm_dit.tools.verify.table import relative_error

START = np.random.default_rng(0).standard_normal((4, 2, 3, 3)).astype(np.float32)


@pytest.fixture
def flow(framework):
    """The module of solvers."""
    from mindspeed_mm_dit.objectives.flow import solvers

    return solvers


def gaussian_velocity(path, spread=2.0):
    """The velocity of data N(0, spread^2), under which every x_t is x_0 times the standard deviation at t."""

    def velocity(x, t):
        from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

        point = PATHS[path](t)
        variance = spread**2 * point.alpha**2 + point.sigma**2
        slope = spread**2 * point.alpha * point.d_alpha + point.sigma * point.d_sigma
        return per_sample_factor(slope / variance, x) * x

    return velocity


def errors(framework, solvers, step, counts):
    ends = []
    for steps in counts:
        start, times = framework.ops.tensor(START), np.linspace(0, 1, steps + 1)
        *_, end = solvers.integrate(step, gaussian_velocity("linear"), start, times)
        ends.append(relative_error(framework.ops.numpy(end), 2 * START))
    return np.array(ends)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2)])
def test_the_error_of_a_fixed_grid_falls_with_the_order_of_the_solver(framework, flow, name, order):
    found = errors(framework, flow, getattr(flow, name), (10, 20, 40))
    np.testing.assert_allclose(np.log2(found[:-1] / found[1:]), order, atol=0.2)


def test_dopri5_ends_within_its_tolerance_at_every_time(framework, flow):
    times = np.array([0.0, 0.3, 1.0])
    x = framework.ops.tensor(START)
    for rtol in (1e-3, 1e-5):
        half, end = flow.dopri5(gaussian_velocity("gvp"), x, times, rtol=rtol, atol=1e-8)
        point = PATHS["gvp"](times[1:2])
        spread = np.sqrt(4 * point.alpha**2 + point.sigma**2)
        assert relative_error(framework.ops.numpy(half), spread * START) < rtol
        assert relative_error(framework.ops.numpy(end), 2 * START) < rtol


def test_the_steps_of_dopri5_do_not_depend_on_the_other_samples(framework, flow):
    def stiff_for_some(x, t):
        from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

        return per_sample_factor(np.array([1.0, 30.0, 3.0, 100.0])[: x.shape[0]], x) * -x

    def end(start):
        (state,) = flow.dopri5(stiff_for_some, framework.ops.tensor(start), np.array([0.0, 1.0]))
        return framework.ops.numpy(state)

    np.testing.assert_array_equal(end(START)[:2], end(START[:2]))


def test_times_may_fall_so_that_data_go_back_to_their_noise(framework, flow):
    solvers = flow
    velocity, grid = gaussian_velocity("gvp"), np.linspace(0, 1, 201)
    *_, data = solvers.integrate(solvers.heun, velocity, framework.ops.tensor(START), grid)
    *_, noise = solvers.integrate(solvers.heun, velocity, data, grid[::-1])
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
    solvers, ops, draw = flow, framework.ops, np.random.default_rng(1)
    velocity = gaussian_velocity("linear")

    def fields(x, t):
        from mindspeed_mm_dit.objectives.flow.process import per_sample_factor

        point = PATHS["linear"](t)
        return velocity(x, t), per_sample_factor(-1 / (4 * point.alpha**2 + point.sigma**2), x) * x

    equation = solvers.Sde(fields, PATHS["linear"], solvers.DiffusionCoefficient(form, last_step=last_step))
    times = np.linspace(0, 1 if last_step is None else 0.96, 61)
    noise = lambda step: ops.tensor(draw.standard_normal((1, 16_000)).astype(np.float32))  # noqa: E731
    *_, end = solvers.integrate_sde(solvers.sde_heun, equation, noise(0), times, noise)
    assert ops.numpy(end).std() == pytest.approx(2.0, rel=0.04)


def test_heun_step_of_sde_is_its_second_order_series(framework, flow):
    solvers, x, t = flow, framework.ops.tensor(START), np.full(len(START), 0.5)
    equation = solvers.Sde(lambda x, _: (-x, 0 * x), PATHS["linear"], solvers.DiffusionCoefficient())
    stepped = framework.ops.numpy(solvers.sde_heun(equation, x, t, 0.1, 0 * x))
    np.testing.assert_allclose(stepped, (1 - 0.1 + 0.1**2 / 2) * START, rtol=1e-6)


def test_impossible_diffusion_and_tolerances_of_float32_are_refused(flow):
    options = FLOW_MATCHING.samplers["dopri5"].options
    options(rtol=1.0, atol=1e-7)
    for made, setting, value in (
        (flow.DiffusionCoefficient, "norm", -1),
        (flow.DiffusionCoefficient, "last_step_size", 0.0),
        (flow.DiffusionCoefficient, "last_step_size", 1.0),
        (options, "rtol", 0.0),
        (options, "atol", 2.0),
    ):
        with pytest.raises(ConfigError, match=f"--{setting.replace('_', '-')} = "):
            made(**{setting: value})


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
        found = flow.DiffusionCoefficient(form, norm=3.0).at(t, point)
        np.testing.assert_allclose(found, wanted, atol=1e-15, err_msg=form)
    inner = PATHS["linear"](t[1:])
    np.testing.assert_allclose(flow.DiffusionCoefficient("SBDM", norm=3.0).at(t[1:], inner), 3 * (1 / t[1:] - 1))


def test_last_step_of_an_sde_is_its_formula(framework, flow):
    ops, at = framework.ops, np.full(4, 0.8)
    x, velocity, score = START, START[::-1].copy(), START**2
    for kind, wanted in {
        "Mean": x + 0.1 * (velocity + 2 * 0.2 * score),
        "Euler": x + 0.1 * velocity,
        "Tweedie": (x + 0.2**2 * score) / 0.8,
    }.items():
        diffusion = flow.DiffusionCoefficient("linear", norm=2.0, last_step=kind, last_step_size=0.1)
        equation = flow.Sde(lambda x, t: (ops.tensor(velocity), ops.tensor(score)), PATHS["linear"], diffusion)
        np.testing.assert_allclose(ops.numpy(equation.last(ops.tensor(x), at)), wanted, rtol=1e-5, atol=1e-6)


FIRST = 0.02
"""The first step of a way from 0 to 1."""
NODES = 4 / 5
"""From the first time that a step asks for, h / 5 on, to its last, h on."""


@pytest.fixture
def attempts(framework):
    """Return the steps that dopri5 tries, as pairs of start and length; ``first_error``: of the first, in tolerances.

    Of dx/dt = k t^4 only the fifth order is exact: the two orders differ by 71/270000 k h^5, wherever the step is.
    """
    from mindspeed_mm_dit.objectives.flow import solvers

    def tried(first_error, times=(0.0, 1.0), most=4):
        factor, asked = first_error / (71 / 270000 * FIRST**5), []

        def velocity(x, t):
            asked.append(float(t[0]))
            if len(asked) > 1 + 6 * most:
                raise StopIteration
            return x * 0 + framework.ops.tensor((factor * t**4).astype(np.float32).reshape(-1, 1))

        x = framework.ops.tensor(np.zeros((1, 3), np.float32))
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(solvers.dopri5(velocity, x, np.array(times), rtol=0.0, atol=1.0))
        steps = np.array(asked[1 : 1 + 6 * most]).reshape(most, 6)
        lengths = (steps[:, -1] - steps[:, 0]) / NODES
        return np.stack([steps[:, -1] - lengths, lengths], 1)

    return tried


def test_the_table_of_nodes_and_weights_is_scipys(framework):
    from mindspeed_mm_dit.objectives.flow import solvers

    np.testing.assert_allclose(solvers._NODES, [*RK45.C[1:], 1], rtol=1e-15)
    for number, weights in enumerate(solvers._STAGES[:-1], 1):
        np.testing.assert_allclose(weights, RK45.A[number, :number], rtol=1e-15)
    np.testing.assert_allclose(solvers._STAGES[-1], RK45.B, rtol=1e-15)
    np.testing.assert_allclose(np.abs(solvers._ERROR), np.abs(RK45.E), rtol=1e-15)
    assert np.isclose(sum(solvers._ERROR), 0, atol=1e-15)


def test_step_is_kept_or_taken_back_by_its_error(attempts):
    length = FIRST * 0.9 * 20**-0.2  # whose error is 0.9^5 of the tolerance, so that every step to come is as long
    expected = [(0, FIRST), (0, length), (length, length), (2 * length, length)]
    np.testing.assert_allclose(attempts(20.0), expected, rtol=1e-3, atol=1e-6)
    (_, _), (beyond, _) = attempts(1.05, most=2)
    (_, _), (within, shorter) = attempts(0.95, most=2)
    assert abs(beyond) < 1e-6 and within == pytest.approx(FIRST)
    assert shorter == pytest.approx(FIRST * 0.9 * 0.95**-0.2, rel=1e-4)  # for it was nearly too long


def test_next_step_is_a_fifth_to_five_times_and_not_cut_by_a_time(attempts):
    longer = FIRST * 0.9 * 0.01**-0.2
    for error, start, length in ((0.01, FIRST, longer), (1e-9, FIRST, 5 * FIRST), (1e6, 0, FIRST / 5)):
        np.testing.assert_allclose(attempts(error, most=2), [(0, FIRST), (start, length)], rtol=1e-3, atol=1e-6)
    found = attempts(0.5, times=(0.0, FIRST / 1000, 1.0), most=2)
    np.testing.assert_allclose(found, [(0, FIRST / 1000), (FIRST / 1000, FIRST)], rtol=1e-3, atol=1e-6)


def test_sample_that_is_not_finite_does_not_hold_up_the_others(framework):
    from mindspeed_mm_dit.objectives.flow import solvers

    start = framework.ops.tensor(np.array([[np.nan, 1], [1, 2]], np.float32))
    *_, end = solvers.dopri5(lambda x, t: -x, start, np.array([0.0, 1.0]))
    lost, found = framework.ops.numpy(end)
    assert np.isnan(lost[0])
    np.testing.assert_allclose(found, np.exp(-1) * np.array([1, 2]), rtol=1e-3)


THREE_STARTS = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
MANY_STEPS = 50
CONFIG = FlowMatchingConfig()


def end_of(framework, name, **given):
    """Walk from THREE_STARTS along the linear path to data N(0, 2^2), under which every x_t is a multiple of x_0."""
    sampler, ops = FLOW_MATCHING.samplers[name], framework.ops
    options, seen = sampler.options(**given), []

    def model_fn(x, t, shares):
        times = ops.numpy(t).astype(np.float64)
        np.testing.assert_allclose(shares, 1 - times, atol=1e-6)
        seen.extend(times)
        slope = (4 * times - (1 - times)) / (4 * times**2 + (1 - times) ** 2)
        return ops.tensor(slope.astype(np.float32).reshape(-1, 1, 1, 1)) * x

    def noise_at(step):
        return ops.tensor(np.zeros_like(THREE_STARTS))

    sampler.check(CONFIG, MANY_STEPS, options)
    built = FLOW_MATCHING.build(CONFIG)
    states = list(sampler.trajectory(built, model_fn, ops.tensor(THREE_STARTS), noise_at, MANY_STEPS, options))
    assert len(states) == MANY_STEPS and min(seen) < 0.01 and max(seen) <= 1
    return ops.numpy(states[-1])


@pytest.mark.parametrize(("name", "given", "tolerance"), [
    ("euler", {}, 0.03),
    ("heun", {}, 1e-3),
    ("dopri5", {"rtol": 1e-5}, 1e-4),
    ("sde-euler", {"norm": 0.0}, 0.05),
    ("sde-heun", {"norm": 0.0}, 0.05),
])  # fmt: skip
def test_the_walk_ends_at_the_spread_of_the_data(framework, name, given, tolerance):
    end = end_of(framework, name, **given)
    assert np.abs(end - 2 * THREE_STARTS).max() < tolerance * np.abs(2 * THREE_STARTS).max()


@pytest.mark.parametrize(("name", "steps", "last"), [("euler", 4, 1.0), ("sde-euler", 5, 0.96)])
def test_a_chain_is_shifted_by_the_size_of_its_latents(framework, name, steps, last):
    config = FlowMatchingConfig(shift_base=2)  # of 18 elements: a shift of 3
    sampler, start, seen = FLOW_MATCHING.samplers[name], framework.ops.tensor(THREE_STARTS), []

    def model_fn(x, t, shares):
        seen.append(float(framework.ops.numpy(t)[0]))
        return 0 * x

    list(sampler.trajectory(FLOW_MATCHING.build(config), model_fn, start, lambda step: start, steps, sampler.options()))
    even = np.linspace(0, 1, 5)[:steps]
    np.testing.assert_allclose(seen, last * even / (even + 3 * (1 - even)), rtol=1e-6)
