"""Samples come to their place whole, or not at all."""

import errno
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.sampling.outputs import GeneratedSamples, Output

IMAGES = np.zeros((2, 8, 8, 3), np.uint8)
VIDEOS = np.zeros((2, 3, 8, 8, 1), np.uint8)


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def save(name, samples=IMAGES):
    return Output(str(name), 8).save(GeneratedSamples(samples, ("1", "2"), np.array([1, 2]), 0), {})


@pytest.mark.parametrize(
    ("name", "samples", "files", "said"),
    [
        ("new/s.npz", IMAGES, ["new", "new/s.npz"], "new/s.npz"),
        ("s.png", IMAGES, ["s.png"], "s.png"),
        ("s.html", IMAGES, ["s.html"], "s.html"),
        ("own/", IMAGES, ["own", "own/000000_1.png", "own/000001_2.png"], "own/"),
        ("v.gif", VIDEOS, ["v-0000.gif", "v-0001.gif"], "v-0000.gif ... v-0001.gif"),
        ("v.png", VIDEOS, ["v.png"], "v.png"),
    ],
)
def test_every_kind_of_output_leaves_its_files_alone(tmp_path, name, samples, files, said):
    for _ in range(2):  # what was there is replaced
        assert save(f"{tmp_path}/{name}", samples) == f"{tmp_path}/{said}"
        assert names_in(tmp_path) == files


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "s.png").symlink_to("there/own.png")
    save(tmp_path / "s.png")
    assert (tmp_path / "s.png").is_symlink() and Image.open(tmp_path / "there/own.png").size[0] > 8


@pytest.mark.parametrize(
    ("name", "samples"), [("s.npz", IMAGES), ("s.png", IMAGES), ("own/", IMAGES), ("v.gif", VIDEOS)]
)
def test_full_disk_leaves_nothing_of_the_output(tmp_path, monkeypatch, name, samples):
    (tmp_path / "s.npz").write_bytes(b"before")

    def full(file, *given, **more):
        if isinstance(file, Path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", lambda file, *arrays: file.write(b"half") and full(Path(file.name)))
    monkeypatch.setattr(Image.Image, "save", lambda image, file, *how, **more: full(file))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PlatformError, match=r"--output = .*: cannot be written: No space left on device"):
        save(f"{tmp_path}/{name}", samples)
    assert [name for name in names_in(tmp_path) if name != "own"] == ["s.npz"]
    assert (tmp_path / "s.npz").read_bytes() == b"before"
