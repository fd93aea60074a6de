"""Facts that a starter config is based on: the images, the text encoder for their captions, the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.precision import AUTOCAST, FLOAT32, SHARDED_BF16, Precision
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig

CPU_MINUTES = 20
"""A first run without an accelerator takes at most about this long."""
CORE_FLOP_PER_SECOND = 2e10
"""FLOP/s of a core in such a run; two cores train the embedded digits at 2.5e10 each."""
FEWEST_TO_HOLD_OUT, MOST_HELD_OUT = 50, 2_000
"""Images of which some are held out, and the most that are."""


@dataclass(frozen=True)
class Text:
    """A text encoder for captions."""

    section: dict[str, Any]
    """Section text_encoder of model.json."""
    config: TextEncoderConfig
    """The same, parsed."""
    reason: str
    mentions_sides: bool = False
    """Whether captions mention left or right, so that images must not be mirrored."""

    @property
    def name(self) -> str:
        """Its folder, or its kind if it has none."""
        return str(self.section.get("from_pretrained", self.section["model_id"]))

    @property
    def predictor(self) -> dict[str, Any]:
        """Predictor settings for its output: widths and sequence length."""
        pooled = self.config.pooled_width()
        states = {"text_dim": self.config.states_width(), "text_length": self.config.max_length}
        return states | ({"pooled_dim": pooled} if pooled else {})

    @property
    def is_network(self) -> bool:
        """Whether it is a network, so expensive that a CPU run should cache its output."""
        return self.config.model_id != "words"


@dataclass(frozen=True)
class ImageFacts:
    """Facts about the training images."""

    count: int
    """Number of images."""
    num_classes: int
    """Number of classes; labels are 0 ... num_classes - 1. 0: captions instead."""
    median_side: int
    """Median of their shorter sides, in pixels."""
    all_grey: bool
    """Whether all of them are grey."""
    text: Text | None = None
    """The encoder of their captions."""
    sizes: np.ndarray | None = None
    """(N, 2) int64: height and width of each, if aspect-ratio buckets are allowed."""
    part_cut: float = 0.0
    """Median fraction of an image that a square crop removes."""

    @property
    def valid_fraction(self) -> float:
        """Fraction to hold out: a tenth; less of very many images, none of very few."""
        return 0.0 if self.count < FEWEST_TO_HOLD_OUT else min(0.1, float(f"{MOST_HELD_OUT / self.count:.1g}"))

    @property
    def held_out(self) -> int:
        """Number of images to hold out."""
        return round(self.count * self.valid_fraction)


@dataclass(frozen=True)
class Machine:
    """The machine to train on."""

    name: str
    """Its name in reasons."""
    num_bytes: float
    """Memory of an accelerator or, without one, of the machine."""
    accelerators: int
    """Number of accelerators; 0: train on the CPU."""
    cores: int
    """Cores of the CPU."""
    has_bf16: bool
    """Whether a step may compute in bfloat16."""
    machine_bytes: float = 0
    """Host memory that may hold offloaded weights; infinite if unknown, 0 for none."""

    @property
    def ranks(self) -> int:
        """Number of training processes on PyTorch."""
        return max(1, self.accelerators)

    @property
    def precision(self) -> Precision:
        """Precision of a step: bfloat16 on accelerators that support it."""
        if not self.accelerators or not self.has_bf16:
            return FLOAT32
        return AUTOCAST if self.accelerators == 1 else SHARDED_BF16

    @property
    def flop(self) -> float:
        """FLOP that the CPU computes in CPU_MINUTES."""
        return CPU_MINUTES * 60 * self.cores * CORE_FLOP_PER_SECOND
