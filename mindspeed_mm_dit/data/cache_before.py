"""Reads caches of version 0.1: image latents (index.json, images.csv, latents-*) and clip features (features-*)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.files import read_bytes
from mindspeed_mm_dit.errors import DataError

_IMAGES, CLIPS_BEFORE = "latents", "features"


def index_of_before(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert the content of an old index.json to today's keys; a current one is returned unchanged."""
    identity = content.get("identity")
    if identity is None:
        return dict(content)
    try:
        return _image_index(content, identity) if "image_size" in identity else _clip_index(content, identity)
    except (KeyError, TypeError) as error:
        raise DataError(where, f"lacks {error}", "make the cache again: mm-dit cache-latents") from None


def _image_index(content: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    size = identity["image_size"]
    return {
        "made_by": {
            "pixels": f"{size} x {size}, {identity['crop']}",
            "autoencoder": f"{identity['autoencoder']}, {identity['autoencoder_dtype']}",
        },
        "num_rows": content["num_images"],
        "shard_rows": content["shard_images"],
        "views": 2,
        "with_std": True,
        "skipped": content.get("skipped", 0),
        "classes": content.get("classes", ()),
        "digest": content.get("pictures", ""),
        "stem": _IMAGES,
    }


def _clip_index(content: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    length, zeros = identity["max_length"], identity["zero_padding"]
    return {
        "made_by": {
            "rows": identity["clips"],
            "pixels": identity["frames"],
            "autoencoder": identity["autoencoder"],
            "text_encoder": identity["text_encoder"],
            "text": text_made_by(length, zeros),
        },
        "num_rows": content["num_clips"],
        "shard_rows": content["shard_clips"],
        "with_std": identity["with_std"],
        "texts": {"text": {"length": length, "pads_with_zeros": zeros}},
        "digest": identity["clips"],
        "stem": CLIPS_BEFORE,
    }


def text_made_by(length: int, zeros: bool) -> str:
    """Describe the length of texts and their padding."""
    return f"{length} tokens, padding {'zero' if zeros else 'as the encoder leaves it'}"


def rows_of_before(folder: Path, stem: str, count: int) -> list[dict[str, Any]] | None:
    """Return path and label of each row of an old cache, None for a current one; raises ValueError or UnusableFile."""
    if stem == CLIPS_BEFORE:  # (it has neither paths nor captions)
        return [{"path": f"clip {row}"} for row in range(count)]
    if stem != _IMAGES:
        return None
    text = read_bytes(folder / "images.csv").decode("utf-8", "surrogateescape")
    try:
        rows = [
            {"path": row["image_path"], "label": int(row["label"])}
            for row in csv.DictReader(io.StringIO(text, newline=""))
        ]
    except (KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"images.csv: {error}") from None
    if len(rows) != count:
        raise ValueError(f"images.csv lists {len(rows)} images, but index.json counts {count}")
    return rows


def names_of_before(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a shard under their current names."""
    return {
        {"states": "text.states", "tokens": "text.tokens"}.get(name, name): array for name, array in tensors.items()
    }
