"""Samples of a network whose weights are stored in few bits, with adapters beside them."""

import numpy as np
import pytest

from mindspeed_mm_dit import load
from mindspeed_mm_dit.checkpoint.lora import Adapter, LowRank, ScaledLora, joined_adapters, merge_adapters
from tests.training.test_lora_run import FLAGS, LORA, base, whole  # noqa: F401

pytestmark = pytest.mark.ranks


def drawn(checkpoint, **options):
    pipe = load(checkpoint, **options)
    return pipe.sample(classes="0-3", sampler="ddim", steps=4, guidance=1.0, seed=0).arrays


def test_adapters_beside_a_base_in_few_bits_draw_as_when_merged(base, whole):  # noqa: F811
    """bf16 rounds the base by 2^-9, so pixels differ by little from those of the merged float32 weights."""
    exact, beside = drawn(whole[1].root), drawn(whole[1].root, base_dtype="bf16")
    assert np.abs(exact.astype(int) - beside.astype(int)).mean() < 1.0
    assert np.array_equal(drawn(base, base_dtype="nf4"), drawn(base, base_dtype="nf4"))
    assert not np.array_equal(drawn(base, base_dtype="nf4"), drawn(base))


def test_joined_adapters_add_what_each_adds():
    draw = np.random.default_rng(0)
    loras = [LowRank(draw.standard_normal((r, 6)), draw.standard_normal((5, r)), 2.0 * r) for r in (2, 3)]
    adapters = [ScaledLora(Adapter({"a": lora}), strength) for lora, strength in zip(loras, (0.5, -1.0))]
    weights = {"a.weight": draw.standard_normal((5, 6)).astype(np.float32)}
    expected = merge_adapters(weights, adapters)["a.weight"]
    joined = joined_adapters(adapters)
    assert joined.specs()["a"] == (5, 1.0)
    np.testing.assert_allclose(joined.merged(weights)["a.weight"], expected, rtol=1e-5, atol=1e-5)
