from __future__ import annotations

import numpy as np
import pytest

from mindspeed_mm_dit.data import draws
from mindspeed_mm_dit.data.draws import Stream
from mindspeed_mm_dit.data.order import SampleOrder, micro_batches

POSITIONS = np.arange(1000, 1064)


def all_draws(positions, seed=3):
    return [
        draws.timesteps(seed, positions, 1000),
        draws.normals(seed, Stream.NOISE, positions, (2, 4, 4)),
        draws.coins(seed, Stream.LABEL_DROP, positions, 0.3),
    ]


def test_a_draw_depends_on_seed_and_position_alone():
    whole = all_draws(POSITIONS)
    shuffled = np.random.default_rng(0).permutation(64)
    for together, apart in zip(whole, all_draws(POSITIONS[shuffled])):
        np.testing.assert_array_equal(together[shuffled], apart)
    assert not np.array_equal(whole[1], all_draws(POSITIONS, seed=4)[1])


def test_streams_share_no_numbers():
    first, second = (draws.normals(3, s, POSITIONS, (100,)) for s in (Stream.NOISE, Stream.POSTERIOR))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


def test_draws_have_their_distributions():
    positions = np.arange(4000)
    timesteps = draws.timesteps(0, positions, 10)
    assert np.bincount(timesteps, minlength=10).min() > 320
    noise = draws.normals(0, Stream.NOISE, positions, (8,))
    assert abs(noise.mean()) < 0.02 and noise.std() == pytest.approx(1, abs=0.02)
    assert draws.coins(0, Stream.FLIP, positions, 0.25).mean() == pytest.approx(0.25, abs=0.03)


def test_the_meaning_of_a_seed_is_fixed():
    """A change here breaks resuming old runs: it needs a note in the changelog."""
    assert draws.timesteps(1234, np.arange(5), 1000).tolist() == FIXED_TIMESTEPS
    np.testing.assert_allclose(draws.normals(1234, Stream.NOISE, np.array([7]), (3,))[0], FIXED_NOISE, rtol=1e-6)
    assert SampleOrder(10, 1234).images(np.arange(10)).tolist() == FIXED_ORDER


FIXED_TIMESTEPS = [815, 630, 814, 754, 251]
FIXED_NOISE = [-1.1518768, -0.33028969, -1.4025503]
FIXED_ORDER = [9, 2, 1, 3, 7, 8, 4, 0, 5, 6]


@pytest.mark.parametrize("batch_size", [1, 7, 10, 64])
def test_every_epoch_holds_every_image_once_across_batch_boundaries(batch_size):
    order = SampleOrder(50, seed=1)
    seen = np.concatenate([order.images(np.arange(s, min(s + batch_size, 200))) for s in range(0, 200, batch_size)])
    epochs = seen.reshape(4, 50)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(50))
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 8), (1, 2), (2, 4), (4, 1)])
def test_ranks_and_micro_batches_cut_a_global_batch_into_the_same_samples(world_size, micro_batch_size):
    rounds = 8 // (world_size * micro_batch_size)
    streams = [micro_batches(100, micro_batch_size, rank, world_size) for rank in range(world_size)]
    for step in range(3):
        taken = np.concatenate([next(stream) for _ in range(rounds) for stream in streams])
        np.testing.assert_array_equal(taken, 100 + 8 * step + np.arange(8))
