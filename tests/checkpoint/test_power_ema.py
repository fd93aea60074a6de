"""Power-function averages: what each step counts, and how any width is put together from those that were kept."""

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.power_ema import MAX_STD, EmaProfile, gamma_of_std, is_std_list, solve_coefficients
from mindspeed_mm_dit.errors import ConfigError


def counted(profile):
    """What steps 1 to profile.step count, by the integral over each."""
    return np.diff((np.arange(profile.step + 1) / profile.step) ** (gamma_of_std(profile.std) + 1))


def kept_every(steps, last, stds=(0.05, 0.1)):
    return [EmaProfile(step, std) for step in range(steps, last + 1, steps) for std in stds]


def test_exponents_are_those_published():
    assert gamma_of_std(0.05) == pytest.approx(16.97, abs=5e-3) and gamma_of_std(0.1) == pytest.approx(6.94, abs=5e-3)
    assert gamma_of_std(MAX_STD) == pytest.approx(0, abs=1e-9)
    for std in (0.001, 0.02, 0.1, 0.25, MAX_STD):
        middles, weights = (np.arange(100_000) + 0.5) / 100_000, counted(EmaProfile(100_000, std))
        mean = weights @ middles
        assert np.sqrt(weights @ (middles - mean) ** 2) == pytest.approx(std, rel=1e-5)
    for std in (0.0009, 0.29, 0, -0.1, float("nan")):
        pytest.raises(ValueError, gamma_of_std, std).match("the plain mean of all steps")


@pytest.mark.parametrize("std", [0.001, 0.05, 0.1, MAX_STD])
def test_step_by_step_each_step_counts_what_it_should(std):
    gamma, found = gamma_of_std(std), np.zeros(0)
    for step in range(1, 51):
        moved = power_ema.decay_weight(step, gamma)
        found = np.append(found * (1 - moved), moved)
    np.testing.assert_allclose(found, counted(EmaProfile(50, std)), rtol=1e-9, atol=1e-16)


def test_kept_widths_are_taken_as_they_are_and_factors_sum_to_one():
    factors, error = solve_coefficients(kept_every(10, 40), EmaProfile(40, 0.1))
    assert factors.tolist() == [0, 0, 0, 0, 0, 0, 0, 1] and error == 0
    factors, error = solve_coefficients([EmaProfile(7, 0.1)], EmaProfile(7, 0.05))
    assert factors.tolist() == [1] and error > 0.3
    factors, error = solve_coefficients(kept_every(1, 30, stds=(0.1,)), EmaProfile(30, 0.2))
    assert error < 1e-12 and factors.sum() == pytest.approx(1)
    # As the sum of the factors is one; the least squares alone would give 0.85 of them here.
    factors, error = solve_coefficients([EmaProfile(100, 0.05), EmaProfile(100, 0.1)], EmaProfile(100, 0.15))
    assert factors.sum() == pytest.approx(1, abs=1e-15) and error == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("std", [0.02, 0.07, 0.15, 0.25])
@pytest.mark.parametrize(("every", "last", "close"), [(1, 40, 1e-12), (2, 40, 0.1), (20, 1000, 0.1), (800, 4e4, 0.04)])
def test_other_widths_are_as_close_as_is_said(std, every, last, close):
    kept, last = kept_every(every, int(last)), int(last)
    factors, error = solve_coefficients(kept, EmaProfile(last, std))
    wanted = counted(EmaProfile(last, std))
    found = sum(f * np.pad(counted(p), (0, last - p.step)) for f, p in zip(factors, kept, strict=True))
    assert factors.sum() == pytest.approx(1, abs=1e-12)
    assert error == pytest.approx(np.linalg.norm(found - wanted) / np.linalg.norm(wanted), rel=0.02, abs=1e-12)
    assert error < close


def test_widths_lie_within_their_range_and_are_those_of_the_checkpoint():
    assert is_std_list([]) and is_std_list([0.001, 0.05, 0.28, MAX_STD])
    for wrong in ((0.05,), [0.0009], [0.05, 0.29], [True], ["0.05"], None):
        assert not is_std_list(wrong), wrong
    for asked, kept in (([0.05, 0.1], (0.05, 0.1)), ([0.05], []), ([], [0.05])):
        power_ema.check_stds(asked, kept, "here")
    refused = pytest.raises(ConfigError, power_ema.check_stds, [0.05], [0.1, 0.2], "here")
    refused.match("--power-ema-stds = 0.05.* 0.1 0.2")
    assert power_ema.tree_names(2) == ["power_ema_1", "power_ema_2"]
