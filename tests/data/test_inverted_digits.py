"""The built-in set to fine-tune on, and what the score says of it."""

import re

import numpy as np
from PIL import Image

from mindspeed_mm_dit.data.builtin import IMAGES
from mindspeed_mm_dit.tools.evaluate.demo import read_digits
from mindspeed_mm_dit.tools.evaluate.demo_judges import BUILT_IN


def test_it_is_four_of_each_digit_black_on_white(tmp_path):
    IMAGES["inverted_digits"].write(tmp_path / "inverted_digits")
    files = sorted((tmp_path / "inverted_digits").glob("*/*.png"))
    assert [sum(file.parent.name == str(label) for file in files) for label in range(10)] == [4] * 10
    images = np.stack([np.asarray(Image.open(file)) for file in files])
    assert images.shape == (40, 8, 8) and (images > 127).mean() > 0.6
    digits = read_digits()
    first = np.flatnonzero(digits.labels == 7)[0]
    assert np.array_equal(255 - images[28], np.round(digits.images[first] * (255 / 16)).astype(np.uint8))


def test_the_score_reads_their_inverse():
    digits = read_digits()
    white = np.round(digits.images[1200:] * (255 / 16)).astype(np.uint8)[..., None]
    asked = {"label": digits.labels[1200:]}
    scores = (BUILT_IN["inverted_digits", "label"].score(images, asked) for images in (255 - white, white))
    black, unchanged = (float(re.match(r"inverted, digits score: ([\d.]+)%", score)[1]) for score in scores)
    assert black > 95 and unchanged < 20
