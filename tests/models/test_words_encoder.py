"""``words``: captions are told apart by their words alone, on both frameworks, and nothing is installed."""

from collections import namedtuple

import numpy as np
import pytest

from mindspeed_mm_dit.configs.text_encoder import WordsConfig
from mindspeed_mm_dit.data.captions import caption_problems
from mindspeed_mm_dit.models.registry import load_text_encoder
from mindspeed_mm_dit.models.words_encoder import known_words_of, note_of_words


@pytest.fixture
def encoded(framework):
    def encode(*captions, **settings):
        found = load_text_encoder(WordsConfig(**{"max_length": 8, **settings})).encode(captions)
        return [framework.ops.numpy(array) for array in found]

    return encode


def test_a_caption_is_its_words_and_an_end_and_the_padding_is_zero(encoded):
    states, mask, pooled = encoded("A red Car, &quot;parked&quot;", "一只猫 here", "")
    assert states.shape == (3, 8, 256) and pooled.shape == (3, 256) and states.dtype == np.float32
    assert mask.sum(1).tolist() == [5, 5, 1] and not states[mask == 0].any()
    assert (states[0, 1] ** 2).mean() == pytest.approx(1.25, abs=0.3)  # (a word, and half of the one before)


def test_letters_of_either_size_are_one_and_the_order_of_words_is_told(encoded):
    states, _, pooled = encoded("red car blue sky", "RED CAR Blue Sky", "blue car red sky", "red car green sky")
    assert np.array_equal(states[0], states[1])
    assert abs(states[0, 1] - states[2, 1]).max() > 0.5 and np.allclose(states[0, 1], states[3, 1])
    alike = np.corrcoef(pooled)
    assert alike[0, 3] > 0.6 and alike[0, 2] > 0.9 and alike[0, 2] < 1


def test_a_caption_without_words_or_too_long_is_named(framework):
    tokenizer = load_text_encoder(WordsConfig(max_length=4)).tokenizer
    problems = caption_problems(tokenizer, ["three words here", "!?", "four words are here"])
    assert problems[0] == "" and "has no words" in problems[1] and "has a caption of 5 tokens" in problems[2]


def test_words_that_no_caption_had_are_noted():
    model = namedtuple("Model", "text_encoders")((WordsConfig(), WordsConfig(width=8)))
    learned = known_words_of(model, ["A red Car", "blue sky, red CAR", "一只猫"])
    assert learned == ["a", "red", "car", "blue", "sky", "一", "只", "猫"]
    assert note_of_words(model, learned, ["a BLUE car", "猫"]) == note_of_words(model, (), ["zebra"]) == ""
    assert "'blew', 'zebra'" in note_of_words(model, learned, ["a blew car", "a zebra"])
    assert known_words_of(model, map(str, range(10_001))) == []
