"""A folder that diffusers' pipeline of an image transformer loads.

model_index.json                   what is in it
transformer/                       the network, as formats/diffusers.py writes it
vae/, text_encoder*/, tokenizer*/  copies of what model.json names
scheduler/                         the sampling times of model.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.checkpoint.formats import diffusers
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.configs.autoencoder import PretrainedAutoencoderConfig, config_file
from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.text_encoder import TransformersTextConfig
from mindspeed_mm_dit.errors import ConfigError


class Kind(NamedTuple):
    """The pipeline of a family."""

    name: str
    encoders: tuple[str, ...]
    """What follows "text_encoder" and "tokenizer" in the names of the parts, in the order of model.json."""
    schedules: tuple[str | None, ...]
    """Values of ``sample_schedule`` with the times that it walks."""
    empty: tuple[str, ...] = ()
    """Parts that it can have, and does not need."""


_SPARE = ("image_encoder", "feature_extractor")
KINDS: Mapping[str, Kind] = {
    "flux": Kind("FluxPipeline", ("_2", ""), ("flux", None), _SPARE),
    "sd3": Kind("StableDiffusion3Pipeline", ("", "_2", "_3"), ("sd3", "sd3_dynamic"), _SPARE),
    "qwen_image": Kind("QwenImagePipeline", ("",), ("qwen_image",)),
    "z_image": Kind("ZImagePipeline", ("",), (None,)),
}
_DYNAMIC: dict[str, Any] = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}  # fmt: skip
_SCHEDULES = {
    "flux": _DYNAMIC, "sd3_dynamic": _DYNAMIC,
    "qwen_image": {**_DYNAMIC, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
}  # fmt: skip
_ENCODERS = {"t5": "T5EncoderModel", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3": "Qwen3Model"}
_WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt*")


def write(path: Path, state: State, model: ModelConfig) -> None:
    """Write all parts; raises ConfigError for a model that the pipeline would not sample as here."""
    kind, ae, encoders = _checked(model)
    parts = {"transformer": ["diffusers", model.predictor.diffusers_class]}
    (path / "transformer").mkdir()
    diffusers.write(path / "transformer", state)
    shutil.copytree(config_file(ae.from_pretrained).parent, path / "vae")
    parts["vae"] = ["diffusers", ae.diffusers_class]
    for suffix, encoder in zip(kind.encoders, encoders):
        shutil.copytree(encoder.folder, path / f"text_encoder{suffix}")
        tokenizer = path / f"tokenizer{suffix}"
        shutil.copytree(encoder.tokenizer_folder, tokenizer, ignore=shutil.ignore_patterns(*_WEIGHTS, "config.json"))
        settings = read_json(tokenizer / "tokenizer_config.json", "text_encoder.tokenizer")
        parts[f"text_encoder{suffix}"] = ["transformers", _class_of(encoder)]
        parts[f"tokenizer{suffix}"] = ["transformers", settings.get("tokenizer_class", "AutoTokenizer")]
    parts["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    _write(path / "scheduler" / "scheduler_config.json", {"_class_name": parts["scheduler"][1], **_scheduler(model)})
    absent = {name: [None, None] for name in kind.empty}
    _write(path / diffusers.INDEX, {"_class_name": kind.name, **parts, **absent})


def _checked(model: ModelConfig) -> tuple[Kind, Any, Any]:
    """Return the pipeline, and the configs of autoencoder and text encoders, which are all folders."""
    flow, ae = model.diffusion, model.ae
    problems = {
        f"predictor.model_id = {model.predictor.model_id!r}": model.predictor.model_id not in KINDS,
        f"ae.model_id = {ae.model_id!r}": not isinstance(ae, PretrainedAutoencoderConfig),
        "text_encoder": not all(isinstance(own, TransformersTextConfig) for own in model.text_encoders),
        f"diffusion.model_id = {flow.model_id!r}": not isinstance(flow, FlowMatchingConfig),
    }
    for what, wrong in problems.items():
        if wrong:
            raise ConfigError(what, "has no pipeline of diffusers here", "convert the network alone: --to diffusers")
    kind, usual = KINDS[model.predictor.model_id], (flow.path, flow.prediction_type, flow.noise_scale)
    if flow.sample_schedule not in kind.schedules or usual != ("linear", "velocity", 1.0):
        reason = f"is not how {kind.name} samples: it walks {' or '.join(map(json.dumps, kind.schedules))}, linearly"
        raise ConfigError(f"diffusion.sample_schedule = {json.dumps(flow.sample_schedule)}", reason,
                          "convert the network alone: --to diffusers")  # fmt: skip
    if len(model.text_encoders) != len(kind.encoders):
        raise ConfigError(f"text_encoder: {len(model.text_encoders)}", f"{kind.name} has {len(kind.encoders)}",
                          "convert the network alone: --to diffusers")  # fmt: skip
    return kind, ae, model.text_encoders


def _class_of(encoder: Any) -> str:
    if encoder.model_id == "clip":
        return "CLIPTextModelWithProjection" if encoder.has_projection else "CLIPTextModel"
    return _ENCODERS[encoder.model_id]


def _scheduler(model: ModelConfig) -> dict[str, Any]:
    shifted = {"shift": model.diffusion.shift_of(model.latent_shape, sampling=True)}
    return {"num_train_timesteps": 1000, **_SCHEDULES.get(model.diffusion.sample_schedule, shifted)}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
