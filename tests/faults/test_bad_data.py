"""Data that cannot be right: each is named with its path or setting, in seconds, and nothing is written."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.transforms import UnusableFile, load_pixels
from mindspeed_mm_dit.errors import ConfigError, DataError
from tests.conftest import ROOT
from tests.data_fixtures import open_rows

HEADER = "image_path,label\n"
SECONDS = 30
"""What waits for a pipe waits for ever; a process that imports and opens a few images needs two or three."""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "images"
    for shade, (name, number) in enumerate((name, number) for name in ("cat", "dog") for number in range(3)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (shade, 0, 0)).save(folder / name / f"{number}.png")
    return folder


def content_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {name: (stat.st_mode, stat.st_size) for name, stat in found.items()}


def problem(folder: Path, num_classes: int = 3, **param) -> DataError:
    before = content_of(folder.parent)
    with pytest.raises((ConfigError, DataError)) as caught:
        open_rows(DatasetParam(**{"data_folder": str(folder), "image_size": 8, **param}), num_classes)
    assert content_of(folder.parent) == before, "something was written"
    return caught.value


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size, and holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def half_of_a_png() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(content, "PNG")
    return content.getvalue()[: len(content.getvalue()) // 2]


FILES = {
    "a named pipe": (os.mkfifo, "pipe"),
    "a folder": (lambda path: path.mkdir(), "folder"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "device"),
    "a broken link": (lambda path: path.symlink_to("nothing"), "link"),
    "no bytes": (lambda path: path.write_bytes(b""), "empty"),
    "text": (lambda path: path.write_text("no image"), "not an image"),
    "EPS": (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "not an image"),
    "an image cut short": (lambda path: path.write_bytes(half_of_a_png()), "decoded"),
    "a bomb": (lambda path: path.write_bytes(png_of(20_000, 20_000)), "decompression bomb"),
    "a thread": (lambda path: Image.new("L", (1, 60_000)).save(path), "image_size 64"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_image_is_named_or_left_out(folder, kind):
    make, message = FILES[kind]
    path = folder / "cat/x.png"
    make(path)
    size = 64 if kind == "a thread" else 8
    error = str(problem(folder, image_size=size))
    assert str(path) in error and message in error and "1 of 7" in error and "skip_bad_images" in error
    index = open_rows(DatasetParam(str(folder), size, skip_bad_images=True), 2)
    assert len(index) == 6 and index.skipped == 1 and str(path) in index.problems[0]
    with pytest.raises(UnusableFile):  # nor is it read where only headers were checked
        load_pixels(str(path), size, 3)


OPEN = """
import sys
from mindspeed_mm_dit.configs.images import DatasetParam
from tests.data_fixtures import open_rows
from mindspeed_mm_dit.errors import DataError
for param in ({"data_folder": "pipes"}, {"data_folder": "named", "index": "labels.csv"},
              {"data_folder": "cat", "index": "pipe.csv"}, {"data_folder": "cat", "latents": "pipes"}):
    try:
        open_rows(DatasetParam(image_size=8, **param), 3)
    except DataError as error:
        print(error)
print(open_rows(DatasetParam("large", 8), 1).paths)
"""


def test_nothing_waits_for_a_pipe_and_pillow_warns_of_nothing(tmp_path):
    """In a process of its own: one that waits for ever can be ended, and it has no filters of warnings but ours."""
    for place in ("pipes/class", "named", "cat", "large/class"):
        (tmp_path / place).mkdir(parents=True)
    for name in ("pipes/class/x.png", "pipes/x.csv", "named/x.png", "cat/pipe.csv", "pipes/index.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "named/labels.csv").write_text(HEADER + "x.png,0\n")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "large/class/x.png")  # Pillow warns from 89 million pixels on
    done = subprocess.run([sys.executable, "-c", OPEN], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          timeout=SECONDS, capture_output=True, text=True)  # fmt: skip
    assert done.stdout.count("named pipe") == 4, done.stdout + done.stderr
    assert done.stdout.endswith("('large/class/x.png',)\n") and not done.stderr


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "tif", "webp", "bmp", "ppm", "avif", "jp2"])
def test_damaged_images_of_every_format_are_read_or_refused_and_nothing_else(tmp_path, suffix):
    """Whatever a decoder raises on bytes turned at random is one kind of error."""
    draw = np.random.default_rng(0)
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    refused = 0
    for _ in range(60):
        damaged = whole[: draw.integers(1, len(whole) + 1)].copy()
        damaged[draw.integers(0, min(len(damaged), 64), 4)] = draw.integers(0, 256, 4)
        path.write_bytes(damaged.tobytes())
        try:
            assert load_pixels(str(path), 8, 3).shape == (3, 8, 8)
        except UnusableFile as problem:
            refused += 1
            assert str(problem)
    assert refused


def test_every_colour_mode_is_read(tmp_path):
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
        path = tmp_path / ("x.jpg" if mode in ("CMYK", "YCbCr") else "x.png")
        Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(path)
        for channels in (1, 3):
            assert (load_pixels(str(path), 8, channels) >= 254).all(), mode  # white


def from_windows(folder):
    for path in list(folder.rglob("*.png")):
        path.rename(folder / "cat" / f"{path.parent.name}\\{path.name}")


def loose_from_windows(folder):
    from_windows(folder)
    for path in list(folder.rglob("*.png")):
        path.rename(folder / path.name)


def other_digits(folder):
    (folder / "cat").rename(folder.parent / "digits")


def with_an_index(folder):
    (folder / "label.csv").write_text(HEADER)


FOLDERS = {
    "a missing one": (None, {"data_folder": "gone"}, "gone", ""),
    "a typing error": (None, {"data_folder": "{}/cta"}, "cta", "'cat'"),
    "folders that became names": (from_windows, {}, "one class cat", "unzip"),
    "folders that became names, loose": (loose_from_windows, {}, "6 image(s)", "unzip"),
    "no index": (None, {"index": "labels.csv"}, "labels.csv", 'Drop "index"'),
    "an index of another name": (with_an_index, {"index": "labels.csv"}, "labels.csv", "'label.csv'"),
    "digits named, others there": (None, {"source": "digits"}, "dataset_param.source", 'rop "source"'),
    "others in a folder named digits": (
        other_digits, {"data_folder": "{}/../digits", "source": "digits"}, "digits", "one folder of images",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_cannot_be_meant_is_named_with_its_cure(folder, kind):
    change, param, message, cure = FOLDERS[kind]
    if change is not None:
        change(folder)
    error = problem(folder, **{key: value.format(folder) for key, value in param.items()})
    assert message in str(error) and cure in str(error)


def test_a_folder_that_may_not_be_read_is_named_and_not_taken_for_an_empty_class(folder, monkeypatch):
    """(Root may read everything, so the system's answer is made up.)"""
    scandir = os.scandir

    def refuse(place):
        if Path(place).name == "dog":
            raise PermissionError(13, "Permission denied")
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"dog.*Permission denied"):
        open_rows(DatasetParam(str(folder), 8), 2)


INDICES = {
    "semicolons": ("image_path;label\ncat/0.png;cat\n", "semicolons"),
    "tabs": ("image_path\tlabel\ncat/0.png\tcat\n", "tabs"),
    "no header": ("cat/0.png,cat\n", "['cat/0.png', 'cat']"),
    "a column twice": ("image_path,label,label\ncat/0.png,cat,dog\n", "image_path,label"),
    "NUL": (HEADER + "cat/0.png\0,cat\n", "NUL byte"),
    "an open quote": (HEADER + '"cat/0.png,cat\ndog/0.png,dog\n', "unexpected end of data"),
    "a quote over lines": (HEADER + '"cat/0.png\n",cat\n', "several lines"),
    "Latin-1": ((HEADER + "cat/0.png,\xe9").encode("latin-1"), "byte 0xe9"),
    "a huge field": (HEADER + "cat/0.png," + "x" * 200_000, "field larger than field limit"),
    "a comma in a name": (HEADER + "cat/a,b.png,cat\n", "more fields"),
    "two labels": (HEADER + "cat/0.png,cat\n./cat//0.png,dog\n", "the label 'dog'"),
    "an absolute path": (HEADER + "/etc/passwd,cat\n", "/etc/passwd"),
    "a way out": (HEADER + "cat/../../x.png,cat\n", "dataset_param.data_folder"),
    "another case": (HEADER + "cat/0.PNG,cat\n", "'0.png'"),
    "backslashes": (HEADER + "cat\\0.png,cat\n", "/ between folders"),
}


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_that_cannot_be_meant_is_named_with_its_cure(folder, kind):
    content, message = INDICES[kind]
    (folder / "labels.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    error = str(problem(folder, index="labels.csv"))
    assert message in error and len(error) < 6000 and str(folder) in error


READABLE = {
    "a space after the comma": "image_path, label\ncat/0.png, cat\ndog/0.png, dog\n",
    "quotes": HEADER + '"cat/0.png","cat"\n"dog/0.png","dog"\n',
    "line ends of Windows": "image_path,label\r\ncat/0.png,cat\r\ndog/0.png,dog\r\n",
    "line ends of old Macs": "image_path,label\rcat/0.png,cat\rdog/0.png,dog\r",
    "a byte order mark": "\ufeffimage_path,label\ncat/0.png,cat\ndog/0.png,dog\n",
    "empty lines": HEADER + "\ncat/0.png,cat\n\n\ndog/0.png,dog\n\n",
    "long ways": HEADER + "./cat/0.png,cat\ncat/../dog//0.png,dog\n",
    "more columns": "id,label,image_path\n1,cat,cat/0.png\n2,dog,dog/0.png\n",
}


def test_an_index_that_can_be_meant_is_read(folder):
    for kind, content in READABLE.items():
        (folder / "labels.csv").write_bytes(content.encode())
        index = open_rows(DatasetParam(str(folder), 8, index="labels.csv"), 2)
        assert index.classes == ("cat", "dog") and index.labels.tolist() == [0, 1], kind
        assert index.paths == (f"{folder}/cat/0.png", f"{folder}/dog/0.png"), kind


def test_one_name_in_two_unicode_forms_is_one_class_and_a_hint_for_a_file(folder):
    (folder / "labels.csv").write_text(HEADER + "cat/0.png,e\u0301\ncat/1.png,\xe9\n", encoding="utf-8")
    assert open_rows(DatasetParam(str(folder), 8, index="labels.csv"), 1).classes == ("\xe9",)
    (folder / "cat/0.png").rename(folder / "cat/e\u0301.png")
    (folder / "labels.csv").write_text(HEADER + "cat/\xe9.png,cat\n", encoding="utf-8")
    assert r"('e\u0301.png')" in str(problem(folder, index="labels.csv"))


CACHES = {
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 200_000,
    "endless shards": json.dumps({"shard_images": 0}).encode(),
    "an unknown key": json.dumps({"shards": 3}).encode(),
    "more rows than images": json.dumps({"num_images": 10**12}).encode(),
}


@pytest.mark.parametrize("kind", CACHES)
def test_an_index_of_latents_that_cannot_be_meant_is_named(tmp_path, kind):
    identity = {"autoencoder": "a", "autoencoder_dtype": "fp32", "image_size": 8}
    good = {"identity": identity, "num_images": 1, "shard_images": 1}
    content = CACHES[kind]
    if content.startswith(b"{") and content.endswith(b"}"):
        content = json.dumps({**good, **json.loads(content)}).encode()
    (tmp_path / "index.json").write_bytes(content)
    (tmp_path / "images.csv").write_text(HEADER + "cat/0.png,0\n")
    with pytest.raises((ConfigError, DataError), match=re.escape(str(tmp_path))):
        open_rows(DatasetParam(str(tmp_path / "gone"), 8, latents=str(tmp_path)), 2)
