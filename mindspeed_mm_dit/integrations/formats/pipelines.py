"""Folders that diffusers' pipelines load: DiTPipeline, and those of the image transformers such as FLUX.

model_index.json                   what is in it; of DiTPipeline also id2label
transformer/                       the network, as diffusers_folder.py writes it
transformer/changed_for_diffusers.json    of DiTPipeline: what was changed in the network (diffusers_folder.py)
vae/                               the autoencoder of model.json
text_encoder*/, tokenizer*/        copies of what model.json names
scheduler/                         DDIM over the noise schedule of model.json, or its sampling times
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.configs.autoencoder import config_file
from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig, GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.integrations.formats.config_json import INDEX, check_options
from mindspeed_mm_dit.models.pretrained import read_autoencoder_kl


def fits(path: Path) -> bool:
    """Return whether ``path`` is the folder of a pipeline with a network in it."""
    return (path / INDEX).is_file() and (path / "transformer" / "config.json").is_file()


def write(path: Path, state: State) -> None:
    """Write all parts.

    Raises:
        ConfigError: there is no model.json, or it describes a model that the pipeline would not sample as here.
        CheckpointError: the autoencoder of model.json cannot be read.
    """
    if state.is_autoencoder:
        raise ConfigError("SOURCE is an autoencoder, and a pipeline needs a network. Convert it by --to diffusers.")
    if "model" not in state.facts:
        raise ConfigError(
            "--model is needed, as a pipeline has the autoencoder and the noise schedule of model.json. Give the "
            "model.json that the weights were trained with."
        )
    model = model_config_from_mapping(state.facts["model"], "model.json")
    (_write_image_pipeline if isinstance(model.predictor, JointConfig) else _write_dit_pipeline)(path, state, model)


def _write_json(file: Path, content: Mapping[str, Any], sort_keys: bool = False) -> None:
    file.parent.mkdir(exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=sort_keys) + "\n"
    file.write_text(text, "utf-8", "backslashreplace")  # (as JSON writes a byte of a name that is no text)


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"{problem} Convert the network alone (--to diffusers).")


# --- DiTPipeline ------------------------------------------------------------------------------------------------------

_PARTS = {"transformer": "DiTTransformer2DModel", "vae": "AutoencoderKL", "scheduler": "DDIMScheduler"}


def _write_dit_pipeline(path: Path, state: State, model: ModelConfig) -> None:
    _check_dit(model)
    visited = diffusers_folder.ddim_timesteps(model.diffusion.num_train_timesteps)
    changes = diffusers_folder.Changes(tuple(visited.tolist()), model.predictor.num_classes)
    weights = diffusers_folder.convert_for_pipeline(state.weights, changes)
    vae = _autoencoder(model.ae)
    for name in _PARTS:
        (path / name).mkdir()
    diffusers_folder.write(path / "transformer", State({"model": weights}, state.facts))
    _write_json(path / "transformer" / diffusers_folder.CHANGES, dataclasses.asdict(changes))
    diffusers_folder.write(path / "vae", vae)
    _write_json(path / "scheduler" / "scheduler_config.json", _ddim(model.diffusion))
    names = dict(enumerate(map(str, state.facts.get("classes") or ())))
    labels = {str(label): names.get(label, str(label)) for label in range(changes.num_classes)}
    index = {"_class_name": "DiTPipeline", "id2label": labels}
    _write_json(path / INDEX, index | {name: ["diffusers", kind] for name, kind in _PARTS.items()})


def _check_dit(model: ModelConfig) -> None:
    """Raise ConfigError for a model that DiTPipeline would not sample as here."""
    if not isinstance(model.predictor, DiTConfig):
        raise ConfigError(
            f"predictor.model_id = {model.predictor.model_id!r} has no pipeline here. Convert to .safetensors."
        )
    check_options(model.predictor)
    if not isinstance(model.diffusion, GaussianDiffusionConfig):
        raise ConfigError(
            f"diffusion.model_id = {model.diffusion.model_id!r} does not fit diffusers' DiTPipeline, which samples by "
            "Gaussian diffusion and would generate noise. Convert the network alone (--to diffusers); mm-dit init "
            "--diffusion gaussian_diffusion makes one for the pipeline."
        )
    if model.ae.diffusers_class != _PARTS["vae"]:
        raise _refused(f"ae.model_id = {model.ae.model_id!r} must be an AutoencoderKL for diffusers' DiTPipeline.")
    scale = model.ae.scale()
    if scale.shift or scale.std != 1.0:
        settings = f"ae.shift_factor = {scale.shift}" if scale.std == 1.0 else "ae.latents_mean and ae.latents_std"
        raise _refused(f"{settings} cannot be written for diffusers' DiTPipeline, which has one scale and no shift.")
    num_classes, dropout = model.predictor.num_classes, model.predictor.class_dropout_prob
    last = diffusers_folder.UNCONDITIONAL_CLASS
    if num_classes > last or not model.predictor.conditions.has_unconditional:
        raise ConfigError(
            f"predictor.num_classes = {num_classes} with class_dropout_prob = {dropout:g} does not fit diffusers' "
            f"DiTPipeline, which needs at most {last} classes and takes class {last} as the unconditional one. Convert "
            "the network alone (--to diffusers), and pass the unconditional class in a custom pipeline."
        )


def _autoencoder(ae: Any) -> State:
    """Return the autoencoder with its config.json, and the scale that the network was trained with."""
    architecture, weights = read_autoencoder_kl(ae)
    ae_config = read_json(config_file(ae.from_pretrained), "ae.from_pretrained")
    config = {"_class_name": _PARTS["vae"], **dataclasses.asdict(architecture), **ae_config}
    return State({"model": weights}, config=config | {"scaling_factor": ae.scaling_factor})


def _ddim(diffusion: GaussianDiffusionConfig) -> dict[str, Any]:
    """Return scheduler_config.json for the trajectory of ``--sampler ddim``."""
    scale = 1000 / diffusion.num_train_timesteps  # (as objectives/gaussian/schedule.py: make_betas)
    return {
        "_class_name": _PARTS["scheduler"],
        "num_train_timesteps": diffusion.num_train_timesteps,
        "beta_schedule": diffusion.noise_schedule,
        "beta_start": scale * 1e-4,
        "beta_end": scale * 0.02,
        "prediction_type": diffusion.prediction_type,
        "clip_sample": False,
        "set_alpha_to_one": True,
        "timestep_spacing": "leading",
        "steps_offset": 0,
    }


# --- image transformers -----------------------------------------------------------------------------------------------


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


_OPTIONAL = ("image_encoder", "feature_extractor")
_SD3_ENCODERS = {"": "clip", "_2": "clip", "_3": "t5"}
PIPELINE_KINDS = (
    PipelineKind("FluxPipeline", "flux", "autoencoder_kl", {"_2": "t5", "": "clip"}, ("flux", None), _OPTIONAL),
    PipelineKind("StableDiffusion3Pipeline", "sd3", "autoencoder_kl", _SD3_ENCODERS, ("sd3", "sd3_dynamic"), _OPTIONAL),
    PipelineKind("QwenImagePipeline", "qwen_image", "qwen_image_vae", {"": "qwen2_5_vl"}, ("qwen_image",)),
    PipelineKind("ZImagePipeline", "z_image", "autoencoder_kl", {"": "qwen3"}, (None,)),
    PipelineKind("Flux2Pipeline", "flux2", "flux2_vae", {"": "mistral3"}, ("flux2",)),
    PipelineKind("Flux2KleinPipeline", "flux2", "flux2_vae", {"": "qwen3"}, ("flux2",)),
)
_DYNAMIC: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
_BY_TOKENS = {"flux": _DYNAMIC, "qwen_image": {**_DYNAMIC, "max_shift": 0.9, "max_image_seq_len": 8192}}
_SCHEDULES = {
    "flux": _DYNAMIC,
    "sd3_dynamic": _DYNAMIC,
    "flux2": _DYNAMIC,
    "qwen_image": {**_BY_TOKENS["qwen_image"], "shift_terminal": 0.02},
}
_ENCODERS = {
    "t5": "T5EncoderModel",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3": "Qwen3Model",
    "mistral3": "Mistral3ForConditionalGeneration",
}
_PROCESSORS = {"mistral3": "PixtralProcessor"}
"""Processors that a pipeline needs instead of the tokenizer alone, for their chat templates."""
_WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt*")


def _write_image_pipeline(path: Path, state: State, model: ModelConfig) -> None:
    kind, ae, encoders = _checked_parts(model)
    parts = {"transformer": ["diffusers", model.predictor.diffusers_class]}
    (path / "transformer").mkdir()
    diffusers_folder.write(path / "transformer", state)
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
    scheduler = {"_class_name": parts["scheduler"][1], **_sampling_times(model)}
    _write_json(path / "scheduler" / "scheduler_config.json", scheduler, sort_keys=True)
    absent = {name: [None, None] for name in kind.empty}
    _write_json(path / INDEX, {"_class_name": kind.name, **parts, **absent}, sort_keys=True)


def _checked_parts(model: ModelConfig) -> tuple[PipelineKind, Any, Any]:
    """Return the pipeline, and the configs of autoencoder and text encoders, which are all folders."""
    predictor, flow = model.predictor.model_id, model.diffusion
    texts = [encoder.model_id for encoder in model.text_encoders]
    kinds = [kind for kind in PIPELINE_KINDS if kind.predictor == predictor]
    if not kinds:
        raise _refused(f"predictor.model_id = {predictor!r} has no pipeline of diffusers here.")
    kind = next((kind for kind in kinds if [*kind.encoders.values()] == texts), None)
    if kind is None:
        expected = " or ".join(", ".join(kind.encoders.values()) for kind in kinds)
        raise _refused(
            f"The text encoders of model.json are {', '.join(texts) or 'none'}, and {kinds[0].name} has {expected}."
        )
    if model.ae.model_id != kind.ae:
        raise _refused(f"ae.model_id = {model.ae.model_id!r} must be {kind.ae!r} for {kind.name}.")
    if not isinstance(flow, FlowMatchingConfig):
        raise _refused(f"diffusion.model_id = {flow.model_id!r} is not flow matching, by which {kind.name} samples.")
    if flow.sample_schedule not in kind.schedules:
        schedules = " or ".join(map(json.dumps, kind.schedules))
        raise _refused(
            f"diffusion.sample_schedule = {json.dumps(flow.sample_schedule)} must be {schedules} for {kind.name}."
        )
    if (flow.path, flow.prediction_type, flow.noise_scale) != ("linear", "velocity", 1.0):
        raise _refused(
            f"diffusion has path {flow.path}, prediction_type {flow.prediction_type} and noise_scale "
            f"{flow.noise_scale:g}, and {kind.name} samples by the velocity on linear paths from noise of scale 1."
        )
    has_schedule = flow.sample_shift is not None or flow.sample_schedule in _SCHEDULES
    by_size = {"shift_base": flow.shift_base, "dynamic_shift": flow.sample_schedule and flow.dynamic_shift}
    for name, value in by_size.items():
        if value and not has_schedule:
            raise _refused(
                f"diffusion.{name} = {json.dumps(value)} shifts times by image size, and {kind.name} has no setting "
                "for it."
            )
    return kind, model.ae, model.text_encoders


def _encoder_class(encoder: Any) -> str:
    if encoder.model_id == "clip":
        return "CLIPTextModelWithProjection" if encoder.has_projection else "CLIPTextModel"
    return _ENCODERS[encoder.model_id]


def _sampling_times(model: ModelConfig) -> dict[str, Any]:
    flow = model.diffusion
    shifted = {"shift": flow.shift_of(model.latent_shape, sampling=True)}
    if flow.dynamic_shift and flow.sample_shift is None:
        shifted = _BY_TOKENS[flow.dynamic_shift]
    return {"num_train_timesteps": 1000, **_SCHEDULES.get(flow.sample_schedule, shifted)}


PIPELINE = diffusers_folder.DIFFUSERS._replace(fits=fits, write=write, labels=diffusers_folder.labels_of)
