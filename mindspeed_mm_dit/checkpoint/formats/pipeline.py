"""A folder that diffusers' DiTPipeline loads: network, autoencoder, scheduler, and the names of the classes. (Those of
image transformers such as FLUX are written by image_pipeline.py.)

model_index.json                         what is in it, and id2label
transformer/                             the network, as formats/diffusers.py writes it
transformer/changed_for_diffusers.json   what was changed in it: a layer, for the timestep code (frequencies.py), and
                                         the class table, filled up to row 1000 with the unconditional class
vae/                                     the autoencoder of model.json
scheduler/                               DDIM over the noise schedule of model.json
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint import frequencies
from mindspeed_mm_dit.checkpoint.formats import diffusers, image_pipeline
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.configs.autoencoder import config_file
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.model import GaussianDiffusionConfig, ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.autoencoder_kl.files import read_autoencoder_kl

_LIBRARY = "diffusers"
_PARTS = {"transformer": "DiTTransformer2DModel", "vae": "AutoencoderKL", "scheduler": "DDIMScheduler"}


def fits(path: Path) -> bool:
    """Return whether ``path`` is the folder of a pipeline with a network in it."""
    return (path / diffusers.INDEX).is_file() and (path / "transformer" / "config.json").is_file()


def read(path: Path) -> State:
    """Read the network; the autoencoder is read from ``vae/`` when it is needed."""
    return diffusers.read(path)


def write(path: Path, state: State) -> None:
    """Write all parts.

    Raises:
        ConfigError: there is no model.json, or it describes a model that DiTPipeline cannot sample.
        CheckpointError: the autoencoder of model.json cannot be read.
    """
    model = _model(state)
    if isinstance(model.predictor, JointConfig):
        image_pipeline.write(path, state, model)
        return
    _check(model)
    visited = frequencies.visited(model.diffusion.num_train_timesteps)
    changes = diffusers.Changes(tuple(visited.tolist()), model.predictor.num_classes)
    weights = diffusers.changed(state.weights, changes)
    vae = _autoencoder(model.ae)
    for name in _PARTS:
        (path / name).mkdir()
    diffusers.write(path / "transformer", State({"model": weights}, state.facts))
    _write(path / "transformer" / diffusers.CHANGES, dataclasses.asdict(changes))
    diffusers.write(path / "vae", vae)
    _write(path / "scheduler" / "scheduler_config.json", _scheduler(model.diffusion))
    names = dict(enumerate(map(str, state.facts.get("classes") or ())))
    labels = {str(label): names.get(label, str(label)) for label in range(changes.num_classes)}
    index = {"_class_name": "DiTPipeline", "id2label": labels}
    _write(path / diffusers.INDEX, index | {name: [_LIBRARY, kind] for name, kind in _PARTS.items()})


def _model(state: State) -> ModelConfig:
    if state.is_autoencoder:
        raise ConfigError(
            "SOURCE", "is an autoencoder, and a pipeline is written from a network", "convert it --to diffusers"
        )
    if "model" not in state.facts:
        raise ConfigError(
            "--model",
            "is needed: a pipeline has the autoencoder and the noise schedule of model.json",
            "give the model.json that the weights were trained with",
        )
    return model_config_from_mapping(state.facts["model"], "model.json")


def _check(model: ModelConfig) -> None:
    """Raise ConfigError for a model that DiTPipeline would not sample as here."""
    if not isinstance(model.predictor, DiTConfig):
        raise ConfigError(
            f"predictor.model_id = {model.predictor.model_id!r}",
            "has no pipeline here",
            "convert to safetensors, .pt or .ckpt",
        )
    diffusers.check_options(model.predictor)
    if not isinstance(model.diffusion, GaussianDiffusionConfig):
        raise ConfigError(
            f"diffusion.model_id = {model.diffusion.model_id!r}",
            "diffusers' DiTPipeline samples by Gaussian diffusion: with flow matching it would generate noise",
            "convert the network alone (--to diffusers); mm-dit init --diffusion gaussian_diffusion makes one for it",
        )
    if model.ae.diffusers_class != _PARTS["vae"]:
        raise ConfigError(
            f"ae.model_id = {model.ae.model_id!r}",
            "diffusers' DiTPipeline decodes latents, by a VAE",
            "convert the network alone: --to diffusers",
        )
    scale = model.ae.scale()
    if scale.shift or scale.std != 1.0:
        what = f"ae.shift_factor = {scale.shift}" if scale.std == 1.0 else "ae.latents_mean, latents_std"
        raise ConfigError(
            what,
            "diffusers' DiTPipeline decodes latents without a shift, all channels alike",
            "convert the network alone: --to diffusers",
        )
    num_classes, dropout = model.predictor.num_classes, model.predictor.class_dropout_prob
    last = diffusers.UNCONDITIONAL_CLASS
    if num_classes > last or not model.predictor.conditions.has_unconditional:
        raise ConfigError(
            f"predictor.num_classes = {num_classes}, class_dropout_prob = {dropout:g}",
            f"diffusers' DiTPipeline always takes class {last} as the unconditional one. It fits networks of up to "
            f"{last} classes with an unconditional class; others it would guide by a class, or fail",
            "convert the network alone (--to diffusers), and pass the unconditional class in a custom pipeline",
        )


def _autoencoder(ae: Any) -> State:
    """Return the autoencoder with its config.json, and the scale that the network was trained with."""
    architecture, weights = read_autoencoder_kl(ae)
    ae_config = read_json(config_file(ae.from_pretrained), "ae.from_pretrained")
    config = {"_class_name": _PARTS["vae"], **dataclasses.asdict(architecture), **ae_config}
    return State({"model": weights}, config=config | {"scaling_factor": ae.scaling_factor})


def _scheduler(diffusion: GaussianDiffusionConfig) -> dict[str, Any]:
    """Return scheduler_config.json for the trajectory of ``--sampler ddim``."""
    scale = 1000 / diffusion.num_train_timesteps  # (as objectives/gaussian/schedule.py: make_betas)
    return {
        "_class_name": _PARTS["scheduler"], "num_train_timesteps": diffusion.num_train_timesteps,
        "beta_schedule": diffusion.noise_schedule, "beta_start": scale * 1e-4, "beta_end": scale * 0.02,
        "prediction_type": diffusion.prediction_type, "clip_sample": False, "set_alpha_to_one": True,
        "timestep_spacing": "leading", "steps_offset": 0,
    }  # fmt: skip


def _write(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, "utf-8", "backslashreplace")  # (as JSON writes a byte of a name that is no text)
