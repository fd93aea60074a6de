"""mm-dit data: what a run would see, from images that have a bit of everything wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.data import draws
from mindspeed_mm_dit.data.draws import Stream
from mindspeed_mm_dit.data.order import SampleOrder
from tests.captions_fixtures import captioned_configs
from tests.conftest import ROOT


@pytest.fixture
def pets(tmp_path, monkeypatch):
    """A config folder and its images: 12 cats left-black, right-white, and a dog of another shape, in grey."""
    monkeypatch.chdir(tmp_path)
    half = np.zeros((32, 32, 3), np.uint8)
    half[:, 16:] = 255
    for number in range(12):
        half[0, 0] = number
        save(half, f"pets/cat/{number:02d}.png")
    save(np.zeros((8, 16), np.uint8), "pets/dog/0.png")
    model = json.loads((ROOT / "examples/dit/model.json").read_text())
    model["ae"]["channels"], model["predictor"]["in_channels"] = 3, 3
    model["predictor"].update(input_size=16, num_classes=3)
    (tmp_path / "model.json").write_text(json.dumps(model))
    write_data(tmp_path)
    return tmp_path


def save(pixels, name):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(name)


def write_data(folder, **param):
    param = {"data_folder": "pets", "image_size": 16, "random_flip": True, **param}
    (folder / "data.json").write_text(json.dumps({"dataset_param": param}))


def test_classes_sizes_and_doubtful_files_are_said(pets, capsys):
    (pets / "pets/notes.txt").write_text("no image")
    (pets / "pets/cat/a.cr2").write_bytes(b"")
    Image.open(pets / "pets/cat/00.png").save(pets / "pets/dog/copy.png")
    write_data(pets, valid_fraction=0.1)
    assert main(["data", "."]) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()[1:4]]
    assert [row[:2] for row in rows[:2]] == [["0", "cat"], ["1", "dog"]] and rows[2] == ["all", "13", "1"]
    assert sum(int(row[2]) + int(row[3]) for row in rows[:2]) == 14
    assert (
        "shorter side 8 to 32 pixels, middle 32; image_size 16 enlarges 1 of 14, and its square cuts 0% off the middle "
        "image; 13 in colour, 1 grey" in said.out
    )
    assert "left out: 1 .cr2" in said.err and "1 image is byte for byte another image with another label" in said.err
    assert "num_classes = 3, and 1 class has no images" in said.err


def test_a_class_of_few_images_is_said(pets, capsys):
    assert main(["data", "data.json"]) == 0
    assert "cat has 12 images and dog 1: a class is drawn as often as it has images" in capsys.readouterr().err


def test_the_sheet_shows_what_the_first_epoch_takes(pets, capsys):
    assert main(["data", ".", "--seed", "5", "--output", "sheet.png"]) == 0
    sheet = np.asarray(Image.open("sheet.png").convert("RGB"))
    order = SampleOrder(13, 5).images(np.arange(13))
    cats = [sample_index for sample_index in range(13) if order[sample_index] != 12][:10]
    flipped = draws.coins(5, Stream.FLIP, np.array(cats), 0.5)
    assert flipped.any() and not flipped.all()
    margin = sheet.shape[1] - 10 * 50
    left = [sheet[24, margin + 50 * column + 3, 0] for column in range(10)]
    assert [bool(value > 128) for value in left] == flipped.tolist()
    assert (sheet[50 + 24, margin + 20] == 0).all() and (sheet[50 + 24, margin + 70] == 255).all()  # one dog


def test_that_captions_are_measured_by_a_run_alone_is_said(pets, capsys):
    (pets / "model.json").unlink()
    for path in (pets / "pets").rglob("*.png"):
        path.with_suffix(".txt").write_text("a pet")
    assert main(["data", "."]) == 0 and "captions are not measured" not in capsys.readouterr().err
    write_data(pets, captions=".txt")
    assert main(["data", "."]) == 0 and "captions are not measured here" in capsys.readouterr().err


def test_of_images_without_classes_it_is_said_how_many_there_are(tmp_path, capsys):
    (tmp_path / "bert").mkdir()  # (whose files are not read)
    captioned_configs(tmp_path, valid_fraction=0.25)
    assert main(["data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("9 images to train on, 3 held out\nshorter side 8 to 8 pixels")


def test_what_a_run_would_stop_at_is_named_and_the_code_is_1(pets, capsys):
    (pets / "pets/cat/03.png").write_bytes(b"no image")
    assert main(["data", "."]) == 1
    said = capsys.readouterr()
    assert "pets/cat/03.png cannot be decoded" in said.err and "a run would stop there" in said.out
    write_data(pets, skip_bad_images=True)
    assert main(["data", "."]) == 0


def test_of_a_mix_the_source_that_a_run_would_stop_at_is_named(pets, capsys):
    (pets / "pets/cat/03.png").write_bytes(b"no image")
    for careful, code in ((True, 0), (False, 1)):
        own = {"data_folder": "pets", "image_size": 16, "bucket_group": 1}
        sources = [{**own, "skip_bad_images": True}, {**own, "skip_bad_images": careful}]
        (pets / "data.json").write_text(json.dumps({"dataset_param": {"sources": sources, "weights": [1, 1]}}))
        assert main(["data", "."]) == code
        assert ("or set dataset_param.sources[1].skip_bad_images to true" in capsys.readouterr().out) == bool(code)


def test_of_a_mix_each_source_is_said_with_its_buckets_if_it_has_some(pets, capsys):
    own = {"data_folder": "pets", "bucket_group": 1}
    sources = [{**own, "image_size": 16}, {**own, "buckets": [[16, 16]]}]
    (pets / "data.json").write_text(json.dumps({"dataset_param": {"sources": sources, "weights": [1, 1]}}))
    assert main(["data", "."]) == 0
    first, second = capsys.readouterr().out.split("dataset_param.sources[0]\n")[1].split("dataset_param.sources[1]\n")
    assert "shorter side 8 to 32 pixels" in first and "bucket" not in first
    [bucket] = [line.split() for line in second.splitlines() if "16 x 16" in line]
    assert bucket[3:6] == ["13", "0", "0"] and "of each image's area is kept" in second


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("none.json", "CONFIG = none.json: cannot be read"),
        (". --output sheet.npz", "--output = sheet.npz: is no name of a picture"),
        (". --seed -1", "--seed = -1: must be at least 0"),
        (". --seed 99999999999999999999", "--seed = 99999999999999999999: must be a number of at most"),
        (
            f". --model {ROOT}/examples/dit/moving_digits/model.json",
            "its samples are images, and predictor 'custom_dit' learns videos",
        ),
        (". --model none.json", "--model = none.json: cannot be read"),
    ],
)
def test_what_is_wrong_with_the_command_is_named(pets, capsys, flags, message):
    assert main(["data", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_label_that_no_model_has_is_named(pets, capsys):
    (pets / "pets/labels.csv").write_text("image_path,label\ncat/00.png,999999999\n")
    (pets / "model.json").unlink()
    write_data(pets, index="labels.csv")
    assert main(["data", "data.json"]) == 2
    assert "cat/00.png: label 999999999: is outside 0 ... 999999" in capsys.readouterr().err


def test_sizes_that_contradict_each_other_are_named(pets, capsys):
    write_data(pets, image_size=32)
    assert main(["data", "."]) == 2
    assert (
        "dataset_param.image_size = 32: makes latents of 32 x 32, and the predictor takes 16 x 16"
        in capsys.readouterr().err
    )
