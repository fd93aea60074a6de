import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.data import DataConfig, DataloaderParam
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.run import MultiModalArguments
from mindspeed_mm_dit.data import order
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.order import Stream
from mindspeed_mm_dit.data.samples import OpenedDataset
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.training.data_set import DataSet
from tests.data_fixtures import open_rows, open_samples

NUM_IMAGES = 70


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Seven grey images of 8 x 8 in each of ten classes."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        path = folder / str(number % 10) / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(path)
    return folder


@pytest.fixture
def configs(model_json, images):
    param = DatasetParam(data_folder=str(images), image_size=8, random_flip=True)
    return model_config_from_mapping(model_json, "model.json"), DataConfig(param, DataloaderParam())


@pytest.fixture
def samples(configs):
    return open_samples(*configs)


def test_a_batch_has_the_documented_shapes_and_ranges(samples):
    batch = samples.batch(np.arange(64))
    assert {key: (array.shape, array.dtype.name) for key, array in batch.items()} == {
        "pixels": ((64, 1, 8, 8), "uint8"),
        "labels": ((64,), "int64"),
        "timesteps": ((64,), "int64"),
        "noise": ((64, 1, 8, 8), "float32"),
    }
    assert 0 < (batch["labels"] == 10).mean() < 0.3  # the null class, 10 % of them
    assert batch["timesteps"].min() >= 0 and batch["timesteps"].max() < 1000


def test_a_batch_is_the_same_however_it_is_cut(samples):
    whole = samples.batch(np.arange(500, 532))
    for key, array in whole.items():
        parts = [samples.batch(np.arange(s, s + 8))[key] for s in range(500, 532, 8)]
        np.testing.assert_array_equal(array, np.concatenate(parts))


FAR = [0, 2**32, order.VALIDATION_START]


@pytest.mark.parametrize("start", FAR)
def test_half_of_the_images_are_mirrored_and_a_tenth_loses_its_label(samples, configs, start):
    """Within 5 deviations of 400 throws. Pixels and labels are read from the files here, by the order's numbers."""
    sample_indices = np.arange(start, start + 400)
    rows = open_rows(configs[1].dataset_param)
    batch, paths = samples.batch(sample_indices), rows.paths
    images = samples.order.images(sample_indices).tolist()
    flipped = order.bernoulli(0, Stream.FLIP, sample_indices, 0.5)
    for pixels, image, flip in zip(batch["pixels"], images, flipped):
        upright = load_pixels(paths[image], 8, 1)
        np.testing.assert_array_equal(pixels, upright[..., ::-1] if flip else upright)
    assert abs(flipped.mean() - 0.5) < 5 * 0.5 / 400**0.5
    dropped = order.bernoulli(0, Stream.LABEL_DROP, sample_indices, 0.1)
    assert batch["labels"].tolist() == np.where(dropped, 10, rows.labels[images]).tolist()
    assert abs(dropped.mean() - 0.1) < 5 * (0.1 * 0.9 / 400) ** 0.5


@pytest.mark.parametrize("start", FAR)
def test_every_number_of_a_batch_comes_from_its_own_stream(samples, start):
    samples = dataclasses.replace(samples, seed=7, posterior_noise=True)
    sample_indices = np.arange(start, start + 5)
    batch = samples.batch(sample_indices)
    assert batch["timesteps"].tolist() == order.timesteps(7, sample_indices, 1000).tolist()
    for name, stream in (("noise", Stream.NOISE), ("posterior_noise", Stream.POSTERIOR)):
        np.testing.assert_array_equal(batch[name], order.normals(7, stream, sample_indices, (1, 8, 8)))


def test_configs_that_contradict_each_other_are_refused(configs):
    model, data = configs
    with pytest.raises(DataError, match="fewer than --global-batch-size 71"):
        DataSet(MultiModalArguments(model, data, None, {}), 0).check(NUM_IMAGES + 1)
    larger = DataConfig(DatasetParam(data_folder="x", image_size=16))
    words = "image_size = 16: makes latents of 16 x 16, and the predictor takes 8 x 8: images of 8 x 8 pixels"
    pytest.raises(ConfigError, open_samples, model, larger).match(words)


@pytest.fixture
def some_cut_short(tmp_path, monkeypatch):
    """Ten images of two classes, so many that only headers are checked; 3, 4 and 9 end too early."""
    monkeypatch.setattr("mindspeed_mm_dit.data.images.DECODE_CHECK_LIMIT", 9)
    draw = np.random.default_rng(0)
    for number in range(10):
        path = tmp_path / str(number // 5) / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(path)
        if number in (3, 4, 9):
            path.write_bytes(path.read_bytes()[:60])
    return DatasetParam(data_folder=str(tmp_path), image_size=8)


def test_the_next_readable_image_stands_in_with_its_own_label(configs, some_cut_short, capsys):
    model, _ = configs
    data = DataConfig(dataclasses.replace(some_cut_short, skip_bad_images=True), DataloaderParam(shuffle=False))
    index = open_rows(data.dataset_param, 2)
    assert index.skipped == 0
    never = dataclasses.replace(model.predictor, class_dropout_prob=0.0)
    samples = open_samples(dataclasses.replace(model, predictor=never), data)
    expected = [0, 1, 2, 5, 5, 5, 6, 7, 8, 0]
    for sample_indices in (np.arange(10), np.arange(9, -1, -1), np.arange(10, 20)):
        batch = samples.batch(sample_indices)
        for sample_index, pixels, label in zip(sample_indices, batch["pixels"], batch["labels"]):
            image = expected[sample_index % 10]
            np.testing.assert_array_equal(pixels, load_pixels(index.paths[image], 8, 1))
            assert label == image // 5
    said = capsys.readouterr().err
    assert [said.count(f"{number}.png cannot be decoded") for number in (3, 4, 9, 5)] == [1, 1, 1, 0]


def test_an_image_that_fails_in_training_is_named_with_its_cure(configs, some_cut_short, monkeypatch):
    model, _ = configs
    index = open_rows(some_cut_short, 2)
    samples = open_samples(model, DataConfig(some_cut_short, DataloaderParam(shuffle=False)))
    with pytest.raises(DataError, match=r"3\.png: cannot be decoded(.|\n)*dataset_param.skip_bad_images"):
        samples.batch(np.arange(10))
    monkeypatch.setattr("mindspeed_mm_dit.data.images.REPLACEMENT_TRIES", 2)
    with pytest.raises(DataError, match=r"3\.png: cannot be decoded: [a-z].*, nor can any of the 1 images after it"):
        ImageReader(index, 8, 1, skip_bad=True).read(np.array([3]), np.array([False]))


def test_example_captions_are_the_first_of_each_row_once():
    rows = SimpleNamespace(captions=[("a cat", "an animal"), ("a dog",), ("a cat",)])
    for cache, shown in ((None, ["a cat", "a dog"]), (True, ["a cat", "a dog"]), (False, [""])):
        cache = None if cache is None else SimpleNamespace(knows_captions=cache)
        assert OpenedDataset(None, None, rows, cache=cache).example_captions() == shown
