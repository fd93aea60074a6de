"""What a run learns from, whatever its kind: opened once a process, and checked against model.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from mindspeed_mm_dit.configs.clips import ClipsParam
from mindspeed_mm_dit.configs.data_kinds import IMAGES
from mindspeed_mm_dit.data.dataset import Draw
from mindspeed_mm_dit.data.loader import BatchSource
from mindspeed_mm_dit.training.captioned_clips import CaptionedClips
from mindspeed_mm_dit.training.labelled_images import LabelledImages
from mindspeed_mm_dit.training.mm_args import MultiModalArguments
from mindspeed_mm_dit.training.replay import Sample


class DataSet(Protocol):
    """The samples of a run, a part of them held out; the split depends on the seed alone."""

    noun: str
    """What a sample is."""
    num_train: int
    """Samples to train on."""
    num_valid: int
    """Samples held out."""

    def check(self, global_batch_size: int) -> None:
        """Raise ConfigError or DataError where model.json, data.json and the batch size contradict each other."""

    def samples(self, draw: Draw, held_out: bool = False) -> BatchSource:
        """Return the samples to train on, or those held out, by position; ``draw``: the objective's."""

    def facts(self) -> dict[str, Any]:
        """Return what every checkpoint keeps of the data, as fields of MultiModalArguments."""

    def example_captions(self) -> tuple[str, ...]:
        """Return some captions to draw at the end; none where labels steer the model, or captions are not known."""

    def named(self, positions: np.ndarray) -> list[Sample]:
        """Return which samples to train on stand at ``positions`` (B,), in words."""

    def say(self) -> None:
        """Print what the run learns from, what is left out of it, and what in it looks like a mistake."""


DATA_SETS: dict[str, Callable[[MultiModalArguments, int], DataSet]] = {
    **dict.fromkeys(IMAGES, LabelledImages),
    ClipsParam.dataset_type: CaptionedClips,
}


def open_data_set(mm: MultiModalArguments, seed: int) -> DataSet:
    """Open what data.json names; raises ConfigError or DataError."""
    return DATA_SETS[mm.data.dataset_param.dataset_type](mm, seed)
