"""Held-out samples cover the way from data to noise evenly, whatever the objective and its law of training times."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig, GaussianDiffusionConfig
from mindspeed_mm_dit.data.order import VALIDATION_START
from mindspeed_mm_dit.objectives.registry import NOISE_LEVEL, training_draw, validation_draw
from mindspeed_mm_dit.training.log import sums_by_quarter

CONFIGS = {
    "gaussian": GaussianDiffusionConfig(),
    "flow": FlowMatchingConfig(),
    "flow, times by another law": FlowMatchingConfig(timestep_sampling="logit_normal", shift=3.0),
    "flow without ends": FlowMatchingConfig(path="vp", prediction_type="noise", loss_weight="velocity"),
}
SHAPE = (1, 2, 2)


def held_out(config, first, count):
    return validation_draw(config)(7, np.arange(first, first + count) + VALIDATION_START, SHAPE)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_quarter_has_as_many_samples_as_any_other(name):
    for count in (4, 12, 100):
        noise_levels = held_out(CONFIGS[name], 0, count)[NOISE_LEVEL]
        np.testing.assert_array_equal(sums_by_quarter(np.ones(count), noise_levels)[1], [count / 4] * 4)
        assert noise_levels.min() > 0 and noise_levels.max() < 1  # at the ends a path or a weight may be singular


@pytest.mark.parametrize("name", CONFIGS)
def test_held_out_batches_cut_anywhere_are_one_and_as_training_s_with_shares(name):
    whole = held_out(CONFIGS[name], 0, 12)
    parts = [held_out(CONFIGS[name], first, count) for first, count in ((0, 5), (5, 1), (6, 6))]
    for key, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), array, err_msg=key)
    trained = training_draw(CONFIGS[name])(7, np.arange(4) + VALIDATION_START, SHAPE)
    found = held_out(CONFIGS[name], 0, 4)
    np.testing.assert_array_equal(found["noise"], trained["noise"])
    assert found.pop(NOISE_LEVEL).dtype == np.float32
    kinds = [{name: (array.shape, array.dtype) for name, array in batch.items()} for batch in (found, trained)]
    assert kinds[0] == kinds[1]


def test_share_of_noise_is_t_over_T_of_gaussian_one_minus_t_of_flow():
    """As many samples as there are timesteps draw each of them once."""
    found = held_out(GaussianDiffusionConfig(num_train_timesteps=64), 0, 64)
    np.testing.assert_array_equal(found["timesteps"], np.floor(found[NOISE_LEVEL] * 64))
    assert sorted(found["timesteps"]) == list(range(64))
    for name in ("flow", "flow, times by another law"):
        found = held_out(CONFIGS[name], 0, 64)
        np.testing.assert_array_equal(found["timesteps"], 1 - found[NOISE_LEVEL])
    ends = held_out(CONFIGS["flow without ends"], 0, 64)
    np.testing.assert_allclose(ends["timesteps"], 1 - ends[NOISE_LEVEL], atol=2e-5)
    assert np.isfinite(ends["coefficients"]).all()
