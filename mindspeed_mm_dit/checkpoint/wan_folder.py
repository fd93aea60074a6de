"""A folder of diffusers' Wan pipelines: the model.json it amounts to, and the two experts of Wan 2.2.

model_index.json              boundary_ratio, the noise level that separates the experts; expand_timesteps (TI2V-5B)
transformer/, transformer_2/  the network, or the experts of high and of low noise
vae/, text_encoder/, tokenizer/, scheduler/, and of Wan 2.1 from an image, image_encoder/
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.formats.diffusers import INDEX
from mindspeed_mm_dit.configs.autoencoder import config_file
from mindspeed_mm_dit.configs.limits import number
from mindspeed_mm_dit.configs.model import AE_CONFIGS
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.video_transformer import WanConfig

FIRST, SECOND = "transformer", "transformer_2"
SIZE = (81, 480, 832)
"""(F, H, W) of a clip that the pipelines generate by default."""
PUBLISHED_SHIFT = 5.0
"""Of a folder without a scheduler."""
FROM_TEXT, FROM_IMAGE = "WanPipeline", "WanImageToVideoPipeline"
"""Classes of the pipelines."""


def model_of(path: Path) -> dict[str, Any] | None:
    """Return the model.json of a Wan pipeline, or of the folder of one expert in it; None if ``path`` is neither."""
    folder = path if (path / INDEX).is_file() else path.parent
    part = FIRST if folder == path else path.name
    if not (folder / INDEX).is_file() or not (folder / part / "config.json").is_file():
        return None
    index = read_json(folder / INDEX, "--checkpoint")
    if index.get("_class_name") not in (FROM_TEXT, FROM_IMAGE):
        return None
    ae = {"model_id": "wan_video_vae", "from_pretrained": str(folder / "vae")}
    images = folder / "image_encoder"
    return {
        "ae": ae,
        "text_encoder": {"from_pretrained": str(folder / "text_encoder"), "zero_padding": True},
        "diffusion": _diffusion(folder, part, index),
        "predictor": _predictor(folder / part, index, ae),
        **({"image_encoder": {"from_pretrained": str(images)}} if images.is_dir() else {}),
    }


def _predictor(folder: Path, index: dict[str, Any], ae: dict[str, Any]) -> dict[str, Any]:
    content = read_json(folder / "config.json", "--checkpoint")
    settings = {name: value for name, value in content.items() if not name.startswith("_")}
    settings |= {
        "expand_timesteps": bool(index.get("expand_timesteps")),
        "last_frame": bool(settings.get("pos_embed_seq_len")),
    }
    where = f"{folder}/config.json"
    if config_file(ae["from_pretrained"]).is_file():
        kind = AE_CONFIGS[ae["model_id"]]
        autoencoder = from_mapping(kind, kind.spelled_out(ae, where), where)
        settings["latent_size"] = list(autoencoder.latent_shape(SIZE)[1:])
    return {"model_id": WanConfig.model_id, **settings}


def _diffusion(folder: Path, part: str, index: dict[str, Any]) -> dict[str, Any]:
    """Return section "diffusion": the scheduler's shift, and the window of an expert."""
    file = folder / "scheduler" / "scheduler_config.json"
    scheduler = read_json(file, "--checkpoint") if file.is_file() else {"shift": PUBLISHED_SHIFT}
    # (1.0: diffusers' default, which its files may leave out)
    shift = scheduler.get("flow_shift", scheduler.get("shift", 1.0))
    settings = {"model_id": "wan_flow_match_scheduler", "shift": shift, "sigma_min": 0.0, "extra_one_step": True}
    if (boundary := index.get("boundary_ratio")) is None or second_of(folder) is None:
        return settings
    level = number(f"{folder / INDEX}: boundary_ratio", boundary, 0.0, 1.0)
    return {**settings, "timestep_window": [level, 1.0] if part == FIRST else [0.0, level]}


def second_of(path: Path) -> Path | None:
    """Return the expert of low noise in a pipeline; None if ``path`` is none, or has one network."""
    second = path / SECOND
    return second if (path / INDEX).is_file() and (second / "config.json").is_file() else None
