"""A folder of small pictures of three shapes, and the configs of a tiny model of them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

SHAPES = [[8, 12], [12, 8], [8, 8]]
COUNTS = {(16, 24): 13, (30, 20): 21, (9, 9): 17}
"""Pictures by (height, width)."""
PREDICTOR = {"model_id": "dit", "input_size": 8, "in_channels": 1, "patch_size": 4, "hidden_size": 32, "num_layers": 2,
             "num_heads": 2, "num_classes": 2, "learn_sigma": True}  # fmt: skip


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


VIDEO_SHAPES = [[1, 8, 8], [5, 8, 12], [9, 8, 12], [9, 12, 8]]
CLIPS = {"wide": (6, 9, (16, 24)), "tall": (7, 9, (24, 16)), "short": (5, 6, (16, 24)), "still": (5, 1, (16, 16))}
"""Clips by kind: how many, and their (frames, (height, width))."""


def write_clips(folder: Path, clips: dict[str, tuple[int, int, tuple[int, int]]] = CLIPS) -> Path:
    """Write videos and images, of two classes in turns, with their annotation, and return its path."""
    from mindspeed_mm_dit.data.video_file import write_video

    draw, entries = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for kind, (count, frames, size) in clips.items():
        for number in range(count):
            pixels = draw.integers(0, 100, (1, *size, 1)) + 8 * np.arange(frames)[:, None, None, None]
            pixels = np.broadcast_to(pixels + 60 * (number % 2), (frames, *size, 3)).astype(np.uint8)
            name = f"{kind}-{number}" + (".mp4" if frames > 1 else ".png")
            write_video(folder / name, pixels, 8) if frames > 1 else Image.fromarray(pixels[0]).save(folder / name)
            entries.append({"path": name, "cap": kind, "label": number % 2})
    (folder / "annotation.json").write_text(json.dumps(entries))
    return folder / "annotation.json"


def write_clip_configs(folder: Path, annotation: Path, predictor: dict | None = None, **param: object) -> Path:
    """Write model.json and data.json of a run on clips and stills by class, and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    network = {"model_id": "custom_dit", "num_layers": 2, "num_heads": 2, "head_dim": 8, "patch_size": [1, 4, 4],
               "in_channels": 1, "out_channels": 1, "text_dim": None, "num_classes": 2, "freq_dim": 16, "ffn_dim": 24,
               "latent_size": [9, 8, 12], **(predictor or {})}  # fmt: skip
    flow = {"model_id": "wan_flow_match_scheduler", "shift": 3.0}
    model = {"ae": {"model_id": "pixel", "channels": 1}, "diffusion": flow, "predictor": network}
    section = {"dataset_type": "clips", "data_folder": str(annotation.parent), "json_path": str(annotation),
               "label_key": "label", "buckets": VIDEO_SHAPES, "bucket_group": 4, **param}  # fmt: skip
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "data.json").write_text(json.dumps({"dataset_param": section}))
    return folder
