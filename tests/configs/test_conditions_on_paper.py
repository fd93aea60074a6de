"""Conditions and predictors on the meta backend: what their defaults say, and what a plugin may not declare."""

import argparse
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.configs import run
from mindspeed_mm_dit.configs.condition import TextStates, Vector
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.models.weight_adapters import WeightAdapter, shape_of


def test_last_example_of_a_vector_is_its_null_if_dropped():
    for dropout in (0.0, 0.1):
        vector = Vector(width=4, dropout=dropout)
        examples = vector.examples(3)["vector"]
        assert examples.shape == (3, 4) and examples.dtype == np.float32 and examples[:-1].all()
        assert examples[-1].any() != vector.has_unconditional
        assert not vector.unconditional(2)["vector"].any()
    with pytest.raises(ConfigError, match="predictor: its text: has an unconditional value that only a text encoder"):
        TextStates(length=3, width=4).unconditional(2)


def test_predictor_splits_no_sample_and_lacks_nothing_by_default():
    plain = SimpleNamespace()
    PredictorConfig.check_context_parallel(plain, 1)
    with pytest.raises(ConfigError, match="--context-parallel-size = 2: this predictor cannot split a sample"):
        PredictorConfig.check_context_parallel(plain, 2)
    assert not WeightAdapter(None).is_optional("a.weight") and PredictorConfig.settings_of_size(plain) == {}


def test_missing_tensor_and_other_dimensions_are_refused():
    assert shape_of({"a": (2, 3)}, "a", 2) == (2, 3)
    for name, words in (("a", r"SOURCE: a is \(2, 3\), expected 4 dimensions"), ("b", "SOURCE: b is missing")):
        pytest.raises(CheckpointError, shape_of, {"a": (2, 3)}, name, 4).match(words)


def test_a_setting_of_an_optimizer_that_is_a_flag_already_is_named(monkeypatch):
    @dataclasses.dataclass
    class Config:
        lr: float = dataclasses.field(default=1.0, metadata={"help": "a rate of its own", "how": {}})

    monkeypatch.setattr(run, "settings", lambda: {"lr": (dataclasses.fields(Config)[0], ["sophia"])})
    monkeypatch.setitem(run.OPTIMIZERS, "sophia", SimpleNamespace(config=Config))
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    with pytest.raises(ConfigError, match="setting 'lr' of the optimizer 'sophia': is a flag of this command already"):
        run.optimizer_settings(parser)
