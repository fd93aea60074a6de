"""Buckets: which shape a picture is brought to, and where it stands in a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.buckets import Budget
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config, model_config_from_mapping
from mindspeed_mm_dit.data.buckets import BucketOrder, nearest
from mindspeed_mm_dit.data.draws import VALIDATION_POSITIONS
from mindspeed_mm_dit.data.order import micro_batches
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import draw_of
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.buckets_fixtures import COUNTS, write_configs, write_pictures

BUCKETS = np.repeat([0, 1, 2], [13, 21, 6])
PINNED = [5, 4, 7, 8, 24, 18, 32, 29, 34, 38, 37, 39]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def opened(folder, pictures, **param):
    configs = write_configs(folder, pictures, **param)
    model = load_model_config(configs / "model.json")
    return open_data(model, load_data_config(configs / "data.json").dataset_param)


# --- shapes ----------------------------------------------------------------------------------------------------


def test_a_budget_makes_the_largest_shapes_within_it_and_their_transposes():
    shapes = Budget(area=512 * 512, multiple_of=64, max_aspect_ratio=2).shapes
    assert shapes == ((640, 384), (576, 448), (512, 512), (448, 576), (384, 640))
    assert Budget(area=6, multiple_of=1).shapes == ((3, 2), (2, 3), (2, 2))


@pytest.mark.parametrize(("area", "multiple", "aspect"), [(100_000, 16, 2.5), (64, 8, 4.0), (1000, 7, 1.0)])
def test_no_shape_of_a_budget_exceeds_it_and_none_but_the_square_could_grow(area, multiple, aspect):
    shapes = Budget(area, multiple, aspect).shapes
    assert shapes and set(shapes) == {(w, h) for h, w in shapes}
    for h, w in shapes:
        assert h * w <= area and max(h / w, w / h) <= aspect and h % multiple == w % multiple == 0
        for taller, wider in () if h == w else ((h + multiple, w), (h, w + multiple)):
            ratio = max(taller / wider, wider / taller)
            assert taller * wider > area or ratio > aspect


def test_a_picture_goes_to_the_shape_that_keeps_most_of_it():
    shapes = np.array([[8, 8], [8, 12], [12, 8], [16, 24]])
    sizes = np.array([[100, 100], [100, 149], [160, 100], [9, 13], [400, 600], [16, 24], [100, 1000]])
    assert nearest(sizes, shapes).tolist() == [0, 3, 2, 1, 3, 3, 3]


def test_of_a_budget_a_bucket_with_less_than_a_group_gives_its_pictures_to_others(tmp_path, pictures):
    budget = {"area": 100, "multiple_of": 4, "max_aspect_ratio": 2}
    assert len(np.unique(opened(tmp_path / "all", pictures, buckets=budget).rows.shapes, axis=0)) == 3
    few = opened(tmp_path / "few", pictures, buckets=budget, bucket_group=16).rows.shapes
    assert len(np.unique(few, axis=0)) == 2 and len(few) == sum(COUNTS.values())


# --- order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_in_an_epoch_no_sample_stands_twice_and_only_the_rest_of_a_bucket_is_left_out(group, shuffle):
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
    first = order.images(VALIDATION_POSITIONS + np.arange(len(order)))
    assert len(order) == 16 + 24 + 8 and set(first.tolist()) == set(range(len(BUCKETS)))


@pytest.mark.parametrize(("micro", "ranks"), [(4, 1), (2, 1), (1, 3), (2, 2), (4, 3), (1, 4)])
def test_every_micro_batch_of_every_rank_is_of_one_bucket_and_steps_have_the_same_samples(micro, ranks):
    order, steps = BucketOrder(BUCKETS, 4, seed=0), 8
    order.check(micro)
    rounds = 12 // (micro * ranks)
    own = [micro_batches(0, micro, rank, ranks) for rank in range(ranks)]
    for step in range(steps):
        taken = [order.images(next(positions)) for positions in own for _ in range(rounds)]
        assert all(len(set(BUCKETS[some].tolist())) == 1 for some in taken)
        wanted = order.images(np.arange(12 * step, 12 * step + 12))
        assert sorted(np.concatenate(taken).tolist()) == sorted(wanted.tolist())


def test_a_micro_batch_that_would_have_two_shapes_is_refused():
    order = BucketOrder(BUCKETS, 4, seed=0)
    with pytest.raises(ConfigError, match=r"--micro-batch-size = 3: does not divide .*bucket_group: 4 % 3 = 1"):
        order.check(3)
    with pytest.raises(ConfigError, match="does not divide the 6 samples that the run has consumed"):
        order.check(4, start=6)


# --- batches ---------------------------------------------------------------------------------------------------


def test_a_batch_has_the_shape_of_its_bucket_in_all_its_arrays(tmp_path, pictures):
    found = opened(tmp_path, pictures, random_flip=False)
    samples = found.samples(found.rows, 7, True, draw_of(found.model.diffusion))
    seen = set()
    for start in range(0, len(samples.order), 4):
        positions = np.arange(start, start + 4)
        batch, rows = samples.batch(positions), samples.order.images(positions)
        (shape,) = {tuple(shape) for shape in found.rows.shapes[rows].tolist()}
        assert batch["pixels"].shape == batch["noise"].shape == (4, 1, *shape)
        for pixels, row in zip(batch["pixels"], rows):
            np.testing.assert_array_equal(pixels, load_pixels(found.rows.paths[row], shape, 1))
        seen.add(shape)
    assert seen == {(8, 12), (12, 8), (8, 8)}


def test_noise_of_a_sample_is_that_of_its_place_whatever_the_micro_batch(tmp_path, pictures):
    found = opened(tmp_path, pictures)
    samples = found.samples(found.rows, 7, True, draw_of(found.model.diffusion))
    for start in range(0, 24, 4):
        whole = samples.batch(np.arange(start, start + 4))
        for n in range(4):
            one = samples.batch(np.array([start + n]))
            assert all(np.array_equal(whole[name][n : n + 1], one[name]) for name in whole)


def test_a_picture_that_is_turned_by_exif_goes_to_the_bucket_of_how_it_stands(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "p/a").mkdir(parents=True)
    Image.new("RGB", (24, 16)).save(tmp_path / "p/a/turned.jpg", exif=exif)
    Image.new("RGB", (24, 16)).save(tmp_path / "p/a/upright.jpg")
    found = opened(tmp_path, tmp_path / "p", buckets=[[8, 12], [12, 8]], bucket_group=1)
    assert found.rows.shapes.tolist() == [[12, 8], [8, 12]]


def test_covering_a_rectangle_scales_no_more_than_it_has_to(tmp_path):
    ramp = np.tile(np.arange(0, 240, 4, dtype=np.uint8), (30, 1))  # 30 x 60, brighter to the right
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    whole, cut = (load_pixels(str(tmp_path / "ramp.png"), size, 1)[0] for size in ((15, 30), (15, 20)))
    assert whole.shape == (15, 30) and cut.shape == (15, 20)
    np.testing.assert_array_equal(cut, whole[:, 5:25])


def test_latents_of_an_autoencoder_have_the_shape_of_their_bucket_and_a_loss_each(tmp_path, pictures):
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.composite import DiTModel

    ae = write_folder(tmp_path / "vae", SMALL, our_shapes(SMALL))
    configs = write_configs(tmp_path / "c", pictures, {"in_channels": 4, "patch_size": 2, "learn_sigma": False})
    content = json.loads((configs / "model.json").read_text())
    content["ae"] = {"model_id": "autoencoder_kl", "from_pretrained": str(ae)}
    content["diffusion"] = {"model_id": "flow_matching"}
    model = model_config_from_mapping(content, "model.json")
    found = open_data(model, load_data_config(configs / "data.json").dataset_param)
    samples, network, seen = found.samples(found.rows, 7, True, draw_of(model.diffusion)), DiTModel(model), set()
    for start in range(0, len(samples.order), 4):
        batch = runtime.to_device(samples.batch(np.arange(start, start + 4)))
        latents = network.latents(batch)
        assert latents.shape == batch["noise"].shape == (4, 4, *(side // 2 for side in batch["pixels"].shape[2:]))
        assert np.isfinite(network(**batch).detach().numpy()).all()
        seen.add(tuple(latents.shape[2:]))
    assert seen == {(4, 6), (6, 4), (4, 4)}


# --- what is wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ({"buckets": [[8, 8], [32, 4]]}, r"dataset_param.buckets: \[32, 4\]: no sample is nearest to this shape"),
        ({"buckets": [[8, 10], [12, 8]]}, "data.json: dataset_param.buckets: 8 x 10: .*is no whole number of patches"),
        ({"buckets": {"area": 64, "multiple_of": 2}}, "is no whole number of patches"),
        ({"buckets": {"area": 15, "multiple_of": 4}}, "buckets.area = 15: has no room for one shape"),
        ({"buckets": {"area": 64}}, "buckets: multiple_of: this key is required and missing"),
        ({"buckets": {"area": 64, "multiple_of": 4, "aspect": 2}}, "buckets: aspect = 2: unknown key"),
        ({"buckets": [[4 * n, 4] for n in range(1, 60)]}, "59 shapes: are more than the 51 samples"),
        ({"buckets": []}, "names no shape"),
        ({"buckets": [[8]]}, r"buckets\[0\] = \[8\]: is no \[height, width\]"),
        ({"buckets": [[8, 0]]}, r"buckets\[0\] = 0: must be at least 1"),
        ({"buckets": [[8, 8], [8, 8]]}, r"buckets\[1\] = \[8, 8\]: stands there twice"),
        ({"image_size": 8}, "image_size = 8: contradicts buckets"),
        ({"buckets": None}, "dataset_param.image_size: this key is required and missing"),
        ({"latents": "cache"}, "a cache keeps latents of one shape"),
        ({"bucket_group": 0}, "bucket_group = 0: must be at least 1"),
    ],
)
def test_buckets_that_cannot_be_are_refused(tmp_path, pictures, param, message):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, pictures, **param)


def test_the_sheet_and_the_table_say_what_buckets_do(tmp_path, pictures, monkeypatch, capsys):
    write_configs(tmp_path / "c", pictures, buckets=[[8, 12], [24, 16], [16, 16]], bucket_group=5)
    monkeypatch.chdir(tmp_path)
    assert main(["data", "c", "--output", "sheet.png"]) == 0
    said = capsys.readouterr()
    rows = {line[:11].strip(): line[11:].split() for line in said.out.splitlines()}
    assert rows["8 x 12"] == ["13", "3", "0", "0.0%", "0.0%", "0"]
    assert rows["16 x 16"] == ["17", "2", "0", "0.0%", "0.0%", "17,", "1.8", "times"]
    assert "100.0% of a picture's area is kept; a square would keep 77.8%" in said.out
    assert "warning: 17 of 51 pictures are enlarged to their bucket" in said.err and "1.8 times" in said.err
    assert Image.open("sheet.png").size[1] == 2 * (3 * 24 + 2)


def test_a_bucket_of_less_than_a_group_is_named(tmp_path, pictures, monkeypatch, capsys):
    write_configs(tmp_path, pictures, bucket_group=16)
    assert main(["data", str(tmp_path)]) == 2
    assert "8 x 12: has 13 samples to train on, fewer than dataset_param.bucket_group = 16" in capsys.readouterr().err
