import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.data import DataConfig, DataloaderParam
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.run import MultiModalArguments
from mindspeed_mm_dit.data import images as data_images
from mindspeed_mm_dit.data import order
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.order import Stream
from mindspeed_mm_dit.data.samples import OpenedDataset
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.data.transforms import load_pixels
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.training.data_set import DataSet
from tests.data_fixtures import open_rows, open_samples

NUM_IMAGES = 70


def write_noise(folder, labels):
    """A grey image of 8 x 8 for each label."""
    draw = np.random.default_rng(0)
    for number, label in enumerate(labels):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(folder / f"{label}/{number}.png")
    return str(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_noise(tmp_path_factory.mktemp("pictures"), [number % 10 for number in range(NUM_IMAGES)])


@pytest.fixture
def configs(model_json, pictures):
    param = DatasetParam(data_folder=pictures, image_size=8, random_flip=True)
    return model_config_from_mapping(model_json, "model.json"), DataConfig(param, DataloaderParam())


@pytest.fixture
def samples(configs):
    return open_samples(*configs)


def test_a_batch_has_its_shapes_and_ranges_however_it_is_cut(samples):
    batch = samples.batch(np.arange(64))
    assert {key: (array.shape, array.dtype.name) for key, array in batch.items()} == {
        "pixels": ((64, 1, 8, 8), "uint8"),
        "labels": ((64,), "int64"),
        "timesteps": ((64,), "int64"),
        "noise": ((64, 1, 8, 8), "float32"),
    }
    assert 0 < (batch["labels"] == 10).mean() < 0.3  # the null class, 10 % of them
    assert batch["timesteps"].min() >= 0 and batch["timesteps"].max() < 1000
    whole = samples.batch(np.arange(500, 532))
    for key, array in whole.items():
        parts = [samples.batch(np.arange(s, s + 8))[key] for s in range(500, 532, 8)]
        np.testing.assert_array_equal(array, np.concatenate(parts))


FAR = [0, 2**32, order.VALIDATION_START]


@pytest.mark.parametrize("start", FAR)
def test_every_number_of_a_batch_comes_from_its_own_stream(samples, configs, start):
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
    samples = dataclasses.replace(samples, seed=7, posterior_noise=True)
    sample_indices = np.arange(start, start + 5)
    batch = samples.batch(sample_indices)
    assert batch["timesteps"].tolist() == order.timesteps(7, sample_indices, 1000).tolist()
    for name, stream in (("noise", Stream.NOISE), ("posterior_noise", Stream.POSTERIOR)):
        np.testing.assert_array_equal(batch[name], order.normals(7, stream, sample_indices, (1, 8, 8)))


def test_configs_that_contradict_each_other_are_refused(configs):
    model, data = configs
    found = DataSet(MultiModalArguments(model, data, None, {}), 0)
    pytest.raises(DataError, found.check, NUM_IMAGES + 1).match("--global-batch-size = 71")
    larger = DataConfig(DatasetParam(data_folder="x", image_size=16))
    pytest.raises(ConfigError, open_samples, model, larger).match("image_size = 16.*16 x 16.*8 x 8")


@pytest.fixture
def some_cut_short(tmp_path, monkeypatch):
    """Ten images of two classes, so many that only headers are checked; 3, 4 and 9 end too early."""
    monkeypatch.setattr(data_images, "DECODE_CHECK_LIMIT", 9)
    folder = write_noise(tmp_path, [0] * 5 + [1] * 5)
    for name in ("0/3.png", "0/4.png", "1/9.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:60])
    return DatasetParam(data_folder=folder, image_size=8)


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
    pytest.raises(DataError, samples.batch, np.arange(10)).match(r"(?s)3\.png.*dataset_param.skip_bad_images")
    monkeypatch.setattr(data_images, "REPLACEMENT_TRIES", 2)
    reader = ImageReader(index, 8, 1, skip_bad=True)
    pytest.raises(DataError, reader.read, np.array([3]), np.array([False])).match(r"3\.png.* the 1 images after")


def test_example_captions_are_the_first_of_each_row_once():
    rows = SimpleNamespace(captions=[("a cat", "an animal"), ("a dog",), ("a cat",)])
    for cache, shown in ((None, ["a cat", "a dog"]), (True, ["a cat", "a dog"]), (False, [""])):
        cache = None if cache is None else SimpleNamespace(knows_captions=cache)
        assert OpenedDataset(None, None, rows, cache=cache).example_captions() == shown


UPRIGHT = np.zeros(4, bool)


@pytest.fixture
def index(tmp_path):
    """Four images of 4 x 4 in one colour each; the second cannot be decoded."""
    paths = tuple(str(tmp_path / f"{number}.png") for number in range(4))
    for number, path in enumerate(paths):
        Image.new("RGB", (4, 4), (number, 10, 20)).save(path)
    (tmp_path / "1.png").write_bytes(b"no image")
    return Rows(paths, {"label": np.arange(4)})


@pytest.fixture
def decoded(monkeypatch):
    """The files that were decoded, in their order."""
    noted, load = [], data_images.load_pixels
    monkeypatch.setattr(data_images, "load_pixels", lambda path, *rest: noted.append(path[-5:]) or load(path, *rest))
    return noted


@pytest.mark.parametrize(("spare_bytes", "times"), [(0, 1), (-1, 2)])
def test_images_that_fit_into_memory_are_decoded_once(index, decoded, monkeypatch, spare_bytes, times):
    monkeypatch.setattr(data_images, "CACHE_BYTES", 4 * 3 * 4 * 4 + spare_bytes)  # images, channels, height, width
    reader = ImageReader(index, 4, 3)
    for _ in range(2):
        pixels = reader.read(np.array([2, 3]), UPRIGHT[:2]).arrays["pixels"]
        assert pixels[:, 0, 0, 0].tolist() == [2, 3] and pixels.shape == (2, 3, 4, 4)
    assert decoded == ["2.png", "3.png"] * times


@pytest.mark.parametrize("keep", [True, False])
def test_an_image_that_stays_the_same_in_memory_is_mirrored_anew_each_time(index, monkeypatch, keep):
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(index.paths[0])
    monkeypatch.setattr(data_images, "CACHE_BYTES", 1 << 20 if keep else 0)
    reader = ImageReader(index, 4, 1)
    for flip in (True, False, True):
        pixels = reader.read(np.array([0]), np.array([flip])).arrays["pixels"][0, 0, 0]
        assert pixels.tolist() == ([3, 2, 1, 0] if flip else [0, 1, 2, 3])


def test_skipped_image_is_named_once_and_another_an_error_every_time(index, decoded, capsys):
    reader = ImageReader(index, 4, 3, skip_bad=True)
    for _ in range(3):
        assert reader.read(np.arange(4), UPRIGHT).rows.tolist() == [0, 2, 2, 3]
    assert decoded.count("1.png") == 1 and capsys.readouterr().err.count(f"{index.paths[1]} cannot be decoded") == 1
    reader = ImageReader(index, 4, 3)
    for _ in range(2):
        pytest.raises(DataError, reader.read, np.array([1]), UPRIGHT[:1]).match(r"1\.png")
