"""Several conditions of one sample: one caption for all that read it, coins of their own or shared; a plugin's too."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions, FirstFrame, PooledText, TextStates, Vector
from mindspeed_mm_dit.configs.data import SOURCE_CONFIGS, load_data_config
from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.data import conditions as known
from mindspeed_mm_dit.data.captions import Tokens
from mindspeed_mm_dit.data.conditions import CollatorInputs, kind_of, request_arrays, unconditional_arrays
from mindspeed_mm_dit.data.order import Stream, bernoulli
from mindspeed_mm_dit.data.sources import SOURCES, Rows, register_source
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.models.registry import register_predictor
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.external.condition import ANGLE, Angle, TurnedConfig, on_circle
from tests.external.source import TURNED, write_turned

ROWS = 5
SAMPLE_INDICES = np.arange(400)


def letters(offset):
    """Return a tokenizer whose ids are the letters of a caption, moved on by ``offset``."""

    def tokenizer(captions):
        padded = [caption.ljust(3) for caption in captions]
        ids = np.array([[ord(letter) + offset for letter in caption] for caption in padded], np.int64)
        return Tokens(ids, np.array([[letter != " " for letter in caption] for caption in padded], np.int64))

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
        fed = CollatorInputs(given or rows(), 7, coins[condition.dropout_key], 0.3, TOKENIZERS)
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


def test_coins_are_shared_or_each_condition_s_own():
    shared = {"shared_dropout_key": "text"}
    found = batch(Conditions(TextStates(3, 8, **shared), PooledText(6, encoder=1, **shared)))
    np.testing.assert_array_equal(found["caption_ids"] + 1000, found["pooled_ids"])
    assert 0 < (~found["caption_mask"].any(1)).sum() < len(SAMPLE_INDICES)
    alone, beside = batch(Conditions(ClassLabel(ROWS, 0.2))), batch(Conditions(ClassLabel(ROWS, 0.2), Vector(4, 0.5)))
    np.testing.assert_array_equal(alone["labels"], beside["labels"])
    dropped = ~beside["vector"].any(1) & (SAMPLE_INDICES % ROWS < 4)
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
    vector = Conditions(Vector(4, 0.1))
    pytest.raises(ConfigError, batch, vector, rows(np.eye(ROWS, 3))).match("vector of width 4")
    pytest.raises(DataError, batch, vector, rows(np.full((ROWS, 4), np.nan))).match("vector that is not finite")
    pytest.raises(ConfigError, Conditions, TextStates(3, 8), TextStates(3, 8, encoder=1)).match("'text'")


IMAGES = 12


@pytest.fixture
def param(tmp_path):
    """The data of a plugin, whose source, condition and network are known for a while."""
    register_source("turned", TURNED)
    known.register_condition(Angle, ANGLE)
    register_predictor(TurnedConfig)
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": write_turned(tmp_path, IMAGES, 8)}))
    yield load_data_config(tmp_path / "data.json").dataset_param
    del SOURCES["turned"], known.CONDITIONS["tests.external.condition.Angle"], PREDICTOR_CONFIGS["turned"]


@pytest.fixture
def model(param, model_json):
    predictor = {"model_id": "turned", "side": 8, "classes": 3, "in_channels": 1}
    return model_config_from_mapping({**model_json, "predictor": predictor}, "model.json")


def test_condition_of_a_plugin_is_dropped_by_a_coin_of_its_own(model, param):
    opened = open_data(model, param)
    samples = opened.samples(opened.rows, 3, True, training_draw(model.diffusion))
    batch, sample_indices = samples.batch(np.arange(40)), np.arange(40)
    drops = bernoulli(3, Stream.LABEL_DROP, sample_indices, 0.2, block=1)  # the second
    expected = np.where(drops[:, None], 0, on_circle(opened.rows.items["angle"][samples.order.images(sample_indices)]))
    np.testing.assert_array_equal(batch["angle"], expected)
    assert 0 < drops.sum() < 40 and (batch["labels"] == 3).tolist() != drops.tolist()


def test_data_of_a_plugin_that_does_not_fit_is_refused(model, model_json, param):
    by_label = model_config_from_mapping(model_json, "model.json")
    assert len(open_data(by_label, param).rows) == IMAGES  # an item more than is asked for is no harm
    folder = SOURCE_CONFIGS["image_folder"](param.data_folder, 8)
    pytest.raises(ConfigError, open_data, model, folder).match("conditioned on the angle")
    nowhere = dataclasses.replace(param, data_folder=param.data_folder + "/none")
    pytest.raises(DataError, open_data, model, nowhere).match(r"turned\.npz")
    pytest.raises(ConfigError, register_source, "clips", TURNED).match("registered already")
