"""A source and a condition from outside the package: what a batch has of them, refused where they do not fit."""

import dataclasses
import json

import numpy as np
import pytest

from mindspeed_mm_dit.configs.data import SOURCE_CONFIGS, load_data_config
from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.data.conditions import CONDITIONS, register_condition
from mindspeed_mm_dit.data.order import Stream, bernoulli
from mindspeed_mm_dit.data.sources import SOURCES, register_source
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.models.registry import register_predictor
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.external.condition import ANGLE, Angle, TurnedConfig, on_circle
from tests.external.source import TURNED, write_turned

IMAGES = 12


@pytest.fixture
def joined():
    register_source("turned", TURNED)
    register_condition(Angle, ANGLE)
    register_predictor(TurnedConfig)
    yield
    del SOURCES["turned"], CONDITIONS["tests.external.condition.Angle"], PREDICTOR_CONFIGS["turned"]


@pytest.fixture
def param(joined, tmp_path):
    section = write_turned(tmp_path, IMAGES, 8)
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": section}))
    return load_data_config(tmp_path / "data.json").dataset_param


@pytest.fixture
def model(joined, model_json):
    predictor = {"model_id": "turned", "side": 8, "classes": 3, "in_channels": 1}
    return model_config_from_mapping({**model_json, "predictor": predictor}, "model.json")


def test_a_condition_is_dropped_by_a_coin_of_its_own(model, param):
    opened = open_data(model, param)
    samples = opened.samples(opened.rows, 3, True, training_draw(model.diffusion))
    batch, sample_indices = samples.batch(np.arange(40)), np.arange(40)
    drops = bernoulli(3, Stream.LABEL_DROP, sample_indices, 0.2, block=1)  # the second
    expected = np.where(drops[:, None], 0, on_circle(opened.rows.items["angle"][samples.order.images(sample_indices)]))
    np.testing.assert_array_equal(batch["angle"], expected)
    assert 0 < drops.sum() < 40 and (batch["labels"] == 3).tolist() != drops.tolist()


def test_data_that_does_not_fit_is_refused(model, model_json, param):
    by_label = model_config_from_mapping(model_json, "model.json")
    assert len(open_data(by_label, param).rows) == IMAGES  # an item more than is asked for is no harm
    with pytest.raises(ConfigError, match="conditioned on the angle"):
        open_data(model, SOURCE_CONFIGS["image_folder"](param.data_folder, 8))
    with pytest.raises(DataError, match=r"turned\.npz: holds no turned images"):
        open_data(model, dataclasses.replace(param, data_folder=param.data_folder + "/none"))
    pytest.raises(ConfigError, register_source, "clips", TURNED).match("registered already")
