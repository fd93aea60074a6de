"""Each sampler of the records, asked as sampling asks it, ends where the equation of Gaussian data ends."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.flow.objective import FLOW_MATCHING

START = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
STEPS = 50
CONFIG = FlowMatchingConfig()


def end_of(framework, name, **given):
    """Walk from START along the linear path to data N(0, 2^2), under which every x_t is a multiple of x_0."""
    sampler, ops = FLOW_MATCHING.samplers[name], framework.ops
    options, seen = sampler.options(**given), []

    def model_fn(x, t, shares):
        times = ops.numpy(t).astype(np.float64)
        np.testing.assert_allclose(shares, 1 - times, atol=1e-6)
        seen.extend(times)
        slope = (4 * times - (1 - times)) / (4 * times**2 + (1 - times) ** 2)
        return ops.tensor(slope.astype(np.float32).reshape(-1, 1, 1, 1)) * x

    def noise_at(step):
        return ops.tensor(np.zeros_like(START))

    sampler.check(CONFIG, STEPS, options)
    states = list(
        sampler.trajectory(FLOW_MATCHING.build(CONFIG), model_fn, ops.tensor(START), noise_at, STEPS, options)
    )
    assert len(states) == STEPS and min(seen) < 0.01 and max(seen) <= 1
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
    assert np.abs(end - 2 * START).max() < tolerance * np.abs(2 * START).max()


@pytest.mark.parametrize(("name", "steps", "last"), [("euler", 4, 1.0), ("sde-euler", 5, 0.96)])
def test_a_chain_is_shifted_by_the_size_of_its_latents(framework, name, steps, last):
    config = FlowMatchingConfig(shift_base=2)  # of 18 elements: a shift of 3
    sampler, start, seen = FLOW_MATCHING.samplers[name], framework.ops.tensor(START), []

    def model_fn(x, t, shares):
        seen.append(float(framework.ops.numpy(t)[0]))
        return 0 * x

    list(sampler.trajectory(FLOW_MATCHING.build(config), model_fn, start, lambda step: start, steps, sampler.options()))
    even = np.linspace(0, 1, 5)[:steps]
    np.testing.assert_allclose(seen, last * even / (even + 3 * (1 - even)), rtol=1e-6)


@pytest.mark.parametrize("given", [{"rtol": 0.0}, {"atol": 2.0}])
def test_tolerances_that_float32_does_not_keep_are_refused(given):
    with pytest.raises(ConfigError, match=f"--{next(iter(given))} = "):
        FLOW_MATCHING.samplers["dopri5"].options(**given)
    FLOW_MATCHING.samplers["dopri5"].options(rtol=1.0, atol=1e-7)
