"""Which steps dopri5 takes, where the difference of its two orders is known in closed form.

Of dx/dt = k t^4 only the fifth order is exact: they differ by 71/270000 k h^5, wherever the step is.
"""

import numpy as np
import pytest
from scipy.integrate import RK45

FIRST = 0.02
"""The first step of a way from 0 to 1."""
NODES = 4 / 5
"""From the first time that a step asks for, h / 5 on, to its last, h on."""


@pytest.fixture
def attempts(framework):
    """Return the steps that are tried, as pairs of start and length; ``first_error``: of the first, in tolerances."""
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


def test_step_beyond_the_tolerance_is_taken_back(attempts):
    length = FIRST * 0.9 * 20**-0.2  # whose error is 0.9^5 of the tolerance, so that every step to come is as long
    expected = [(0, FIRST), (0, length), (length, length), (2 * length, length)]
    np.testing.assert_allclose(attempts(20.0), expected, rtol=1e-3, atol=1e-6)


def test_step_just_within_the_tolerance_is_kept(attempts):
    (_, _), (beyond, _) = attempts(1.05, most=2)
    (_, _), (within, shorter) = attempts(0.95, most=2)
    assert abs(beyond) < 1e-6 and within == pytest.approx(FIRST)
    assert shorter == pytest.approx(FIRST * 0.9 * 0.95**-0.2, rel=1e-4)  # for it was nearly too long


def test_next_step_is_at_most_five_times_and_at_least_a_fifth(attempts):
    longer = FIRST * 0.9 * 0.01**-0.2
    for error, start, length in ((0.01, FIRST, longer), (1e-9, FIRST, 5 * FIRST), (1e6, 0, FIRST / 5)):
        np.testing.assert_allclose(attempts(error, most=2), [(0, FIRST), (start, length)], rtol=1e-3, atol=1e-6)


def test_step_cut_short_by_a_time_does_not_shorten_the_next(attempts):
    found = attempts(0.5, times=(0.0, FIRST / 1000, 1.0), most=2)
    np.testing.assert_allclose(found, [(0, FIRST / 1000), (FIRST / 1000, FIRST)], rtol=1e-3, atol=1e-6)


def test_sample_that_is_not_finite_does_not_hold_up_the_others(framework):
    from mindspeed_mm_dit.objectives.flow import solvers

    start = framework.ops.tensor(np.array([[np.nan, 1], [1, 2]], np.float32))
    *_, end = solvers.dopri5(lambda x, t: -x, start, np.array([0.0, 1.0]))
    lost, found = framework.ops.numpy(end)
    assert np.isnan(lost[0])
    np.testing.assert_allclose(found, np.exp(-1) * np.array([1, 2]), rtol=1e-3)
