"""A few of the embedded clips, and configs of a small model that learns them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm_dit.wings.scores.demo import moving_digits
from tests.training.launch import Configs

CLIPS = 24


def write_clips(place: Path) -> Path:
    """Write CLIPS of the embedded clips to a folder in ``place``."""
    patch = pytest.MonkeyPatch()
    patch.setattr(moving_digits, "NUM_CLIPS", CLIPS)
    folder = place / "moving_digits"
    moving_digits.write_moving_digits(folder)
    patch.undo()
    return folder


def clip_configs(place: Path, clips: Path, predictor: str = "custom_dit", **data: object) -> Configs:
    """Write model.json and data.json to ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    frames, size = moving_digits.NUM_FRAMES, 32
    sizes = {
        "custom_dit": {"num_heads": 4, "head_dim": 8, "text_dim": 64, "freq_dim": 16},
        "wan": {"num_attention_heads": 2, "attention_head_dim": 8, "text_dim": 64, "freq_dim": 16},
    }[predictor]
    model = {
        "ae": {"model_id": "pixel", "channels": 1},
        "text_encoder": {"from_pretrained": str(clips / "text_encoder"), "max_length": 8, "dtype": "fp32"},
        "diffusion": {"model_id": "wan_flow_match_scheduler", "shift": 3.0},
        "predictor": {
            "model_id": predictor, "num_layers": 2, "ffn_dim": 24, "patch_size": [3, 8, 8], "in_channels": 1,
            "out_channels": 1, "latent_size": [frames, size, size], **sizes,
        },
    }  # fmt: skip
    param = {
        "dataset_type": "clips", "data_folder": str(clips), "json_path": str(clips / "annotation.json"),
        "num_frames": frames, "max_height": size, "max_width": size, "caption_dropout_prob": 0.3, **data,
    }  # fmt: skip
    (place / "model.json").write_text(json.dumps(model))
    (place / "data.json").write_text(json.dumps({"dataset_param": param}))
    return Configs(place)
