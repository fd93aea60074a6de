import dataclasses
import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.tools.evaluate.drawing import Drawing, Shards, draw_labels
from mindspeed_mm_dit.tools.evaluate.evaluation import cautions
from mindspeed_mm_dit.tools.evaluate.image_set import open_image_set, sha256_of

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 6, 6, 3), np.uint8)
STATISTICS = {"mu": np.zeros(2048), "sigma": np.eye(2048)}
SPATIAL = {"mu_s": np.zeros(2023), "sigma_s": np.eye(2023)}


def saved(tmp_path, *arrays, **named):
    np.savez(tmp_path / "set.npz", *arrays, **named)
    return tmp_path / "set.npz"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_read_a_batch_at_a_time(tmp_path, save):
    save(tmp_path / "set.npz", IMAGES, np.arange(10))
    images = open_image_set("--samples", tmp_path / "set.npz")
    assert images.count == 10 and images.shape == (6, 6, 3) and images.labels.tolist() == list(range(10))
    for batch in (1, 4, 10, 64):
        parts = list(images.batches(batch))
        assert max(map(len, parts)) <= batch
        np.testing.assert_array_equal(np.concatenate(parts), IMAGES)


def test_arrays_that_cannot_be_scored_are_refused(tmp_path):
    for words, arrays in {
        "arr_0 must be uint8, and is float32": {"arr_0": IMAGES.astype(np.float32)},
        r"arr_0 .* has \(6, 6, 3\)": {"arr_0": IMAGES[0]},
        r"arr_0 .* has \(10, 3, 6, 6\)": {"arr_0": IMAGES.transpose(0, 3, 1, 2).copy()},
        r"arr_0 .* has \(0, 6, 6, 3\)": {"arr_0": IMAGES[:0]},
        "Fortran": {"arr_0": np.asfortranarray(IMAGES)},
        "arr_0 holds Python objects": {"arr_0": np.array([None])},
        r"arr_1.*\(9,\)": {"arr_0": IMAGES, "arr_1": np.arange(9)},
        "float64": {"arr_0": IMAGES, "arr_1": np.zeros(10)},
        "arr_1.* -1": {"arr_0": IMAGES, "arr_1": np.arange(10) - 1},
        "images": {"images": IMAGES},
        "another network": {"mu": np.zeros(64), "sigma": np.eye(64)},
        "(?#its covariance)another network": {"mu": np.zeros(2048), "sigma": np.eye(64)},
        "not finite": {"mu": np.zeros(2048), "sigma": np.full((2048, 2048), np.nan)},
        "real numbers": {"mu": np.zeros(2048, int), "sigma": np.eye(2048)},
    }.items():
        with pytest.raises(DataError, match=words):
            open_image_set("--samples", saved(tmp_path, **arrays))


def test_npz_that_is_cut_short_is_refused(tmp_path):
    path = saved(tmp_path, IMAGES)
    with zipfile.ZipFile(path) as archive:
        content = archive.read("arr_0.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("arr_0.npy", content[:-1])
    with pytest.raises(DataError, match="1,079 bytes"):
        open_image_set("--samples", path)
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"is no \.npz"):
        open_image_set("--samples", path)
    with pytest.raises(ConfigError, match=r"--samples = .*none\.npz does not exist"):
        open_image_set("--samples", tmp_path / "none.npz")
    path = saved(tmp_path, **STATISTICS, **SPATIAL)
    content = bytearray(path.read_bytes())
    start = content.index(b"\x93NUMPY")
    content[start : start + 6] = b"broken"
    path.write_bytes(content)
    with pytest.raises(DataError, match="mu cannot be read"):
        open_image_set("--reference", path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_flipped_bit_is_refused_before_an_image_is_read(tmp_path, save):
    save(tmp_path / "set.npz", np.random.default_rng(0).integers(0, 256, (1000, 6, 6, 3), np.uint8))
    content = bytearray((tmp_path / "set.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(DataError, match="arr_0 is damaged"):
        open_image_set("--samples", tmp_path / "set.npz")


def test_folder_is_read_in_the_order_of_names(tmp_path):
    for number, image in enumerate(IMAGES):
        place = tmp_path / ("cat" if number < 4 else "dog")
        place.mkdir(exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")
    images = open_image_set("--reference", tmp_path)
    np.testing.assert_array_equal(np.concatenate(list(images.batches(3))), IMAGES)
    assert images.labels.tolist() == [0] * 4 + [1] * 6
    before = sha256_of(tmp_path)
    Image.fromarray(IMAGES[0]).save(tmp_path / "dog" / "9.png")
    assert sha256_of(tmp_path) != before


def test_classes_and_sizes_of_a_folder_are_those_of_training(tmp_path):
    names = ("A\u0308pfel", "pears", ".ipynb_checkpoints", "__MACOSX/pears")  # the first as macOS writes it
    for folder in (*names, "."):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 6)).save(tmp_path / folder / "a.png")
    images = open_image_set("--reference", tmp_path)
    assert images.classes == ("pears", "\u00c4pfel") and images.count == 2
    whole = open_image_set("--reference", tmp_path, by_class=False)
    assert (whole.count, whole.labels, whole.classes, whole.left_out) == (3, None, (), 2)
    (tmp_path / "sizes").mkdir()
    for size, name in ((6, "a.png"), (12, "b.png"), (6, "c.jpg")):
        Image.new("RGB", (size, size)).save(tmp_path / "sizes" / name)
    with pytest.raises(DataError, match="--image-size"):
        open_image_set("--reference", tmp_path / "sizes")
    images = open_image_set("--reference", tmp_path / "sizes", 6)
    assert (images.count, images.resized, images.jpegs, images.shape) == (3, 1, 1, (6, 6, 3))


def test_folders_that_cannot_be_scored_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no images"):
        open_image_set("--reference", tmp_path)
    Image.fromarray(IMAGES[0][:4]).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png is 6 x 4"):
        open_image_set("--samples", tmp_path)
    Image.fromarray(IMAGES[0]).save(tmp_path / "a.png")
    images = open_image_set("--samples", tmp_path)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png does not exist"):
        next(iter(images.batches(1)))
    Image.fromarray(IMAGES[0]).save(tmp_path / "a.png")
    for name, content in (("b", b""), ("c", b"no image")):
        (tmp_path / f"{name}.png").write_bytes(content)
    with pytest.raises(DataError, match=r"2 of 3 images.*b\.png"):
        open_image_set("--reference", tmp_path)


def test_grey_images_against_coloured_ones_are_a_caution(tmp_path):
    for mode in ("L", "RGB"):
        (tmp_path / mode).mkdir()
        for number, image in enumerate(IMAGES):
            Image.fromarray(image).convert(mode).save(tmp_path / mode / f"{number}.png")
    grey, coloured = (open_image_set("--samples", tmp_path / mode) for mode in ("L", "RGB"))
    numbers = open_image_set("--samples", saved(tmp_path, IMAGES[..., :1]))
    other, same = ((grey, coloured), (coloured, grey), (numbers, coloured)), ((grey, numbers), (coloured, coloured))
    for pair in (*other, *same):
        assert any("in colour" in line for line in cautions(*pair)) == (pair in other)


def test_statistics_carry_what_they_lack_and_what_was_scaled(tmp_path):
    samples = open_image_set("--samples", saved(tmp_path, np.zeros((10_000, 1, 1, 3), np.uint8)))
    alone = open_image_set("--reference", saved(tmp_path, **STATISTICS))
    assert "precision and recall" in str(cautions(samples, alone))
    whole = open_image_set("--reference", saved(tmp_path, IMAGES, **STATISTICS, **SPATIAL))
    scaled = open_image_set("--reference", saved(tmp_path, IMAGES, **STATISTICS, scaled_and_jpegs=np.array([2, 5])))
    assert all(count in str(cautions(samples, scaled)) for count in ("2 image(s)", "5 image(s)"))
    assert cautions(samples, whole) == [] and set(whole.statistics) == {"pool", "spatial"}


DRAWING = Drawing(
    num=7, labels="equal", seed=0, sampler="ddim", steps=5, options={}, cfg_scale=1.5, cfg_channels="3",
    cfg_interval=[0.0, 1.0], weights="ema", checkpoint_sha256="a", autoencoder_sha256="", model={"width": 8},
    bf16=False, ai_framework="pytorch", images_per_file=3,
)  # fmt: skip
DRAWN = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)
LABELS = np.arange(7)


def filled(folder, *files):
    shards = Shards(folder, DRAWING)
    shards.begin()
    for file in files:
        shards.write(file, DRAWN[shards.numbers(file)])
    return shards


def test_files_in_any_order_become_one_npz_of_adm(tmp_path):
    shards = filled(tmp_path / "a", 2, 0, 1)
    shards.join(LABELS)
    with np.load(tmp_path / "a/samples.npz") as file:
        assert file.files == ["arr_0", "arr_1"]
        np.testing.assert_array_equal(file["arr_0"], DRAWN)
        np.testing.assert_array_equal(file["arr_1"], LABELS)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["drawing.json", "samples.npz"]
    assert shards.missing() == []
    filled(tmp_path / "b", 0, 1, 2).join(LABELS)
    assert (tmp_path / "a/samples.npz").read_bytes() == (tmp_path / "b/samples.npz").read_bytes()


def test_files_that_are_missing_or_damaged_are_not_joined(tmp_path):
    shards = filled(tmp_path, 0, 2)
    file, content = tmp_path / "images/000001.npy", io.BytesIO()
    np.save(content, DRAWN[:2])
    for there, words in ((None, ""), (content.getvalue(), r".*\(2, 4, 4, 3\)"), (b"\x93NUMPY", ".*damaged")):
        if there:
            file.write_bytes(there)
        with pytest.raises(DataError, match=r"000001\.npy" + words):
            shards.join(LABELS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drawing.json", "images"]


def test_files_that_are_there_and_whole_are_not_drawn_again(tmp_path):
    filled(tmp_path, 1)
    for left in ("images/.000002.npy.123", ".samples.npz.123"):  # (of a killed process)
        (tmp_path / left).write_bytes(b"half")
    again = Shards(tmp_path, DRAWING)
    assert again.missing() == [0, 2] and again.numbers(2).tolist() == [6]
    again.begin()
    assert again.missing() == [0, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drawing.json", "images"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["000001.npy"]


def test_another_drawing_is_refused(tmp_path):
    filled(tmp_path, 0)
    changes = {"seed": 1, "num": 8, "cfg_interval": [0.2, 1.0], "checkpoint_sha256": "b", "model": {"width": 16}}
    for name, value in changes.items():
        with pytest.raises(ConfigError, match=name):
            Shards(tmp_path, dataclasses.replace(DRAWING, **{name: value}))
    (tmp_path / "drawing.json").unlink()
    with pytest.raises(ConfigError, match=r"drawing\.json"):
        Shards(tmp_path, DRAWING)


def test_labels_follow_from_seed_and_number():
    assert draw_labels("equal", 7, 3, 0).tolist() == [0, 1, 2, 0, 1, 2, 0]
    many, few = draw_labels("random", 2000, 10, 3), draw_labels("random", 50, 10, 3)
    np.testing.assert_array_equal(many[:50], few)
    assert not np.array_equal(few, draw_labels("random", 50, 10, 4))
    assert np.bincount(many).min() > 150 and many.max() == 9
