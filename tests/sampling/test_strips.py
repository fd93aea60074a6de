"""Captions above the frames of clips."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_mm_dit.sampling import fonts
from mindspeed_mm_dit.sampling.video_files import draw_strips

CLIP = np.zeros((1, 3, 48, 48, 1), np.uint8)


def drawn(caption):
    return np.asarray(draw_strips(CLIP, [caption]))


def test_a_caption_in_another_script_is_drawn_in_it():
    assert not np.array_equal(drawn("\u0441\u0435\u043c\u044c"), drawn("????"))


@pytest.fixture
def no_fonts(monkeypatch):
    monkeypatch.setattr(fonts, "_fonts", lambda: ())
    fonts._say_missing.cache_clear()


def test_letters_that_no_font_has_are_question_marks_and_that_is_said(no_fonts, capsys):
    assert np.array_equal(drawn("\u732b moves"), drawn("? moves"))
    assert "question marks stand in the picture" in capsys.readouterr().err


def test_a_caption_that_is_too_long_ends_in_dots():
    assert np.array_equal(drawn("a " * 200), drawn("a " * 300)) and not np.array_equal(drawn("a " * 200), drawn("a"))
