import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.data import order as draws
from mindspeed_mm_dit.data.order import SampleOrder, Stream, micro_batches, split, split_rows

SAMPLE_INDICES = np.arange(1000, 1064)


def all_draws(sample_indices, seed=3):
    noise = draws.normals(seed, Stream.NOISE, sample_indices, (2, 4, 4))
    coins = draws.bernoulli(seed, Stream.LABEL_DROP, sample_indices, 0.3)
    return [draws.timesteps(seed, sample_indices, 1000), noise, coins]


def test_a_draw_depends_on_seed_and_position_alone():
    whole = all_draws(SAMPLE_INDICES)
    shuffled = np.random.default_rng(0).permutation(64)
    for together, apart in zip(whole, all_draws(SAMPLE_INDICES[shuffled])):
        np.testing.assert_array_equal(together[shuffled], apart)
    assert not np.array_equal(whole[1], all_draws(SAMPLE_INDICES, seed=4)[1])


def test_points_are_spread_evenly_over_every_stretch():
    points = draws.van_der_corput(np.arange(4096))
    assert points[:8].tolist() == [0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8]
    for length in (2, 4, 64, 4096):
        for stretch in points.reshape(-1, length):
            np.testing.assert_array_equal(np.sort(np.floor(stretch * length)), np.arange(length))
    np.testing.assert_array_equal(draws.van_der_corput(np.array([2**40, 2**52 - 1])), [2.0**-41, 1 - 2.0**-52])


def test_the_meaning_of_a_seed_is_fixed():
    """A change here breaks resuming old runs: it needs a note in the changelog."""
    assert {name: int(stream) for name, stream in Stream.__members__.items()} == STREAMS
    assert draws.VALIDATION_START == 2**62
    assert draws.timesteps(1234, np.arange(5), 1000).tolist() == [815, 630, 814, 754, 251]
    assert draws.timesteps(1234, FAR_APART, 1000).tolist() == [226, 131, 885, 529]
    np.testing.assert_allclose(draws.normals(1234, Stream.NOISE, FAR_APART, (3,)), NOISE, rtol=1e-6)
    step_249 = draws.normals(1234, Stream.SAMPLE_NOISE, FAR_APART, (2,), block=249)
    np.testing.assert_allclose(step_249, STEP_249, rtol=1e-6)
    for stream, coins in ((Stream.FLIP, "0899874a1548476b"), (Stream.LABEL_DROP, "02a6b52ef5e5cd56")):
        thrown = draws.bernoulli(1234, stream, np.arange(2**16, 2**16 + 64), 0.5)
        assert np.packbits(thrown).tobytes().hex() == coins
    assert SampleOrder(10, 1234).images(np.arange(10)).tolist() == [9, 2, 1, 3, 7, 8, 4, 0, 5, 6]
    assert SampleOrder(3, 1234).images(np.arange(3 * 2**16, 3 * 2**16 + 6)).tolist() == [1, 0, 2, 1, 2, 0]


FAR_APART = np.array([7, 7 + 2**16, 7 + 2**32, 7 + draws.VALIDATION_START])
NOISE = [
    [-1.1518768, -0.33028969, -1.4025503], [-1.1955466, 0.2594060, 0.6078621],
    [-0.0529157, -0.5499195, -0.7589577], [0.0857124, -0.7123368, -0.1955338],
]  # fmt: skip
STEP_249 = [[0.9050124, -0.4495582], [0.5313644, -0.6383936], [-0.5822945, 0.6244878], [-1.0359640, -0.1338870]]

STREAMS = {
    "ORDER": 1, "TIMESTEP": 2, "NOISE": 3, "LABEL_DROP": 4, "FLIP": 5, "POSTERIOR": 6, "VALID_SPLIT": 7,
    "SAMPLE_START": 8, "SAMPLE_NOISE": 9, "CAPTION": 10, "CLIP_START": 11, "SAMPLE_LABEL": 12, "SOURCE": 13,
    "ENCODER_DROP": 14,
}  # fmt: skip


def philox(key, counter):
    """Four numbers of Philox4x64-10 (Salmon et al. 2011, figure 4), in whole numbers of Python."""
    (c0, c1, c2, c3), (k0, k1), mask = counter, key, 2**64 - 1
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & mask, (a >> 64) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def test_draw_is_philox_of_seed_stream_block_and_position():
    """NumPy counts up before each four numbers, so the first counter it uses is 1."""
    places = itertools.product(STREAMS, (0, 2**64 - 1), (0, *FAR_APART.tolist()), (0, 1, 249))
    for stream, seed, sample_index, block in places:
        found = draws.generator(seed, Stream[stream], sample_index, block).bit_generator.random_raw(8)
        for four, n in zip(found.reshape(2, 4).tolist(), (1, 2)):
            assert four == philox((seed, STREAMS[stream]), (n, block, sample_index, 0)), (stream, seed, block)


def test_a_coin_is_true_where_its_number_lies_below_the_probability():
    """A coin is the first number of its place, as a fraction of 2**64; 5 deviations of 1000 throws are allowed."""
    sample_indices = np.arange(2**32, 2**32 + 1000)
    for stream in (Stream.FLIP, Stream.LABEL_DROP):
        fractions = [philox((5, int(stream)), (1, 0, p, 0))[0] / 2**64 for p in sample_indices.tolist()]
        for probability in (0.1, 0.5):
            coins = draws.bernoulli(5, stream, sample_indices, probability)
            assert coins.dtype == bool and coins.tolist() == [f < probability for f in fractions]
            assert abs(coins.mean() - probability) < 5 * (probability * (1 - probability) / 1000) ** 0.5
    assert draws.bernoulli(5, Stream.FLIP, sample_indices, 0.0).tolist() == [False] * 1000
    assert draws.bernoulli(5, Stream.FLIP, sample_indices, 1.0).all()


@pytest.mark.parametrize("batch_size", [1, 7, 10, 64])
def test_every_epoch_holds_every_image_once_across_batch_boundaries(batch_size):
    order = SampleOrder(50, seed=1)
    seen = np.concatenate([order.images(np.arange(s, min(s + batch_size, 200))) for s in range(0, 200, batch_size)])
    epochs = seen.reshape(4, 50)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(50))
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 8), (1, 2), (2, 4), (4, 1)])
def test_ranks_and_micro_batches_cut_one_global_batch(world_size, micro_batch_size):
    rounds, order = 8 // (world_size * micro_batch_size), SampleOrder(50, seed=1)  # (which deals them as they come)
    for deal in (lambda rank: micro_batches(100, micro_batch_size, rank, world_size),
                 lambda rank: order.micro_batches(100, micro_batch_size, rank, world_size, rounds)):  # fmt: skip
        streams = [deal(rank) for rank in range(world_size)]
        for step in range(3):
            taken = np.concatenate([next(stream) for _ in range(rounds) for stream in streams])
            np.testing.assert_array_equal(taken, 100 + 8 * step + np.arange(8))


def test_each_class_has_its_share_of_held_out_samples():
    labels = np.repeat([0, 1, 2], [70, 20, 10])
    train, valid = split(100, 0.1, 3, labels)
    assert np.bincount(labels[valid]).tolist() == [7, 2, 1]
    assert np.concatenate([train, valid]).tolist() != list(range(100))  # not the first of each
    assert sorted([*train, *valid]) == list(range(100))
    alone = split(100, 0.1, 3, np.zeros(100, int))
    assert [part.tolist() for part in alone] == [part.tolist() for part in split(100, 0.1, 3)]
    rows = type("Labelled", (list,), {"labels": labels})(labels)
    for by_class, same in ((True, (train, valid)), (False, alone)):
        param = SimpleNamespace(valid_fraction=0.1, valid_by_class=by_class)
        assert [part.tolist() for part in split_rows(rows, param, 3)] == [part.tolist() for part in same]
