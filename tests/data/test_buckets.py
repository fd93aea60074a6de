"""Buckets: which shape an image or a clip is brought to, and where it stands in a run."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("av", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.source import Budget
from mindspeed_mm_dit.data.buckets import bucket_report, count_shapes, fraction_after_crop, nearest, shapes_of
from mindspeed_mm_dit.data.clip_reader import fit_frames, frame_numbers
from mindspeed_mm_dit.data.order import VALIDATION_START, BucketOrder
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.data.video_file import read_frames
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import training_draw
from mindspeed_mm_dit.tools.evaluate.demo import read_digits
from mindspeed_mm_dit.tools.evaluate.digits import cut_out
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.buckets_fixtures import COUNTS, VIDEO_SHAPES, write_clip_configs, write_clips, write_configs, write_pictures
from tests.conftest import GOLDEN, ROOT
from tests.training.launch import Configs

BUCKETS = np.repeat([0, 1, 2], [13, 21, 6])
PINNED = [5, 4, 7, 8, 24, 18, 32, 29, 34, 38, 37, 39]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def opened(folder, images, write=write_configs, **param):
    configs = write(folder, images, **param)
    model = load_model_config(configs / "model.json")
    return open_data(model, load_data_config(configs / "data.json").dataset_param)


@pytest.mark.parametrize(("area", "multiple", "aspect"), [(100_000, 16, 2.5), (64, 8, 4.0), (1000, 7, 1.0)])
def test_shapes_of_a_budget_are_the_largest_within_it(area, multiple, aspect):
    shapes = Budget(area, multiple, aspect).shapes
    assert shapes and set(shapes) == {(w, h) for h, w in shapes}
    for h, w in shapes:
        assert h * w <= area and max(h / w, w / h) <= aspect and h % multiple == w % multiple == 0
        for taller, wider in () if h == w else ((h + multiple, w), (h, w + multiple)):
            ratio = max(taller / wider, wider / taller)
            assert taller * wider > area or ratio > aspect
    shapes = Budget(area=512 * 512, multiple_of=64, max_aspect_ratio=2).shapes
    assert shapes == ((640, 384), (576, 448), (512, 512), (448, 576), (384, 640))
    assert Budget(area=6, multiple_of=1).shapes == ((3, 2), (2, 3), (2, 2))


def test_image_or_clip_goes_to_the_nearest_shape():
    shapes = np.array([[8, 8], [8, 12], [12, 8], [16, 24]])
    sizes = np.array([[100, 100], [100, 149], [160, 100], [9, 13], [400, 600], [16, 24], [100, 1000]])
    assert nearest(sizes, shapes).tolist() == [0, 3, 2, 1, 3, 3, 3]
    assert count_shapes(shapes[[1, 0, 1]]) == [((8, 8), 1), ((8, 12), 2)]
    clips = np.array([[4, 20, 30], [6, 30, 20], [6, 20, 20]])
    np.testing.assert_allclose(fraction_after_crop(clips, np.array([2, 8, 8])), [1 / 3, 2 / 9, 1 / 3])
    shapes = np.array([[1, 8, 8], [5, 8, 12], [9, 8, 12], [9, 8, 8]])
    sizes = np.array([[1, 9, 40], [5, 8, 8], [8, 16, 24], [9, 16, 24], [30, 20, 20], [30, 8, 30]])
    assert nearest(sizes, shapes).tolist() == [0, 1, 1, 2, 3, 2]
    short = np.array([[4, 8, 8]])  # no video becomes an image unless all shapes are of one frame
    assert nearest(short, np.array([[1, 8, 8], [5, 8, 8], [3, 4, 12]])).tolist() == [2]
    assert nearest(short, np.array([[1, 12, 8], [1, 8, 8]])).tolist() == [1]


def test_small_shapes_of_a_budget_are_merged_before_they_grow(tmp_path, images):
    """Ten tall images and six taller ones fill a tall shape together, though neither has a group of 16."""
    param = DatasetParam("pictures", buckets=Budget(1024, 4, 4.0))
    sizes = np.repeat([[60, 80], [101, 67], [301, 50]], [24, 10, 6], axis=0)
    assert np.unique(shapes_of(sizes, param), axis=0).tolist() == [[28, 36], [40, 24]]
    assert len(np.unique(shapes_of(sizes[:30], param), axis=0)) == 1
    budget = {"area": 100, "multiple_of": 4, "max_aspect_ratio": 2}
    few = opened(tmp_path, images, buckets=budget, bucket_group=16).rows.shapes
    assert len(np.unique(few, axis=0)) == 2 and len(few) == sum(COUNTS.values())


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


def test_samples_are_left_out_as_often_and_the_seed_decides():
    order = BucketOrder(BUCKETS, 4, seed=3)
    counts = np.bincount(order.images(np.arange(200 * len(order))), minlength=len(BUCKETS))
    assert (counts[BUCKETS == 0] / 200 > 0.75).all() and np.ptp(counts[BUCKETS == 2]) < 60  # 12 of 13, and 4 of 6
    assert not np.array_equal(order.images(np.arange(36)), BucketOrder(BUCKETS, 4, seed=4).images(np.arange(36)))
    # Checkpoints of runs with buckets go on by these numbers.
    assert BucketOrder(BUCKETS, 4, seed=1234).images(np.arange(12)).tolist() == PINNED
    held_out = BucketOrder(BUCKETS, 4, seed=3, fill=True)  # all of them come before one comes again
    first = held_out.images(VALIDATION_START + np.arange(len(held_out)))
    assert len(held_out) == 16 + 24 + 8 and set(first.tolist()) == set(range(len(BUCKETS)))


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
    left_out = "each epoch drops 2, different ones each time"
    assert bucket_report(shapes, 4) == [f"buckets   8 x 8: 1,005, 8 x 12: 9, 4 in a row; {left_out}"]
    assert bucket_report(shapes[:8], 4) == ["buckets   8 x 12: 8, 4 in a row"]


def test_a_micro_batch_that_would_have_two_shapes_is_refused():
    order = BucketOrder(BUCKETS, 4, seed=0)
    pytest.raises(ConfigError, order.check, 3).match("--micro-batch-size = 3 .*bucket_group = 4")
    pytest.raises(ConfigError, order.check, 4, start=6).match("6 samples")


def test_a_batch_has_the_shape_of_its_bucket_and_the_noise_of_its_places(tmp_path, images):
    found = opened(tmp_path, images, random_flip=False)
    samples, seen = found.samples(found.rows, 7, True, training_draw(found.model.diffusion)), set()
    for start in range(0, len(samples.order), 4):
        sample_indices = np.arange(start, start + 4)
        batch, rows = samples.batch(sample_indices), samples.order.images(sample_indices)
        (shape,) = {tuple(shape) for shape in found.rows.shapes[rows].tolist()}
        assert batch["pixels"].shape == batch["noise"].shape == (4, 1, *shape)
        for number, (pixels, row) in enumerate(zip(batch["pixels"], rows)):
            np.testing.assert_array_equal(pixels, load_pixels(found.rows.paths[row], shape, 1))
            one = samples.batch(sample_indices[number : number + 1])
            assert all(np.array_equal(batch[name][number : number + 1], one[name]) for name in batch)
        seen.add(shape)
    assert seen == {(8, 12), (12, 8), (8, 8)}


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


def test_losses_of_cached_shapes_are_those_of_encoding_online(encoded):
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
    model, samples = samples_of(encoded)
    plain = dataclasses.replace(samples, draw=training_draw(dataclasses.replace(model.diffusion, shift_base=None)))
    for start in range(0, 24, 4):
        here, there = (own.batch(np.arange(start, start + 4)) for own in (samples, plain))
        t, shift = there["timesteps"].astype(np.float64), (np.prod(here["noise"].shape[1:]) / 64) ** 0.5
        np.testing.assert_allclose(here["timesteps"], t / (t + shift * (1 - t)), rtol=1e-5)


def test_cache_made_for_other_buckets_is_refused(encoded):
    with pytest.raises(ConfigError, match="or 8 x 8', but this run has '8 x 12 or 12 x 8'"):
        samples_of(encoded, latents=str(encoded / "cache"), buckets=((8, 12), (12, 8)))


@pytest.mark.parametrize(("param", "message"), [
    ({"buckets": [[8, 8], [32, 4]]}, r"\[32, 4\]"),
    ({"buckets": [[8, 10], [12, 8]]}, "8 x 10"),
    ({"buckets": {"area": 64, "multiple_of": 2}}, "patches"),
    ({"buckets": {"area": 15, "multiple_of": 4}}, "buckets.area = 15"),
    ({"buckets": {"area": 64}}, "multiple_of"),
    ({"buckets": {"area": 64, "multiple_of": 4, "aspect": 2}}, "aspect = 2"),
    ({"buckets": [[4 * n, 4] for n in range(1, 60)]}, "59 shapes.*51 samples"),
    ({"buckets": []}, "buckets"),
    ({"buckets": [[4, n] for n in range(1, 5001)]}, "5,000 shapes"),
    ({"buckets": {"area": 2**30, "multiple_of": 1, "max_aspect_ratio": 16}}, "49,153 shapes"),
    ({"buckets": [[8]]}, r"buckets\[0\] = \[8\]"),
    ({"buckets": [[8, 0]]}, r"buckets\[0\] = 0"),
    ({"buckets": [[8, 8], [8, 8]]}, r"buckets\[1\] = \[8, 8\]"),
    ({"image_size": 8}, "image_size = 8"),
    ({"buckets": None}, "image_size"),
    ({"bucket_group": 0}, "bucket_group = 0"),
])  # fmt: skip
def test_impossible_buckets_are_refused(tmp_path, images, param, message):
    pytest.raises(UserError, opened, tmp_path, images, **param).match(message)


def test_bucket_with_less_than_a_group_is_refused(tmp_path, images, capsys):
    write_configs(tmp_path, images, bucket_group=16)
    assert main(["data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "8 x 12" in said and "13 samples" in said


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize("clip_start", ["first", "random"])
def test_a_batch_has_frames_height_and_width_of_its_bucket(tmp_path, clips, clip_start):
    found = opened(tmp_path, clips, write_clip_configs, clip_start=clip_start)
    samples, seen = found.samples(found.rows, 7, True, training_draw(found.model.diffusion)), Counter()
    for start in range(0, len(samples.order), 4):
        sample_indices = np.arange(start, start + 4)
        batch, rows = samples.batch(sample_indices), samples.order.images(sample_indices)
        (shape,) = {tuple(shape) for shape in found.rows.shapes[rows].tolist()}
        assert batch["pixels"].shape == batch["noise"].shape == (4, 1, *shape)
        seen[shape] += 1
        for pixels, row in zip(batch["pixels"], rows) if shape[0] == 5 else ():
            frames = read_frames(found.rows.paths[row], frame_numbers(6, 1.0))
            levels = fit_frames(frames, shape[1:]).mean((0, 2, 3)).round()
            starts = [first for first in (0, 1) if (abs(pixels.mean((0, 2, 3)) - levels[first : first + 5]) < 2).all()]
            assert starts and (clip_start == "random" or starts == [0])
    assert seen.keys() == {tuple(shape) for shape in VIDEO_SHAPES}


def test_budget_makes_its_rectangles_for_every_number_of_frames(tmp_path, clips):
    budget = {"frames": [1, 5, 9], "area": 100, "multiple_of": 4}
    found = opened(tmp_path, clips, write_clip_configs, buckets=budget, bucket_group=7)
    assert set(found.param.sizes) == {(f, *size) for f in (1, 5, 9) for size in [(12, 8), (8, 12), (8, 8)]}
    counts = Counter(map(tuple, found.rows.shapes.tolist()))
    assert counts == {(1, 8, 8): 5, (5, 8, 12): 11, (9, 12, 8): 7}  # six are fewer than a group, and fit another shape


@pytest.mark.parametrize(("param", "message"), [
    ({"buckets": [[9, 8, 12], [9, 12, 8], [1, 8, 8]]}, "(?s)5 of 23 clips.*short-0.mp4"),
    ({"buckets": [[5, 8, 12], [9, 12, 8]]}, "still-0.png"),
    ({"buckets": [*VIDEO_SHAPES, [9, 8, 80]]}, r"\[9, 8, 80\]"),
    ({"buckets": [[8, 12]]}, r"buckets\[0\] = \[8, 12\]"),
    ({"buckets": {"area": 100, "multiple_of": 4}}, r"buckets.frames = \[\]"),
    ({"buckets": [[9, 8, 14]]}, "9 x 8 x 14.*predictor.patch_size"),
    ({"max_width": 8}, "dataset_param.max_width = 8"),
    ({"buckets": None, "max_width": 8, "max_height": 8}, "dataset_param.num_frames"),
])  # fmt: skip
def test_what_does_not_go_with_clips_is_named(tmp_path, clips, param, message):
    pytest.raises(UserError, opened, tmp_path, clips, write_clip_configs, **param).match(message)


def test_losses_of_cached_clips_equal_encoding_online(tmp_path):
    clips = write_clips(tmp_path / "clips", {"wide": (2, 5, (16, 24)), "still": (2, 1, (16, 16))})
    shapes = [[1, 8, 8], [5, 8, 16]]
    network = {"in_channels": 16, "out_channels": 16, "patch_size": [1, 1, 1], "latent_size": [2, 1, 2]}
    write_clip_configs(tmp_path, clips, network, buckets=shapes, bucket_group=2)
    ae = {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny")}
    Configs(tmp_path).change("model.json", ae=ae)
    argv = ["--model", f"{tmp_path}/model.json", "--data", f"{tmp_path}/data.json", "--output", f"{tmp_path}/cache"]
    assert main(["cache-latents", *argv, "--shard-images", "3"]) == 0
    model, param = load_model_config(tmp_path / "model.json"), load_data_config(tmp_path / "data.json").dataset_param
    online, cached = (
        (found := open_data(model, own)).samples(found.rows, 7, True, training_draw(model.diffusion))
        for own in (param, dataclasses.replace(param, features=str(tmp_path / "cache")))
    )
    torch.manual_seed(0)
    composite, seen = DiTModel(model), set()
    with torch.no_grad():
        for start in range(0, 4, 2):
            both = [samples.batch(np.arange(start, start + 2)) for samples in (online, cached)]
            frames, height, width = both[0]["pixels"].shape[2:]
            assert both[1]["latent_mean"].shape == (2, 16, (frames + 3) // 4, height // 8, width // 8)
            there, here = (composite(**runtime.to_device(batch)).numpy() for batch in both)
            np.testing.assert_allclose(there, here, rtol=2e-5)
            seen.add((frames, height, width))
    assert seen == set(map(tuple, shapes))
    with pytest.raises(ConfigError, match="1 of 8 x 8 or 5 of 8 x 16"):
        open_data(model, dataclasses.replace(param, features=str(tmp_path / "cache"), buckets=((5, 8, 16),)))


@pytest.mark.extended
def test_digits_on_rectangles_are_trained_whole_and_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = ROOT / "examples/dit/digits_buckets"
    model, param = load_model_config(folder / "model.json"), load_data_config(folder / "data.json").dataset_param
    data = open_data(model, param)
    assert count_shapes(data.rows.shapes) == [((8, 16), 599), ((12, 12), 599), ((16, 8), 599)]
    np.testing.assert_array_equal(data.rows.shapes, data.rows.sizes)
    samples = data.samples(data.rows, 0, True, lambda *_: {})
    for shape in ((12, 12), (8, 16), (16, 8)):
        own = np.flatnonzero((data.rows.shapes == shape).all(1))
        images = samples.visuals.read(own, np.zeros(len(own))).arrays["pixels"]
        digits = np.round(read_digits().images[own] * (255 / 16))
        found = cut_out(images.transpose(0, 2, 3, 1))
        assert np.mean((found[..., 0] == digits).all((1, 2))) > 0.95, shape
