"""Captions above the frames of clips."""

import numpy as np

from mindspeed_mm_dit.sampling import pictures
from mindspeed_mm_dit.sampling.outputs import draw_strips

CLIP = np.zeros((1, 3, 48, 48, 1), np.uint8)


def drawn(caption):
    return np.asarray(draw_strips(CLIP, [caption]))


def test_captions_are_drawn_in_their_script_or_end_in_dots():
    assert not np.array_equal(drawn("\u0441\u0435\u043c\u044c"), drawn("????"))
    assert np.array_equal(drawn("a " * 200), drawn("a " * 300)) and not np.array_equal(drawn("a " * 200), drawn("a"))


def test_letters_that_no_font_has_are_question_marks(monkeypatch):
    monkeypatch.setattr(pictures, "_fonts", lambda: ())
    pictures._log_missing.cache_clear()
    assert np.array_equal(drawn("\u732b moves"), drawn("? moves"))
