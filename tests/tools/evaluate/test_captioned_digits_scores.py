import numpy as np
import pytest

from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.tools.evaluate.demo import DIGIT_OF, SEEN, UNSEEN, captions_of, read_digits
from mindspeed_mm_dit.tools.evaluate.digits import CAPTIONS, score_captioned_digits


def real(digits):
    """A real image of each of ``digits``, of those that the classifier was not fitted on."""
    found = read_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[1200:, :, :, None]
    return np.stack([images[np.flatnonzero(found.labels[1200:] == digit)[n % 40]] for n, digit in enumerate(digits)])


def test_real_digits_are_read_as_asked():
    right = [DIGIT_OF[caption] for caption in CAPTIONS]
    found = score_captioned_digits(real(right), CAPTIONS)
    assert found.seen > 0.95 and found.unseen > 0.95 and found.images == 400
    wrong = [digit if n < 200 else (digit + 1) % 10 for n, digit in enumerate(right)]
    found = score_captioned_digits(real(wrong), CAPTIONS)
    assert found.seen > 0.95 and found.unseen < 0.05


def test_phrasings_ask_for_each_digit_equally():
    seen = {caption for digit in range(10) for caption in captions_of(digit, SEEN)}
    assert len(CAPTIONS) == 400 and [caption in seen for caption in CAPTIONS] == [True] * 200 + [False] * 200
    for kind in (CAPTIONS[:200], CAPTIONS[200:]):
        assert np.bincount([DIGIT_OF[caption] for caption in kind]).tolist() == [20] * 10
    assert set(CAPTIONS[200:]) == {caption for digit in range(10) for caption in captions_of(digit, UNSEEN)}


def test_caption_of_something_else_is_refused():
    with pytest.raises(DataError, match="a dog"):
        score_captioned_digits(real([1, 2]), ("the number 1", "a dog"))
