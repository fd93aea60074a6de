from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.data.buckets import BucketOrder
from mindspeed_mm_dit.training.batches import WeighedByToken

TOKENS = np.repeat([4, 6, 9], [13, 21, 14])


@pytest.mark.parametrize(("micro", "ranks", "start"), [(4, 1, 0), (2, 2, 0), (1, 4, 0), (4, 4, 32)])
def test_by_token_a_steps_mean_is_one_over_its_tokens_however_it_is_cut(micro, ranks, start):
    order = BucketOrder(np.repeat([0, 1, 2], [13, 21, 14]), 4, seed=0, costs=TOKENS)
    samples = SimpleNamespace(order=order, batch=lambda positions: {"row": order.images(positions)})
    weighed, rounds = WeighedByToken(samples, TOKENS, start, 16), 16 // micro // ranks
    streams = [order.micro_batches(start, micro, rank, ranks, rounds) for rank in range(ranks)]
    losses = np.random.default_rng(0).random(len(TOKENS))
    for step in range(4):
        batches = [weighed.batch(next(stream)) for stream in streams for _ in range(rounds)]
        found = np.mean([(losses[batch["row"]] * batch["loss_weights"]).mean() for batch in batches])
        own = order.images(np.arange(start + 16 * step, start + 16 * step + 16))
        assert len(set(TOKENS[own])) > 1
        assert found == pytest.approx(np.average(losses[own], weights=TOKENS[own]), rel=1e-6)
