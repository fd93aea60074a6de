"""Several data sets in one run: shares, epochs of their own, images among videos, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.mixed import MixedReader
from mindspeed_mm_dit.data.order import BucketOrder, MixedOrder
from mindspeed_mm_dit.data.sources import ReadSamples
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.models.data import open_data
from tests.buckets_fixtures import write_clip_configs, write_clips, write_pictures

pytest.importorskip("av", reason="requirements/video.txt")


def mixed_order(seed=0, shuffle=True):
    """Of 8 and 20 samples, three groups of the first for one of the second."""
    members = [np.arange(8), np.arange(8, 28)]
    orders = [BucketOrder(np.zeros(len(own), int), 2, seed, shuffle) for own in members]
    return MixedOrder(members, orders, 2, (3, 1), seed, shuffle, np.ones(28))


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_has_its_share_and_its_own_epochs(shuffle):
    found = mixed_order(shuffle=shuffle).images(np.arange(240))
    assert mixed_order(shuffle=shuffle).images(np.arange(239, 99, -1)).tolist() == found[239:99:-1].tolist()
    assert (mixed_order(seed=1, shuffle=shuffle).images(np.arange(240)).tolist() != found.tolist()) == shuffle
    groups = found.reshape(-1, 2)
    assert ((groups < 8).all(1) | (groups >= 8).all(1)).all()
    of_first = groups[:, 0] < 8
    assert (of_first.reshape(-1, 4).sum(1) == 3).all()
    for own, size in ((found[found < 8], 8), (found[found >= 8], 20)):
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) >= 3 and all(len(set(epoch)) == size for epoch in epochs.tolist())
    assert len({tuple(period) for period in of_first.reshape(-1, 4).tolist()}) == (4 if shuffle else 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    write_pictures(folder / "pictures", {(8, 12): 10, (8, 8): 7})
    annotation = write_clips(folder / "clips", {"wide": (6, 9, (16, 24)), "tall": (8, 9, (24, 16))})
    entries = json.loads(annotation.read_text())
    named = [{**entry, "label": ("bright", "dark")[entry["label"]]} for entry in entries]
    annotation.write_text(json.dumps(named))
    return folder


def write(place, name, weights=(1, 2), of_clips=None, of_images=None, **param):
    """Write a mix of clips and images by class, and return the folder of its configs."""
    clips = place / "clips"
    folder = write_clip_configs(place / name, clips / "annotation.json", {"latent_size": [9, 12, 8]})
    sources = [
        {"dataset_type": "clips", "data_folder": str(clips), "json_path": str(clips / "annotation.json"),
         "label_key": "label", "bucket_group": 2, "buckets": [[9, 8, 12], [9, 12, 8]], **(of_clips or {})},
        {"data_folder": str(place / "pictures"), "bucket_group": 2, "buckets": [[8, 12], [8, 8]],
         "random_flip": True, **(of_images or {})},
    ]  # fmt: skip
    section = {"sources": sources, "weights": list(weights), **param}
    (folder / "data.json").write_text(json.dumps({"dataset_param": section}))
    return folder


def opened(place, name="whole", **changed):
    folder = write(place, name, **changed)
    return open_data(load_model_config(folder / "model.json"), load_data_config(folder / "data.json").dataset_param)


def test_images_among_clips_are_videos_of_one_frame_and_all_are_read(place):
    mixed, of_images = opened(place), 14
    pytest.raises(ConfigError, mixed.param.pixel_cache_key).match("cannot be cached together")
    assert mixed.rows.shapes.shape == (31, 3) and mixed.rows.classes == ("bright", "dark")
    assert set(map(tuple, mixed.rows.shapes.tolist())) == {(9, 8, 12), (9, 12, 8), (1, 8, 12), (1, 8, 8)}
    samples = mixed.samples(mixed.rows, 0, True, lambda *_: {})
    seen = set()
    for start in range(0, 60, 2):
        sample_indices = np.arange(start, start + 2)
        rows, batch = samples.order.images(sample_indices), samples.batch(sample_indices)
        assert batch["pixels"].shape == (2, 1, *mixed.rows.shapes[rows[0]])
        if rows[0] >= of_images:
            bright = batch["pixels"].mean((1, 2, 3, 4)) > 110
            assert (mixed.rows.labels[rows] == np.where(bright, 0, 1)).all()
        seen |= set(rows.tolist())
    assert len(seen) == 31  # (of 7 squares one is left out in an epoch, others each time)
    held_out = mixed.rows.subset(np.arange(3, 31, 4))
    samples = mixed.samples(held_out, 0, True, lambda *_: {}, held_out=True)
    found = samples.order.images(np.arange(len(samples.order)))
    assert set(found.tolist()) == set(range(len(held_out)))
    for start in range(0, len(samples.order), 2):
        samples.batch(np.arange(start, start + 2))


def test_a_sample_without_images_beside_it_has_its_own_frames_there():
    """Of clips with a first and a last frame beside them, and of images without."""
    clips = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 1, 3, 5, 1)
    levels = {"first_image": 100, "last_image": 200}
    beside = {name: np.full((2, 1, 5, 1), level, np.uint8) for name, level in levels.items()}
    images = np.arange(10, dtype=np.uint8).reshape(2, 1, 5, 1)

    class Reader(dict):
        def read(self, rows, _):
            return ReadSamples({name: array[rows] for name, array in self.items()}, rows)

    class Of(SimpleNamespace):
        def __len__(self):
            return 4

    facts = SimpleNamespace(source=np.array([0, 1, 0, 1]), members=lambda: [np.array([0, 2]), np.array([1, 3])])
    readers = [Reader(pixels=clips, **beside), Reader(pixels=images)]
    reader = MixedReader(Of(facts=facts, shapes=np.ones((4, 3))), readers, beside)
    for rows, pixels, first, last in (
        ([2, 0], clips[[1, 0]], *beside.values()),
        ([3, 1], images[[1, 0]][:, :, None], images[[1, 0]], images[[1, 0]]),
    ):
        read = reader.read(np.array(rows), np.zeros((2, 2), int))
        assert read.rows.tolist() == rows and np.array_equal(read.arrays["pixels"], pixels)
        assert np.array_equal(read.arrays["first_image"], first) and np.array_equal(read.arrays["last_image"], last)


@pytest.mark.parametrize(("changed", "message"), [
    ({"weights": (1,)}, r"weights = \[1\]"),
    ({"weights": (1, 0)}, r"weights\[1\] = 0"),
    ({"of_images": {"bucket_group": 4}}, r"bucket_group = \[2, 4\]"),
    ({"of_images": {"caption_dropout_prob": 0.5}}, "caption_dropout_prob = "),
    ({"of_images": {"latents": "cache"}}, r"sources\[1\]"),
    ({"of_images": {"valid_fraction": 0.1}}, r"sources\[1\].valid_fraction"),
    ({"of_images": {"image_sizes": 8}}, r"sources\[1\].*image_sizes = 8"),
    ({"of_clips": {"label_key": None}}, "label or caption"),
    ({"of_images": {"single_class": True}}, "pictures.* bright, dark"),
    ({"bucket_group": 2}, "bucket_group = 2"),
])  # fmt: skip
def test_sources_that_do_not_go_together_are_refused(place, changed, message):
    pytest.raises(UserError, opened, place, "refused", **changed).match(message)
