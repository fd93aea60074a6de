"""Pictures of samples: what stands before the rows, in which order, and in which letters."""

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.data.captions import varied
from mindspeed_mm_dit.sampling import pictures
from mindspeed_mm_dit.sampling.outputs import draw_sizes
from mindspeed_mm_dit.sampling.pictures import _texts, captioned, draw_grid


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Set the font files of the system, and forget what was found before."""

    def here(*paths):
        monkeypatch.setattr(pictures, "_system_fonts", lambda: [str(path) for path in paths])
        for remembered in (pictures._fonts, pictures._letters_of, pictures._log_missing):
            remembered.cache_clear()

    yield here
    monkeypatch.undo()
    for remembered in (pictures._fonts, pictures._letters_of, pictures._log_missing):
        remembered.cache_clear()


def test_name_that_no_font_has_is_a_number(here, capsys):
    here()
    titles = ["élan", "猫", "x" * 50, "élan 猫", "a 猫 moves"]
    for _ in range(2):
        assert [text for text, _ in _texts(titles)] == ["élan", "1", "x" * 37 + "...", "élan ?", "a ? moves"]
    assert capsys.readouterr().err.count("no installed font has all letters of") == 3


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
