import dataclasses

import numpy as np
import pytest

from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.tools.evaluate.drawing import Drawing, Shards, draw_labels

DRAWING = Drawing(
    num=7, labels="equal", seed=0, sampler="ddim", steps=5, options={}, cfg_scale=1.5, cfg_channels="3",
    cfg_interval=[0.0, 1.0], weights="ema", checkpoint_sha256="a", autoencoder_sha256="", model={"width": 8},
    bf16=False, ai_framework="pytorch", images_per_file=3,
)  # fmt: skip
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)
LABELS = np.arange(7)


def filled(folder, *files):
    shards = Shards(folder, DRAWING)
    shards.begin()
    for file in files:
        shards.write(file, IMAGES[shards.numbers(file)])
    return shards


def test_files_in_any_order_become_one_npz_of_adm(tmp_path):
    shards = filled(tmp_path / "a", 2, 0, 1)
    shards.join(LABELS)
    with np.load(tmp_path / "a/samples.npz") as file:
        assert file.files == ["arr_0", "arr_1"]
        np.testing.assert_array_equal(file["arr_0"], IMAGES)
        np.testing.assert_array_equal(file["arr_1"], LABELS)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["drawing.json", "samples.npz"]
    assert shards.missing() == []
    filled(tmp_path / "b", 0, 1, 2).join(LABELS)
    assert (tmp_path / "a/samples.npz").read_bytes() == (tmp_path / "b/samples.npz").read_bytes()


def test_files_that_are_there_are_not_drawn_again(tmp_path):
    filled(tmp_path, 1)
    again = Shards(tmp_path, DRAWING)
    again.begin()
    assert again.missing() == [0, 2] and again.numbers(2).tolist() == [6]


def test_files_that_are_missing_or_damaged_are_not_joined(tmp_path):
    shards = filled(tmp_path, 0, 2)
    with pytest.raises(DataError, match=r"000001\.npy first"):
        shards.join(LABELS)
    np.save(tmp_path / "images/000001.npy", IMAGES[:2])
    with pytest.raises(DataError, match=r"000001\.npy: holds \(2, 4, 4, 3\)"):
        shards.join(LABELS)
    (tmp_path / "images/000001.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match="is damaged"):
        shards.join(LABELS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drawing.json", "images"]


def test_half_written_file_of_a_killed_process_is_not_counted(tmp_path):
    shards = filled(tmp_path, 0, 1)
    for left in ("images/.000002.npy.123", ".samples.npz.123"):
        (tmp_path / left).write_bytes(b"half")
    assert shards.missing() == [2]
    shards.begin()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drawing.json", "images"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["000000.npy", "000001.npy"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"num": 8}, "num was 7, is 8"),
        ({"cfg_interval": [0.2, 1.0]}, r"cfg_interval was \[0.0, 1.0\], is \[0.2, 1.0\]"),
        ({"checkpoint_sha256": "b"}, "checkpoint_sha256 was 'a', is 'b'"),
        ({"model": {"width": 16}}, "model.json"),
        (None, r"drawing\.json"),
    ],
)
def test_another_drawing_is_refused(tmp_path, change, words):
    filled(tmp_path, 0)
    if change is None:
        (tmp_path / "drawing.json").unlink()
    with pytest.raises(ConfigError, match=words):
        Shards(tmp_path, dataclasses.replace(DRAWING, **(change or {})))


def test_labels_follow_from_seed_and_number():
    assert draw_labels("equal", 7, 3, 0).tolist() == [0, 1, 2, 0, 1, 2, 0]
    many, few = draw_labels("random", 2000, 10, 3), draw_labels("random", 50, 10, 3)
    np.testing.assert_array_equal(many[:50], few)
    assert not np.array_equal(few, draw_labels("random", 50, 10, 4))
    assert np.bincount(many).min() > 150 and many.max() == 9
