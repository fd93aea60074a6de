"""A run on images with labels: those to train on, those held out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.data import DataConfig, DatasetParam
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.dataset import Draw, TrainingSamples, build_samples, check_fit, check_sizes
from mindspeed_mm_dit.data.draws import Stream, coins
from mindspeed_mm_dit.data.folder import ImageIndex, open_index, split_index
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.classes import say_data
from mindspeed_mm_dit.training.mm_args import MultiModalArguments
from mindspeed_mm_dit.training.replay import Sample


class LabelledImages:
    """The images of data.json, split by the seed alone (a ``data_sets.DataSet``)."""

    noun = "image"

    def __init__(self, mm: MultiModalArguments, seed: int) -> None:
        assert isinstance(mm.data, DataConfig)
        _check_model(mm.model)
        check_sizes(mm.model, mm.data)
        self._model, self._data, self._seed = mm.model, mm.data, seed
        param = self._data.dataset_param
        index = _index(param, self._model.num_classes)
        self._train, self._valid = split_index(index, param.valid_fraction, seed)
        self.num_train, self.num_valid = len(self._train), len(self._valid)

    def check(self, global_batch_size: int) -> None:
        """Raise ConfigError or DataError where model.json, data.json and the batch size contradict each other."""
        check_fit(self._model, self._data, self.num_train, global_batch_size)

    def samples(self, draw: Draw, held_out: bool = False) -> TrainingSamples:
        """Return the samples to train on, or those held out, by position."""
        index = self._valid if held_out else self._train
        return build_samples(self._model, self._data, index, self._seed, 1, draw)

    def facts(self) -> dict[str, Any]:
        """Return what every checkpoint keeps of the images, as fields of MultiModalArguments."""
        return {"classes": self._train.classes, "pictures": self._train.pictures}

    def example_captions(self) -> tuple[str, ...]:
        """Return none."""
        return ()

    def named(self, positions: np.ndarray) -> list[Sample]:
        """Return which images stand at ``positions`` (B,), with the names of their classes."""
        images, dropout = self._train, self._model.predictor.condition.dropout
        rows = SampleOrder(len(images), self._seed, self._data.dataloader_param.shuffle).images(positions).tolist()
        dropped = coins(self._seed, Stream.LABEL_DROP, positions, dropout).tolist()
        return [
            Sample(position, images.paths[row], images.classes[images.labels[row]], drop)
            for position, row, drop in zip(positions.tolist(), rows, dropped)
        ]

    def say(self) -> None:
        """Print what the run learns from, what is left out of it, and what in it looks like a mistake."""
        say_data(self._train, self._valid, self._model.num_classes)


def _check_model(model: ModelConfig) -> None:
    if model.reads_texts:
        raise ConfigError(
            f"data.json: dataset_param.dataset_type = {DatasetParam.dataset_type!r}",
            f"predictor {model.predictor.model_id!r} learns clips by their captions",
            'use a data.json with dataset_type "clips" (docs/clips.md)',
        )


@lru_cache(maxsize=1)
def _index(param: DatasetParam, num_classes: int) -> ImageIndex:
    """Open an index once a process: checking every image takes a while."""
    return open_index(param, num_classes)
