"""Several conditions of one sample: one caption for all that read it, coins of their own or shared."""

import itertools

import numpy as np
import pytest

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions, FirstFrame, PooledText, TextStates, Vector
from mindspeed_mm_dit.data.captions import Tokens
from mindspeed_mm_dit.data.conditions import ConditionBatch, kind_of, request_arrays, unconditional_arrays
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.errors import ConfigError, DataError

ROWS = 5
SAMPLE_INDICES = np.arange(400)


def letters(offset):
    """Return a tokenizer whose ids are the letters of a caption, moved on by ``offset``."""

    def tokenizer(captions):
        ids = np.array([[ord(letter) + offset for letter in caption.ljust(3)] for caption in captions], np.int64)
        return Tokens(ids, np.array([[letter != " " for letter in c.ljust(3)] for c in captions], np.int64))

    return tokenizer


TOKENIZERS = [letters(0), letters(1000)]


def rows(vectors=None):
    captions = tuple((f"{n}a", f"{n}b", f"{n}c") for n in range(ROWS))
    vectors = np.eye(ROWS, 4, dtype=np.float32) if vectors is None else vectors
    return Rows(tuple(map(str, range(ROWS))), {"label": np.arange(ROWS), "caption": captions, "vector": vectors})


def batch(conditions, given=None):
    coins, numbers = conditions.dropout_keys(), SAMPLE_INDICES % ROWS
    arrays = {}
    for condition in conditions:
        fed = ConditionBatch(given or rows(), 7, coins[condition.dropout_key], 0.3, TOKENIZERS)
        arrays |= kind_of(condition).collator(condition, fed).arrays(numbers, SAMPLE_INDICES)
    return arrays


def test_two_encoders_of_one_caption_have_coins_of_their_own():
    frame = FirstFrame((1, 3, 4, 4), 1, dropout=0.2)
    found = batch(Conditions(TextStates(3, 8), PooledText(6, encoder=1), ClassLabel(ROWS, 0.2), frame))
    assert list(found) == ["caption_ids", "caption_mask", "pooled_ids", "pooled_mask", "labels", "frames_kept"]
    states, pooled = found["caption_mask"].any(1), found["pooled_mask"].any(1)
    both = states & pooled
    np.testing.assert_array_equal(found["caption_ids"][both] + 1000, found["pooled_ids"][both])
    dropped = [~states, ~pooled, found["labels"] == ROWS, found["frames_kept"] == 0]
    assert [0.1 < drops.mean() < 0.4 for drops in dropped] == [True] * 4
    assert all((one != other).any() for one, other in itertools.pairwise(dropped))


def test_conditions_of_one_coin_are_dropped_together():
    found = batch(
        Conditions(TextStates(3, 8, shared_dropout_key="text"), PooledText(6, encoder=1, shared_dropout_key="text"))
    )
    np.testing.assert_array_equal(found["caption_ids"] + 1000, found["pooled_ids"])
    assert 0 < (~found["caption_mask"].any(1)).sum() < len(SAMPLE_INDICES)


def test_a_condition_beside_others_is_dropped_where_it_is_alone():
    alone = batch(Conditions(ClassLabel(ROWS, 0.2)))
    extra_images = batch(Conditions(ClassLabel(ROWS, 0.2), Vector(4, 0.5)))
    np.testing.assert_array_equal(alone["labels"], extra_images["labels"])
    dropped = ~extra_images["vector"].any(1) & (SAMPLE_INDICES % ROWS < 4)
    assert 0.3 < dropped.sum() / 320 < 0.7


def test_what_is_asked_for_has_the_arrays_of_a_training_batch():
    conditions = Conditions(TextStates(3, 8), PooledText(6, encoder=1), Vector(4, 0.1), ClassLabel(ROWS, 0.2))
    asked = request_arrays(conditions, {"caption": ["0a"], "vector": [np.ones(4)], "label": [3]}, TOKENIZERS)
    unconditional = unconditional_arrays(conditions, {"caption": "no"}, TOKENIZERS)
    shapes = {name: array.shape[1:] for name, array in batch(conditions).items()}
    for arrays in (asked, unconditional):
        assert {name: array.shape[1:] for name, array in arrays.items()} == shapes
    assert unconditional["labels"].tolist() == [ROWS] and not unconditional["vector"].any()
    np.testing.assert_array_equal(unconditional["caption_ids"], TOKENIZERS[0](["no"]).ids)


def test_unusable_conditions_are_refused():
    pytest.raises(ConfigError, batch, Conditions(Vector(4, 0.1)), rows(np.eye(ROWS, 3))).match("vector of width 4")
    with pytest.raises(DataError, match="has a vector that is not finite"):
        batch(Conditions(Vector(4, 0.1)), rows(np.full((ROWS, 4), np.nan)))
    with pytest.raises(ConfigError, match="'text': is the name of two conditions"):
        Conditions(TextStates(3, 8), TextStates(3, 8, encoder=1))
