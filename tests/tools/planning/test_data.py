"""mm-dit data: what a run would see, from images that have a bit of everything wrong with them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.data import order as data_order
from mindspeed_mm_dit.data.order import SampleOrder, Stream
from tests.captions_fixtures import captioned_configs
from tests.conftest import ROOT
from tests.tools.tables import refusals


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


def test_classes_sizes_and_doubtful_files_are_counted(pets, capsys):
    (pets / "pets/notes.txt").write_text("no image")
    (pets / "pets/cat/a.cr2").write_bytes(b"")
    Image.open(pets / "pets/cat/00.png").save(pets / "pets/dog/copy.png")
    write_data(pets, valid_fraction=0.1)
    assert main(["data", "."]) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()[1:4]]
    assert [row[:2] for row in rows[:2]] == [["0", "cat"], ["1", "dog"]] and rows[2] == ["all", "13", "1"]
    assert sum(int(row[2]) + int(row[3]) for row in rows[:2]) == 14
    counted = ("8 to 32 pixels, middle 32", "image_size 16 enlarges 1 of 14", "13 in colour, 1 grey")
    assert all(words in said.out for words in counted)
    assert "1 .cr2" in said.err and "with another label" in said.err and "num_classes = 3" in said.err


def test_sheet_shows_what_the_first_epoch_takes(pets, capsys):
    assert main(["data", ".", "--seed", "5", "--output", "sheet.png"]) == 0
    sheet = np.asarray(Image.open("sheet.png").convert("RGB"))
    order = SampleOrder(13, 5).images(np.arange(13))
    cats = [sample_index for sample_index in range(13) if order[sample_index] != 12][:10]
    flipped = data_order.bernoulli(5, Stream.FLIP, np.array(cats), 0.5)
    assert flipped.any() and not flipped.all()
    margin = sheet.shape[1] - 10 * 50
    left = [sheet[24, margin + 50 * column + 3, 0] for column in range(10)]
    assert [bool(value > 128) for value in left] == flipped.tolist()
    assert (sheet[50 + 24, margin + 20] == 0).all() and (sheet[50 + 24, margin + 70] == 255).all()  # one dog


def test_images_without_classes_are_counted(tmp_path, capsys):
    (tmp_path / "bert").mkdir()  # (whose files are not read)
    captioned_configs(tmp_path, valid_fraction=0.25)
    assert main(["data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("9 images to train on, 3 held out\nshorter side 8 to 8 pixels")


def test_damaged_image_is_code_1_unless_it_is_skipped(pets, capsys):
    (pets / "pets/cat/03.png").write_bytes(b"no image")
    assert main(["data", "."]) == 1
    assert "pets/cat/03.png cannot be decoded" in capsys.readouterr().err
    write_data(pets, skip_bad_images=True)
    assert main(["data", "."]) == 0
    for careful, code in ((True, 0), (False, 1)):
        own = {"data_folder": "pets", "image_size": 16, "bucket_group": 1}
        sources = [{**own, "skip_bad_images": True}, {**own, "skip_bad_images": careful}]
        (pets / "data.json").write_text(json.dumps({"dataset_param": {"sources": sources, "weights": [1, 1]}}))
        assert main(["data", "."]) == code
        assert ("dataset_param.sources[1].skip_bad_images" in capsys.readouterr().out) == bool(code)


@refusals(f"""
none.json | CONFIG = none.json
. --output sheet.npz
. --seed -1
. --seed 99999999999999999999
. --model {ROOT}/examples/dit/moving_digits/model.json | videos
. --model none.json
labels | 999999999
sizes | dataset_param.image_size = 32
""")
def test_command_and_data_that_cannot_be_read_are_refused(pets, capsys, flags, named):
    (pets / "pets/labels.csv").write_text("image_path,label\ncat/00.png,999999999\n")
    for name, param in (("labels", {"index": "labels.csv"}), ("sizes", {"image_size": 32})):
        (pets / name).mkdir()
        write_data(pets / name, **param)
    (pets / "sizes/model.json").write_bytes((pets / "model.json").read_bytes())
    assert main(["data", *flags.split()]) == 2
    assert named in capsys.readouterr().err
