"""A folder of small pictures of three shapes, and the configs of a tiny model of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

SHAPES = [[8, 12], [12, 8], [8, 8]]
COUNTS = {(16, 24): 13, (30, 20): 21, (9, 9): 17}
"""Pictures by (height, width)."""
PREDICTOR = {
    "model_id": "dit", "input_size": 8, "in_channels": 1, "patch_size": 4, "hidden_size": 32, "num_layers": 2,
    "num_heads": 2, "num_classes": 2, "learn_sigma": True,
}  # fmt: skip


def write_pictures(folder: Path, counts: dict[tuple[int, int], int] = COUNTS) -> Path:
    """Write grey pictures, bright ones and dark ones as two classes, in turns."""
    draw, number = np.random.default_rng(0), 0
    for (height, width), count in counts.items():
        for _ in range(count):
            place = folder / ("bright" if number % 2 else "dark") / f"{number:03}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 100, (height, width), np.uint8) + 120 * (number % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(place)
            number += 1
    return folder


def write_configs(folder: Path, pictures: Path, predictor: dict | None = None, **param: object) -> Path:
    """Write model.json and data.json of a run on ``pictures``, and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {
        "ae": {"model_id": "pixel", "channels": 1},
        "diffusion": {"model_id": "gaussian_diffusion", "num_train_timesteps": 1000},
        "predictor": PREDICTOR | (predictor or {}),
    }
    section = {"data_folder": str(pictures), "buckets": SHAPES, "bucket_group": 4, "random_flip": True, **param}
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "data.json").write_text(json.dumps({"dataset_param": section}))
    return folder
