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
from mindspeed_mm_dit.configs.autoencoder import config_file
from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError


class PipelineKind(NamedTuple):
    """A pipeline of diffusers, and the parts that it has."""

    name: str
    predictor: str
    ae: str
    encoders: Mapping[str, str]
    """What follows "text_encoder" and "tokenizer" in the names of the parts -> ``model_id``, in the order of
    model.json."""
    schedules: tuple[str | None, ...]
    """Values of ``sample_schedule`` with the pipeline's sampling times."""
    empty: tuple[str, ...] = ()
    """Parts that are optional."""


_OPTIONAL_PARTS = ("image_encoder", "feature_extractor")
PIPELINE_KINDS = (
    PipelineKind("FluxPipeline", "flux", "autoencoder_kl", {"_2": "t5", "": "clip"}, ("flux", None), _OPTIONAL_PARTS),
    PipelineKind("StableDiffusion3Pipeline", "sd3", "autoencoder_kl", {"": "clip", "_2": "clip", "_3": "t5"},
         ("sd3", "sd3_dynamic"), _OPTIONAL_PARTS),
    PipelineKind("QwenImagePipeline", "qwen_image", "qwen_image_vae", {"": "qwen2_5_vl"}, ("qwen_image",)),
    PipelineKind("ZImagePipeline", "z_image", "autoencoder_kl", {"": "qwen3"}, (None,)),
    PipelineKind("Flux2Pipeline", "flux2", "flux2_vae", {"": "mistral3"}, ("flux2",)),
    PipelineKind("Flux2KleinPipeline", "flux2", "flux2_vae", {"": "qwen3"}, ("flux2",)),
)  # fmt: skip
_DYNAMIC: dict[str, Any] = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}  # fmt: skip
_BY_TOKENS = {"flux": _DYNAMIC, "qwen_image": {**_DYNAMIC, "max_shift": 0.9, "max_image_seq_len": 8192}}
_SCHEDULES = {
    "flux": _DYNAMIC,
    "sd3_dynamic": _DYNAMIC,
    "flux2": _DYNAMIC,
    "qwen_image": {**_BY_TOKENS["qwen_image"], "shift_terminal": 0.02},
}
_ENCODERS = {"t5": "T5EncoderModel", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3": "Qwen3Model",
             "mistral3": "Mistral3ForConditionalGeneration"}  # fmt: skip
_PROCESSORS = {"mistral3": "PixtralProcessor"}
"""Processors that a pipeline needs instead of the tokenizer alone, for their chat templates."""
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
        parts[f"text_encoder{suffix}"] = ["transformers", _encoder_class(encoder)]
        tokenizer_class = _PROCESSORS.get(encoder.model_id) or settings.get("tokenizer_class", "AutoTokenizer")
        parts[f"tokenizer{suffix}"] = ["transformers", tokenizer_class]
    parts["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    _write(path / "scheduler" / "scheduler_config.json", {"_class_name": parts["scheduler"][1], **_scheduler(model)})
    absent = {name: [None, None] for name in kind.empty}
    _write(path / diffusers.INDEX, {"_class_name": kind.name, **parts, **absent})


def _checked(model: ModelConfig) -> tuple[PipelineKind, Any, Any]:
    """Return the pipeline, and the configs of autoencoder and text encoders, which are all folders."""
    predictor, flow, texts = (
        model.predictor.model_id,
        model.diffusion,
        [encoder.model_id for encoder in model.text_encoders],
    )
    kinds = [kind for kind in PIPELINE_KINDS if kind.predictor == predictor]
    if not kinds:
        raise _refused(f"predictor.model_id = {predictor!r}", "has no pipeline of diffusers here")
    kind = next((kind for kind in kinds if [*kind.encoders.values()] == texts), None)
    if kind is None:
        expected = " or ".join(", ".join(kind.encoders.values()) for kind in kinds)
        raise _refused(f"text_encoder: {', '.join(texts)}", f"is not what {kinds[0].name} has: {expected}")
    if model.ae.model_id != kind.ae:
        raise _refused(f"ae.model_id = {model.ae.model_id!r}", f"is not what {kind.name} has: {kind.ae}")
    if not isinstance(flow, FlowMatchingConfig):
        raise _refused(f"diffusion.model_id = {flow.model_id!r}", f"is not how {kind.name} samples")
    usual = (flow.path, flow.prediction_type, flow.noise_scale) == ("linear", "velocity", 1.0)
    if flow.sample_schedule not in kind.schedules or not usual:
        schedules = " or ".join(map(json.dumps, kind.schedules))
        raise _refused(
            f"diffusion.sample_schedule = {json.dumps(flow.sample_schedule)}",
            f"is not how {kind.name} samples: it takes {schedules}, on linear paths",
        )
    has_schedule = flow.sample_shift is not None or flow.sample_schedule in _SCHEDULES
    by_size = {"shift_base": flow.shift_base, "dynamic_shift": flow.sample_schedule and flow.dynamic_shift}
    for name, value in by_size.items():
        if value and not has_schedule:
            raise _refused(
                f"diffusion.{name} = {json.dumps(value)}",
                f"shifts times by the size of an image, which {kind.name} has no setting for",
            )
    return kind, model.ae, model.text_encoders


def _refused(what: str, reason: str) -> ConfigError:
    return ConfigError(what, reason, "convert the network alone: --to diffusers")


def _encoder_class(encoder: Any) -> str:
    if encoder.model_id == "clip":
        return "CLIPTextModelWithProjection" if encoder.has_projection else "CLIPTextModel"
    return _ENCODERS[encoder.model_id]


def _scheduler(model: ModelConfig) -> dict[str, Any]:
    flow = model.diffusion
    shifted = {"shift": flow.shift_of(model.latent_shape, sampling=True)}
    if flow.dynamic_shift and flow.sample_shift is None:
        shifted = _BY_TOKENS[flow.dynamic_shift]
    return {"num_train_timesteps": 1000, **_SCHEDULES.get(flow.sample_schedule, shifted)}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
