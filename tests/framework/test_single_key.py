"""Attention to a single key, in a process of its own: gradients that MindSpore 2.10 interprets after it are wrong."""

import numpy as np

from tests.conftest import gradient
from tests.framework.test_framework_contract import CLOSE, draw


def test_a_single_head_that_looks_at_a_single_key_has_gradients(framework):
    """All of the weight is on that key: the gradient of its value is the sum over queries, of the others nothing."""
    ops, q, k, v = framework.ops, draw(1, 1, 2, 6), draw(1, 1, 1, 6, seed=1), draw(1, 1, 1, 6, seed=2)
    weight = draw(1, 1, 2, 6, seed=3)
    of_q, of_k, of_v = gradient(framework, lambda q, k, v: ops.attention(q, k, v) * ops.tensor(weight), q, k, v)
    np.testing.assert_allclose(of_v, weight.sum(2, keepdims=True), **CLOSE)
    assert max(abs(of_q).max(), abs(of_k).max()) < 1e-6
