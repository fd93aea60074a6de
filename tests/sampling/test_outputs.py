"""Pictures of samples: what stands before the rows, in which order and letters; they come whole, or not at all."""

import errno
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.data.captions import varied
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.sampling import pictures
from mindspeed_mm_dit.sampling.outputs import GeneratedSamples, Output, draw_sizes, draw_strips
from mindspeed_mm_dit.sampling.pictures import _texts, captioned, draw_grid


@pytest.fixture
def no_fonts(monkeypatch):
    """A system without font files; what was found before is forgotten."""
    remembered = (pictures._fonts, pictures._letters_of, pictures._log_missing)
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "_system_fonts", list)
        for each in remembered:
            each.cache_clear()
        yield
    for each in remembered:
        each.cache_clear()


def test_name_that_no_font_has_is_a_number(no_fonts, capsys):
    titles = ["élan", "猫", "x" * 50, "élan 猫", "a 猫 moves"]
    for _ in range(2):
        assert [text for text, _ in _texts(titles)] == ["élan", "1", "x" * 37 + "...", "élan ?", "a ? moves"]
    assert capsys.readouterr().err.count("no installed font") == 3


def test_a_caption_stands_above_a_grid_with_a_border_and_widens_it_where_it_must():
    grid = Image.new("RGB", (30, 40), "blue")
    whole = np.asarray(captioned(grid, "step 200: ddim, 20 steps"))
    assert whole.shape[0] == 40 + 22 + 16 and whole.shape[1] > 100
    assert (whole[30:70, 8:38] == [0, 0, 255]).all() and (whole[:, :8] == 255).all() and (whole[:30] < 128).any()


def test_each_caption_has_one_row_of_all_sizes():
    sizes = [(24, 40), (40, 24), (32, 32)]
    shades = [np.full((8, *size, 3), 20 * number, np.uint8) for number, size in enumerate(sizes)]
    captions = [f"caption {number}" for number in range(8)]
    assert draw_sizes(shades, captions).height == 8 * (80 + 2)
    wide = draw_sizes([np.zeros((8, 256, 256, 3), np.uint8)], captions)
    assert wide.height == 4 * (256 + 2) and wide.width > 2 * 256  # (columns, where one would be narrow and high)
    grid = np.asarray(draw_sizes(shades, captions))[40]
    assert [(grid == [20 * number] * 3).all(1).any() for number in range(3)] == [True] * 3


def test_captions_to_sample_are_of_every_kind():
    captions = [f"a {kind} number {number}" for kind in ("cat", "dog", "lake") for number in range(500)]
    chosen = varied(captions, 8)
    assert len(set(chosen)) == 8 and {caption.split()[1] for caption in chosen[:3]} == {"cat", "dog", "lake"}
    assert varied(["a", "b"], 8) == ["a", "b"] and len(varied(["一只猫", "一只狗", "湖"], 2)) == 2


def test_rows_stand_in_the_order_asked_for():
    images = np.zeros((3, 48, 48, 3), np.uint8) + np.array([10, 20, 30], np.uint8)[:, None, None, None]
    grid = np.asarray(draw_grid(images, ["7", "2", "5"]))
    assert grid[[24, 74, 124], -10, 0].tolist() == [10, 20, 30]


def drawn(caption):
    return np.asarray(draw_strips(np.zeros((1, 3, 48, 48, 1), np.uint8), [caption]))


def test_captions_are_drawn_in_their_script_or_end_in_dots():
    assert not np.array_equal(drawn("\u0441\u0435\u043c\u044c"), drawn("????"))
    assert np.array_equal(drawn("a " * 200), drawn("a " * 300)) and not np.array_equal(drawn("a " * 200), drawn("a"))


def test_letters_of_strips_that_no_font_has_are_question_marks(no_fonts):
    assert np.array_equal(drawn("\u732b moves"), drawn("? moves"))


IMAGES = np.zeros((2, 8, 8, 3), np.uint8)
VIDEOS = np.zeros((2, 3, 8, 8, 1), np.uint8)


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def save(name, samples=IMAGES):
    return Output(str(name), 8).save(GeneratedSamples(samples, ("1", "2"), np.array([1, 2]), 0), {})


@pytest.mark.parametrize(("name", "samples", "files", "said"), [
    ("new/s.npz", IMAGES, ["new", "new/s.npz"], "new/s.npz"),
    ("s.png", IMAGES, ["s.png"], "s.png"),
    ("s.html", IMAGES, ["s.html"], "s.html"),
    ("own/", IMAGES, ["own", "own/000000_1.png", "own/000001_2.png"], "own/"),
    ("v.gif", VIDEOS, ["v-0000.gif", "v-0001.gif"], "v-0000.gif ... v-0001.gif"),
    ("v.png", VIDEOS, ["v.png"], "v.png"),
])  # fmt: skip
def test_every_kind_of_output_leaves_its_files_alone(tmp_path, name, samples, files, said):
    for _ in range(2):  # what was there is replaced
        assert save(f"{tmp_path}/{name}", samples) == f"{tmp_path}/{said}"
        assert names_in(tmp_path) == files


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "s.png").symlink_to("there/own.png")
    save(tmp_path / "s.png")
    assert (tmp_path / "s.png").is_symlink() and Image.open(tmp_path / "there/own.png").size[0] > 8


@pytest.mark.parametrize("name", ["s.npz", "s.png", "own/", "v.gif"])
def test_full_disk_leaves_nothing_of_the_output(tmp_path, monkeypatch, name):
    (tmp_path / "s.npz").write_bytes(b"before")

    def full(file, *given, **more):
        if isinstance(file, Path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", lambda file, *arrays: file.write(b"half") and full(Path(file.name)))
    monkeypatch.setattr(Image.Image, "save", lambda image, file, *how, **more: full(file))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PlatformError, match=r"--output = .* No space left on device"):
        save(f"{tmp_path}/{name}", VIDEOS if name == "v.gif" else IMAGES)
    assert [name for name in names_in(tmp_path) if name != "own"] == ["s.npz"]
    assert (tmp_path / "s.npz").read_bytes() == b"before"
