"""Buckets: which shape an image is brought to, and where it stands in a run."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.source import Budget
from mindspeed_mm_dit.data.buckets import bucket_report, count_shapes, fraction_after_crop, nearest, shapes_of
from mindspeed_mm_dit.data.order import VALIDATION_START, BucketOrder
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.buckets_fixtures import COUNTS, write_configs, write_pictures

BUCKETS = np.repeat([0, 1, 2], [13, 21, 6])
PINNED = [5, 4, 7, 8, 24, 18, 32, 29, 34, 38, 37, 39]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def opened(folder, images, **param):
    configs = write_configs(folder, images, **param)
    model = load_model_config(configs / "model.json")
    return open_data(model, load_data_config(configs / "data.json").dataset_param)


def test_a_budget_makes_the_largest_shapes_within_it_and_their_transposes():
    shapes = Budget(area=512 * 512, multiple_of=64, max_aspect_ratio=2).shapes
    assert shapes == ((640, 384), (576, 448), (512, 512), (448, 576), (384, 640))
    assert Budget(area=6, multiple_of=1).shapes == ((3, 2), (2, 3), (2, 2))


@pytest.mark.parametrize(("area", "multiple", "aspect"), [(100_000, 16, 2.5), (64, 8, 4.0), (1000, 7, 1.0)])
def test_shapes_of_a_budget_are_the_largest_within_it(area, multiple, aspect):
    shapes = Budget(area, multiple, aspect).shapes
    assert shapes and set(shapes) == {(w, h) for h, w in shapes}
    for h, w in shapes:
        assert h * w <= area and max(h / w, w / h) <= aspect and h % multiple == w % multiple == 0
        for taller, wider in () if h == w else ((h + multiple, w), (h, w + multiple)):
            ratio = max(taller / wider, wider / taller)
            assert taller * wider > area or ratio > aspect


def test_an_image_goes_to_the_shape_that_keeps_most_of_it():
    shapes = np.array([[8, 8], [8, 12], [12, 8], [16, 24]])
    sizes = np.array([[100, 100], [100, 149], [160, 100], [9, 13], [400, 600], [16, 24], [100, 1000]])
    assert nearest(sizes, shapes).tolist() == [0, 3, 2, 1, 3, 3, 3]
    clips = np.array([[4, 20, 30], [6, 30, 20], [6, 20, 20]])
    np.testing.assert_allclose(fraction_after_crop(clips, np.array([2, 8, 8])), [1 / 3, 2 / 9, 1 / 3])
    assert count_shapes(shapes[[1, 0, 1]]) == [((8, 8), 1), ((8, 12), 2)]


def test_small_bucket_of_a_budget_gives_its_images_to_others(tmp_path, images):
    budget = {"area": 100, "multiple_of": 4, "max_aspect_ratio": 2}
    few = opened(tmp_path / "few", images, buckets=budget, bucket_group=16).rows.shapes
    assert len(np.unique(few, axis=0)) == 2 and len(few) == sum(COUNTS.values())


def test_small_shapes_of_a_budget_are_merged_before_they_grow():
    """Ten tall images and six taller ones fill a tall shape together, though neither has a group of 16."""
    param = DatasetParam("pictures", buckets=Budget(1024, 4, 4.0))
    sizes = np.repeat([[60, 80], [101, 67], [301, 50]], [24, 10, 6], axis=0)
    assert np.unique(shapes_of(sizes, param), axis=0).tolist() == [[28, 36], [40, 24]]
    assert len(np.unique(shapes_of(sizes[:30], param), axis=0)) == 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_in_an_epoch_no_sample_stands_twice(group, shuffle):
    order = BucketOrder(BUCKETS, group, seed=3, shuffle=shuffle)
    assert len(order) == sum(count // group * group for count in np.bincount(BUCKETS))
    for epoch in range(3):
        samples = order.images(np.arange(epoch * len(order), (epoch + 1) * len(order)))
        assert len(set(samples.tolist())) == len(order)
        assert np.bincount(BUCKETS[samples]).tolist() == [c // group * group for c in np.bincount(BUCKETS)]
        groups = BUCKETS[samples].reshape(-1, group)
        assert (groups == groups[:, :1]).all()


def test_over_the_epochs_every_sample_is_left_out_as_often_and_the_seed_decides():
    order = BucketOrder(BUCKETS, 4, seed=3)
    counts = np.bincount(order.images(np.arange(200 * len(order))), minlength=len(BUCKETS))
    assert (counts[BUCKETS == 0] / 200 > 0.75).all() and np.ptp(counts[BUCKETS == 2]) < 60  # 12 of 13, and 4 of 6
    assert not np.array_equal(order.images(np.arange(36)), BucketOrder(BUCKETS, 4, seed=4).images(np.arange(36)))


def test_the_same_samples_stand_at_the_same_places_always():
    """Pinned: checkpoints of runs with buckets go on by these numbers."""
    assert BucketOrder(BUCKETS, 4, seed=1234).images(np.arange(12)).tolist() == PINNED


def test_held_out_samples_all_come_before_one_comes_again():
    order = BucketOrder(BUCKETS, 4, seed=3, fill=True)
    first = order.images(VALIDATION_START + np.arange(len(order)))
    assert len(order) == 16 + 24 + 8 and set(first.tolist()) == set(range(len(BUCKETS)))


@pytest.mark.parametrize(("micro", "ranks"), [(4, 1), (2, 1), (1, 3), (2, 2), (4, 3), (1, 4)])
def test_micro_batch_of_any_rank_is_of_one_bucket(micro, ranks):
    order, steps = BucketOrder(BUCKETS, 4, seed=0, costs=np.array([9, 4, 1])[BUCKETS]), 8
    order.check(micro)
    rounds = 12 // (micro * ranks)
    own = [order.micro_batches(0, micro, rank, ranks, rounds) for rank in range(ranks)]
    for step in range(steps):
        taken = [order.images(next(sample_indices)) for sample_indices in own for _ in range(rounds)]
        assert all(len(set(BUCKETS[some].tolist())) == 1 for some in taken)
        wanted = order.images(np.arange(12 * step, 12 * step + 12))
        assert sorted(np.concatenate(taken).tolist()) == sorted(wanted.tolist())


@pytest.mark.parametrize("ranks", [2, 4])
def test_micro_batches_are_dealt_so_that_ranks_finish_together(ranks):
    costs = np.arange(1, 9)
    order = BucketOrder(np.arange(8), 1, seed=0, costs=costs)
    own = [order.micro_batches(0, 1, rank, ranks, 8 // ranks) for rank in range(ranks)]
    for _ in range(3):
        taken = [[costs[order.images(next(sample_indices))[0]] for _ in range(8 // ranks)] for sample_indices in own]
        assert [sum(of_rank) for of_rank in taken] == [36 // ranks] * ranks
        assert [of_rank[0] for of_rank in taken] == list(range(8, 8 - ranks, -1))


def test_micro_batches_that_cost_the_same_are_dealt_in_their_order_there_and_back():
    order = BucketOrder(np.arange(64), 1, seed=0, shuffle=False, costs=np.arange(64) % 2)
    own = np.concatenate(list(itertools.islice(order.micro_batches(0, 1, 0, 2, 32), 32)))
    dearest_first = [*range(1, 64, 2), *range(0, 64, 2)]
    assert own.tolist() == [dearest_first[n + (n // 2) % 2] for n in range(0, 64, 2)]
    plain = BucketOrder(np.arange(8), 1, seed=0, shuffle=False)  # of which nothing is known
    assert [next(step).item() for step in [plain.micro_batches(0, 1, 0, 2, 4)] for _ in range(4)] == [0, 3, 4, 7]


def test_a_run_says_how_many_samples_each_bucket_has_and_leaves_out():
    shapes = np.array([[8, 12]] * 9 + [[8, 8]] * 1005)
    assert bucket_report(shapes, 4) == [
        "buckets   8 x 8: 1,005, 8 x 12: 9, 4 in a row; each epoch drops 2, different ones each time"
    ]
    assert bucket_report(shapes[:8], 4) == ["buckets   8 x 12: 8, 4 in a row"]


def test_a_micro_batch_that_would_have_two_shapes_is_refused():
    order = BucketOrder(BUCKETS, 4, seed=0)
    with pytest.raises(ConfigError, match=r"--micro-batch-size = 3: does not divide .*bucket_group: 4 % 3 = 1"):
        order.check(3)
    pytest.raises(ConfigError, order.check, 4, start=6).match("does not divide the 6 samples that the run has consumed")


def test_a_batch_has_the_shape_of_its_bucket_in_all_its_arrays(tmp_path, images):
    found = opened(tmp_path, images, random_flip=False)
    samples = found.samples(found.rows, 7, True, training_draw(found.model.diffusion))
    seen = set()
    for start in range(0, len(samples.order), 4):
        sample_indices = np.arange(start, start + 4)
        batch, rows = samples.batch(sample_indices), samples.order.images(sample_indices)
        (shape,) = {tuple(shape) for shape in found.rows.shapes[rows].tolist()}
        assert batch["pixels"].shape == batch["noise"].shape == (4, 1, *shape)
        for pixels, row in zip(batch["pixels"], rows):
            np.testing.assert_array_equal(pixels, load_pixels(found.rows.paths[row], shape, 1))
        seen.add(shape)
    assert seen == {(8, 12), (12, 8), (8, 8)}


def test_noise_of_a_sample_is_that_of_its_place_whatever_the_micro_batch(tmp_path, images):
    found = opened(tmp_path, images)
    samples = found.samples(found.rows, 7, True, training_draw(found.model.diffusion))
    for start in range(0, 24, 4):
        whole = samples.batch(np.arange(start, start + 4))
        for n in range(4):
            one = samples.batch(np.array([start + n]))
            assert all(np.array_equal(whole[name][n : n + 1], one[name]) for name in whole)


def test_covering_a_rectangle_scales_no_more_than_it_has_to(tmp_path):
    ramp = np.tile(np.arange(0, 240, 4, dtype=np.uint8), (30, 1))  # 30 x 60, brighter to the right
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    whole, cut = (load_pixels(str(tmp_path / "ramp.png"), size, 1)[0] for size in ((15, 30), (15, 20)))
    assert whole.shape == (15, 30) and cut.shape == (15, 20)
    np.testing.assert_array_equal(cut, whole[:, 5:25])


@pytest.fixture(scope="module")
def encoded(tmp_path_factory, images):
    """A folder of configs whose model learns latents by a small autoencoder, and the cache of them."""
    folder = tmp_path_factory.mktemp("encoded")
    configs = write_configs(folder, images, {"in_channels": 4, "patch_size": 2, "learn_sigma": False})
    content = json.loads((configs / "model.json").read_text())
    vae = write_folder(folder / "vae", SMALL, our_shapes(SMALL))
    content["ae"] = {"model_id": "autoencoder_kl", "from_pretrained": str(vae)}
    content["diffusion"] = {"model_id": "flow_matching", "shift_base": 64}
    (configs / "model.json").write_text(json.dumps(content))
    argv = ["--model", f"{folder}/model.json", "--data", f"{folder}/data.json", "--output", f"{folder}/cache"]
    assert main(["cache-latents", *argv, "--shard-images", "20", "--batch-size", "3"]) == 0
    return folder


def samples_of(folder, **param):
    model, data = load_model_config(folder / "model.json"), load_data_config(folder / "data.json").dataset_param
    found = open_data(model, dataclasses.replace(data, **param))
    return model, found.samples(found.rows, 7, True, training_draw(model.diffusion))


def test_losses_of_cached_latents_of_several_shapes_are_those_of_encoding_online(encoded):
    model, online = samples_of(encoded)
    cached, network, seen = samples_of(encoded, latents=str(encoded / "cache"))[1], DiTModel(model), set()
    with torch.no_grad():
        for start in range(0, len(online.order), 4):
            there, here = (samples.batch(np.arange(start, start + 4)) for samples in (online, cached))
            height, width = there["pixels"].shape[2:]
            assert "pixels" not in here and here["latent_mean"].shape == (4, 4, height // 2, width // 2)
            for name in ("labels", "noise", "posterior_noise", "timesteps"):
                np.testing.assert_array_equal(there[name], here[name])
            both = [network(**runtime.to_device(batch)).numpy() for batch in (there, here)]
            np.testing.assert_allclose(*both, rtol=2e-5)  # (a convolution rounds by what else is in its batch)
            seen.add((height, width))
    assert seen == {(8, 12), (12, 8), (8, 8)}


def test_times_are_shifted_by_the_size_of_each_bucket(encoded):
    """SD3's rule: t / (t + s (1 - t)) with s = sqrt(elements / 64), of the same uniform draw."""
    _, samples = samples_of(encoded)
    _, plain = samples_of(encoded)
    model = load_model_config(encoded / "model.json")
    plain = dataclasses.replace(plain, draw=training_draw(dataclasses.replace(model.diffusion, shift_base=None)))
    for start in range(0, 24, 4):
        here, there = (own.batch(np.arange(start, start + 4)) for own in (samples, plain))
        t, shift = there["timesteps"].astype(np.float64), (np.prod(here["noise"].shape[1:]) / 64) ** 0.5
        np.testing.assert_allclose(here["timesteps"], t / (t + shift * (1 - t)), rtol=1e-5)


def test_cache_made_for_other_buckets_is_refused(encoded):
    with pytest.raises(ConfigError, match=r"was made with another size or crop: .*8 x 8.* there and .* here"):
        samples_of(encoded, latents=str(encoded / "cache"), buckets=((8, 12), (12, 8)))


@pytest.mark.parametrize(("param", "message"), [
    ({"buckets": [[8, 8], [32, 4]]}, r"\[32, 4\]: no sample is nearest"),
    ({"buckets": [[8, 10], [12, 8]]}, "8 x 10: .*is not a whole number of patches"),
    ({"buckets": {"area": 64, "multiple_of": 2}}, "is not a whole number of patches"),
    ({"buckets": {"area": 15, "multiple_of": 4}}, "buckets.area = 15"),
    ({"buckets": {"area": 64}}, "buckets: multiple_of: .*missing"),
    ({"buckets": {"area": 64, "multiple_of": 4, "aspect": 2}}, "aspect = 2: unknown key"),
    ({"buckets": [[4 * n, 4] for n in range(1, 60)]}, "59 shapes: are more than the 51 samples"),
    ({"buckets": []}, "lists no shape"),
    ({"buckets": [[4, n] for n in range(1, 5001)]}, "makes 5,000 shapes, more than 4,096"),
    ({"buckets": {"area": 2**30, "multiple_of": 1, "max_aspect_ratio": 16}}, "makes 49,153 shapes"),
    ({"buckets": [[8]]}, r"buckets\[0\] = \[8\]"),
    ({"buckets": [[8, 0]]}, r"buckets\[0\] = 0"),
    ({"buckets": [[8, 8], [8, 8]]}, r"buckets\[1\] = \[8, 8\]: is listed twice"),
    ({"image_size": 8}, "image_size = 8: contradicts buckets"),
    ({"buckets": None}, "image_size: .*missing"),
    ({"bucket_group": 0}, "bucket_group = 0"),
])  # fmt: skip
def test_impossible_buckets_are_refused(tmp_path, images, param, message):
    pytest.raises(UserError, opened, tmp_path, images, **param).match(message)


def test_bucket_with_less_than_a_group_is_refused(tmp_path, images, capsys):
    write_configs(tmp_path, images, bucket_group=16)
    assert main(["data", str(tmp_path)]) == 2
    assert "8 x 12: has 13 samples to train on" in capsys.readouterr().err
