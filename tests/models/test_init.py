"""Initial weights: functions of the seed and the name alone, of the spread that their rule says."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.predictor import ONES, XAVIER_UNIFORM, ZEROS, Normal, Parameter, Parameters
from mindspeed_mm_dit.models.init import initial_value, initial_weights

LARGE_SEEDS = (2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1)
TABLE = Parameter((500, 200), Normal(0.02))


def test_they_depend_on_seed_and_name_alone():
    fc1 = {"weight": Parameter((8, 4), XAVIER_UNIFORM), "bias": Parameter((8,))}
    whole, two = (
        {"table": TABLE} | {f"blocks.{i}.fc1.{kind}": p for i in range(n) for kind, p in fc1.items()} for n in (3, 2)
    )
    names, whole = list(whole), initial_weights(Parameters(whole), 1)
    assert list(whole) == names
    for name, parameter in two.items():
        np.testing.assert_array_equal(initial_value(name, parameter, 1), whole[name])
        assert parameter.initial is ZEROS or not np.array_equal(initial_value(name, parameter, 2), whole[name])
    assert not np.array_equal(whole["blocks.0.fc1.weight"], whole["blocks.1.fc1.weight"])


def test_neighbouring_seeds_of_64_bits_draw_other_weights():
    drawn = {initial_value("table", Parameter((1, 2), Normal(1.0)), seed).tobytes() for seed in LARGE_SEEDS}
    assert len(drawn) == len(LARGE_SEEDS)


def test_each_rule_is_what_it_says():
    xavier = initial_value("w", Parameter((600, 200), XAVIER_UNIFORM), 0)
    assert abs(xavier).max() <= (6 / 800) ** 0.5 and xavier.std() == pytest.approx((2 / 800) ** 0.5, rel=0.01)
    patches = initial_value("w", Parameter((600, 50, 2, 2), XAVIER_UNIFORM), 0)
    np.testing.assert_array_equal(patches.reshape(600, 200), xavier)
    table = initial_value("t", TABLE, 0)
    assert table.std() == pytest.approx(0.02, rel=0.01) and abs(table.mean()) < 1e-3
    assert (initial_value("g", Parameter((4,), ONES), 0) == 1).all()
    assert not initial_value("b", Parameter((4,)), 0).any()
    drawn = initial_value("own", Parameter((3, 2), lambda draw, shape: draw.random(shape) + 5), 0)
    assert drawn.shape == (3, 2) and drawn.dtype == np.float32 and (drawn >= 5).all()
