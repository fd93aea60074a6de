"""A few of the embedded clips, and configs of a small model that learns them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.data.video_file import read_frames
from mindspeed_mm_dit.tools.evaluate import demo
from tests.conftest import GOLDEN
from tests.training.launch import Configs

CLIPS = 24


def write_clips(place: Path) -> Path:
    """Write CLIPS of the embedded clips to a folder in ``place``."""
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "NUM_CLIPS", CLIPS)
    folder = place / "moving_digits"
    demo.write_moving_digits(folder)
    patch.undo()
    return folder


def clip_configs(place: Path, clips: Path, predictor: str = "custom_dit", **data: object) -> Configs:
    place.mkdir(parents=True, exist_ok=True)
    frames, size = demo.NUM_FRAMES, 32
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
    param = {"dataset_type": "clips", "data_folder": str(clips), "json_path": str(clips / "annotation.json"),
             "num_frames": frames, "max_height": size, "max_width": size, "caption_dropout_prob": 0.3,
             **data}  # fmt: skip
    (place / "model.json").write_text(json.dumps(model))
    (place / "data.json").write_text(json.dumps({"dataset_param": param}))
    return Configs(place)


VAE = {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny")}
CLIP = {"image_dim": 12, "added_kv_proj_dim": 16}
NETWORKS = {
    "channels": {"in_channels": 6},
    "channels, last frame": {"in_channels": 6, "last_frame": True},
    "times by token": {"expand_timesteps": True, "frame_dropout_prob": 0.5},
    "features of CLIP": {"in_channels": 6, **CLIP},
    "features of CLIP, last frame": {
        "in_channels": 36, "out_channels": 16, **CLIP, "pos_embed_seq_len": 34, "last_frame": True,
        "latent_size": [3, 4, 4], "patch_size": [1, 2, 2],
    },
}  # fmt: skip
BESIDE = ("channels, last frame", "times by token", "features of CLIP, last frame")
"""Networks that are trained on images beside the clips; the others on the clips' own frames."""


def write_begun_clips(place: Path) -> Path:
    """Write the same clips, each with images that it begins and ends with: mirrored frames of its own."""
    folder = write_clips(place)
    entries = json.loads((folder / "annotation.json").read_text())
    for number, entry in enumerate(entries):
        for name, frame in (("first", 0), ("last", entry["num_frames"] - 1)):
            pixels = read_frames(folder / entry["path"], np.array([frame]))[0]
            entry[name] = f"{name}{number}.png"
            Image.fromarray(pixels[:, ::-1].copy()).save(folder / entry[name])
    (folder / "annotation.json").write_text(json.dumps(entries))
    return folder


def write_clip_vision(folder: Path, image_size: int) -> dict[str, str]:
    """Few random weights of CLIP's vision half, with patches of 2 pixels."""
    transformers = pytest.importorskip("transformers", reason="requirements/video.txt")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.CLIPVisionConfig(hidden_size=12, image_size=image_size, patch_size=2, **sizes)
    transformers.CLIPVisionModel(config).save_pretrained(folder)
    return {"from_pretrained": str(folder)}


def begun_configs(folder: Path, clips: Path, name: str, **data: object) -> Configs:
    """Write the configs of a network that begins with an image."""
    changes = NETWORKS[name]
    data |= {"first_frame_key": "first", "last_frame_key": "last"} if name in BESIDE else {}
    configs = clip_configs(folder, clips, "wan", **data)
    model = json.loads((folder / "model.json").read_text())
    model["predictor"] |= {"patch_size": [1, 8, 8], **changes}
    if "image_dim" in changes:
        model["image_encoder"] = write_clip_vision(folder / "image_encoder", 8 if "last_frame" in changes else 32)
    if changes.get("out_channels") == 16:
        model["ae"] = VAE
    (folder / "model.json").write_text(json.dumps(model))
    return configs
