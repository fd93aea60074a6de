"""Pictures of samples: what stands before the rows, in which order, and in which letters."""

from __future__ import annotations

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from mindspeed_mm_dit.data.captions import varied
from mindspeed_mm_dit.sampling import fonts
from mindspeed_mm_dit.sampling.grid import _texts, captioned, draw_grid
from mindspeed_mm_dit.sampling.image_files import draw_sizes


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Set the font files of the system, and forget what was found before."""

    def here(*paths):
        monkeypatch.setattr(fonts, "_system_fonts", lambda: [str(path) for path in paths])
        for remembered in (fonts._fonts, fonts._letters_of, fonts._say_missing):
            remembered.cache_clear()

    yield here
    monkeypatch.undo()
    for remembered in (fonts._fonts, fonts._letters_of, fonts._say_missing):
        remembered.cache_clear()


def write_font(path, letter):
    """Write a font whose one letter is a full square."""
    pen = TTGlyphPen(None)
    for step, corner in (
        (pen.moveTo, (0, 0)),
        (pen.lineTo, (0, 900)),
        (pen.lineTo, (900, 900)),
        (pen.lineTo, (900, 0)),
    ):
        step(corner)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "letter"])
    builder.setupCharacterMap({ord(letter): "letter"})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "letter": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "letter": (1000, 0)})
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Square", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path


def test_a_name_that_no_font_here_has_is_a_number_and_that_is_said_once(here, capsys):
    here()
    titles = ["élan", "猫", "x" * 50]
    for _ in range(2):
        assert [text for text, _ in _texts(titles)] == ["élan", "1", "x" * 37 + "..."]
    said = capsys.readouterr().err
    assert said.count("no font here has all letters of 猫") == 1 and "fonts-noto-cjk" in said


def test_a_font_of_the_system_that_has_the_letters_draws_them(here, tmp_path, capsys):
    (tmp_path / "damaged.ttf").write_bytes(b"no font")
    boxes = write_font(tmp_path / "LastResort.ttf", "猫")
    here(tmp_path / "damaged.ttf", boxes)
    assert _texts(["猫"])[0][0] == "0"
    here(tmp_path / "damaged.ttf", write_font(tmp_path / "Square-Regular.ttf", "猫"))
    (text, font), (other, _) = _texts(["猫", "狗"])
    assert (text, other) == ("猫", "1") and font.path == f"{tmp_path}/Square-Regular.ttf"
    capsys.readouterr()
    grid = np.asarray(draw_grid(np.full((1, 48, 48, 3), 255, np.uint8), ["猫"]))
    assert (grid == 0).all(axis=-1).sum() > 100, "the square of 13 points is black"


def test_a_name_that_lacks_a_letter_keeps_the_others(here, capsys):
    here()
    assert [text for text, _ in _texts(["élan 猫", "a 猫 moves"])] == ["élan ?", "a ? moves"]
    assert "question marks stand in the picture" in capsys.readouterr().err


def test_a_caption_stands_above_a_grid_with_a_border_and_widens_it_where_it_must():
    grid = Image.new("RGB", (30, 40), "blue")
    whole = np.asarray(captioned(grid, "step 200: ddim, 20 steps"))
    assert whole.shape[0] == 40 + 22 + 16 and whole.shape[1] > 100
    assert (whole[30:70, 8:38] == [0, 0, 255]).all() and (whole[:, :8] == 255).all() and (whole[:30] < 128).any()


def test_each_caption_has_one_row_of_all_sizes():
    shades = [
        np.full((8, *size, 3), 20 * number, np.uint8) for number, size in enumerate([(24, 40), (40, 24), (32, 32)])
    ]
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
