"""model.json: the predictor, diffusion, autoencoder, text encoders and teachers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.autoencoder import (
    AutoencoderConfig,
    AutoencoderKLConfig,
    PretrainedAutoencoderConfig,
    config_file,
)
from mindspeed_mm_dit.configs.condition import ClassLabel, TextCondition
from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig, MeanFlowConfig, WanFlowConfig
from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.teacher import ImageEncoderConfig, TeacherConfig, feature_names
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig, UMT5Config
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError, not_known
from mindspeed_mm_dit.registry import Configs, Registry

PREDICTOR_CONFIGS = Registry[type[PredictorConfig]]("predictor")
DIFFUSION_CONFIGS, AE_CONFIGS = Configs("objective"), Configs("autoencoder")
TEXT_ENCODER_CONFIGS, TEACHER_CONFIGS = Configs("text_encoder"), Configs("teacher")


@dataclass(frozen=True)
class ModelConfig:
    """All of model.json."""

    ae: AutoencoderConfig
    """An instance of one of AE_CONFIGS."""
    diffusion: Any
    """An instance of one of DIFFUSION_CONFIGS."""
    predictor: Any
    """An instance of one of PREDICTOR_CONFIGS."""
    text_encoder: Any = None
    """Encodes captions, for a predictor conditioned on text: one of TEXT_ENCODER_CONFIGS, or a tuple of them."""
    teacher: Any = None
    """Image network whose features the predictor also learns (REPA): one of TEACHER_CONFIGS, or a tuple of them."""
    image_encoder: ImageEncoderConfig | None = None
    """Encodes the first and last frame of a clip, for a predictor with ``image_dim`` (Wan 2.1)."""
    note: str = ""
    """Free text, e.g. the purpose of the configuration and its cost."""

    def __post_init__(self) -> None:
        self._check_autoencoder()
        self._check_text_encoders()
        self._check_teachers()
        self._check_frames()
        self._check_diffusion()

    @property
    def _name(self) -> str:
        return f"predictor {self.predictor.model_id!r}"

    def _check_autoencoder(self) -> None:
        """Raise ConfigError unless the autoencoder encodes what the predictor learns, with as many channels."""
        ae, predictor, axes = self.ae, self.predictor, len(self.predictor.latent_shape) - 1
        if axes not in ae.pixel_axes:
            fitting = [name for name, config in AE_CONFIGS.items() if axes in config.pixel_axes]
            raise ConfigError(
                f"ae.model_id = {ae.model_id!r} does not encode {'images' if axes == 2 else 'videos'}, which "
                f"{self._name} needs. Use {' or '.join(fitting)}."
            )
        if predictor.latent_channels != ae.latent_channels:
            channels = predictor.in_channels - predictor.latent_channels + ae.latent_channels
            raise ConfigError(
                f"predictor.in_channels = {predictor.in_channels} does not match the latents of autoencoder "
                f"{ae.model_id!r}, which have {ae.latent_channels} channels. Set predictor.in_channels to {channels}."
            )

    def _check_text_encoders(self) -> None:
        """Raise ConfigError unless the text encoders are exactly those that the conditions refer to."""
        encoders = [part.encoder for condition in self._texts for part in condition.parts]
        count = len(self.text_encoders)
        if encoders and not count:
            raise ConfigError(
                f"The section text_encoder is missing, and {self._name} is conditioned on text. Add "
                '{"model_id": "umt5", "from_pretrained": "folder"}.'
            )
        if count and not encoders:
            raise ConfigError(f"text_encoder is not used: {self._name} is not conditioned on text. Drop the section.")
        if set(encoders) != set(range(count)):
            raise ConfigError(
                f"text_encoder has {count} encoders, but {self._name} needs {max(encoders) + 1}. Give one for each, in "
                "the order of the predictor's settings."
            )

    def _check_teachers(self) -> None:
        """Raise ConfigError unless each teacher has a projector, and predictor and diffusion support teachers."""
        widths, count = list(self.predictor.z_dims), len(self.teachers)
        if len(widths) != count:
            raise ConfigError(
                f"predictor.z_dims = {widths} needs {len(widths)} teachers, but section teacher lists {count}. List "
                "the width of each teacher's features, or drop both: weights load without projectors."
            )
        if count and (isinstance(self.diffusion, MeanFlowConfig) or len(self.latent_shape) != 3):
            raise ConfigError(
                "teacher works only for images and a single timestep, not for "
                f"{self.diffusion.model_id} with latents {self.latent_shape}. Drop the section and predictor.z_dims."
            )

    def _check_frames(self) -> None:
        """Raise ConfigError unless conditioning frames have their encoder, and diffusion supports them."""
        conditions = self.predictor.conditions
        if conditions.image_tokens is not None and self.image_encoder is None:
            raise ConfigError(
                "The section image_encoder is missing, and predictor.image_dim needs CLIP's features of the first "
                'frame. Add {"from_pretrained": "folder"}.'
            )
        if conditions.image_tokens is None and self.image_encoder is not None:
            raise ConfigError("image_encoder is not used: predictor.image_dim is null. Drop the section.")
        if conditions.frames is not None and not isinstance(self.diffusion, WanFlowConfig):
            raise ConfigError(
                f"diffusion.model_id = {self.diffusion.model_id!r} does not support conditioning on frames. Set it to "
                f"{WanFlowConfig.model_id}."
            )

    def _check_diffusion(self) -> None:
        """Raise ConfigError unless the predictor takes the times of ``diffusion``, in the direction of its weights."""
        diffusion, predictor = self.diffusion, self.predictor
        diffusion.check_output(predictor.latent_channels, predictor.out_channels)
        if isinstance(diffusion, MeanFlowConfig):
            diffusion.check_predictor(predictor)
        elif predictor.num_time_inputs != 1:
            raise ConfigError(
                f"diffusion.model_id = {diffusion.model_id!r} passes one timestep, but {self._name} needs two. Set "
                "predictor.h_embedder to false, or model_id to mean_flow."
            )
        flow, expected = isinstance(diffusion, FlowMatchingConfig), predictor.data_time
        actual = diffusion.data_time if flow else None
        if expected is not None and expected != actual:
            raise ConfigError(
                f"diffusion.model_id = {diffusion.model_id!r}{'' if actual is None else f', data_time = {actual}'} "
                f"does not fit {self._name}, which learns a velocity with data at time {expected}. Set model_id to "
                f"flow_matching and data_time to {expected}."
            )
        if flow and diffusion.dynamic_shift is not None and predictor.patch_size == 1:
            raise diffusion.error(
                "dynamic_shift", f"needs patches of 2x2, but {self._name} has patches of 1x1. Set it to null."
            )

    def tuning_facts(self) -> dict[str, Any]:
        """Return the flags that restrict training, with their values: none here (see ``configs/tuning.py``)."""
        return {}

    @property
    def text_encoders(self) -> tuple[TextEncoderConfig, ...]:
        """The text encoders, in the order of model.json; empty without the section.

        Settings that a section leaves out are those published with the predictor.
        """
        encoders = [*_several(self.text_encoder)]
        for number, published in (pair for condition in self._texts for pair in condition.published.items()):
            encoders[number : number + 1] = [
                encoder.with_published_settings(published) for encoder in encoders[number : number + 1]
            ]
        return tuple(encoders)

    @property
    def _texts(self) -> list[TextCondition]:
        return [condition for condition in self.predictor.conditions if isinstance(condition, TextCondition)]

    @property
    def teachers(self) -> tuple[TeacherConfig, ...]:
        """The teachers, in the order of model.json; empty without the section."""
        return _several(self.teacher)

    @property
    def feature_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape (N, width) of each teacher's features of one sample, by their name in a batch."""
        tokens = self.predictor.num_tokens
        return {name: (tokens, width) for name, width in zip(feature_names(len(self.teachers)), self.predictor.z_dims)}

    def without_teachers(self) -> ModelConfig:
        """Return the same model without teachers and projectors, which sampling does not need."""
        if not self.teachers:
            return self
        return replace(self, teacher=None, predictor=replace(self.predictor, z_dims=()))

    def require_labelled_images(self, what: str) -> ClassLabel:
        """Return the class label; raise ConfigError, naming ``what``, unless the model learns only labelled images."""
        conditions = self.predictor.conditions
        if conditions.items != ("label",) or len(self.latent_shape) != 3:
            learns = f"{'images' if len(self.latent_shape) == 3 else 'videos'} with {' and '.join(conditions.items)}"
            raise ConfigError(
                f"{what} learns {learns}, but this command is for images with labels. Use mm-dit sample "
                "to generate samples."
            )
        label: ClassLabel = conditions.label
        return label

    @property
    def sample_size(self) -> tuple[int, ...]:
        """(H, W) of an image, or (F, H, W) of a video, in pixels."""
        return self.ae.sample_size(self.latent_shape)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape (C, ...) of a latent, with any number of axes."""
        return tuple(self.predictor.latent_shape)


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the model.json that --model names; raises ConfigError naming the file and the key."""
    return model_config_from_mapping(read_json(path, "--model"), str(path))


def model_config_from_mapping(content: Mapping[str, Any], where: str) -> ModelConfig:
    """Build a :class:`ModelConfig` from the parsed JSON of ``where``; plugins are loaded first."""
    content = spelled_out(content, where)
    for name, kinds in (("ae", AE_CONFIGS), ("diffusion", DIFFUSION_CONFIGS), ("predictor", PREDICTOR_CONFIGS)):
        if name not in content:
            raise ConfigError(f"{where}: the section {name} is required and missing.")
        content[name] = _section(content[name], kinds, f"{where}: {name}")
    for name, kinds, usual in (
        ("text_encoder", TEXT_ENCODER_CONFIGS, UMT5Config.model_id),
        ("teacher", TEACHER_CONFIGS, None),
    ):
        content[name] = _sections(content.get(name), kinds, f"{where}: {name}", usual)
    return from_mapping(ModelConfig, content, where)


def autoencoder_config_of(path: str, where: str) -> PretrainedAutoencoderConfig:
    """Return section ``ae`` for the autoencoder in a folder or weight file; its config.json names the kind.

    Raises a UserError, naming the setting ``where``, if it is not an autoencoder or is incomplete.
    """
    kinds = {
        kind.diffusers_class: kind for kind in AE_CONFIGS.values() if issubclass(kind, PretrainedAutoencoderConfig)
    }
    kind = kinds[AutoencoderKLConfig.diffusers_class]
    if config_file(path).is_file():
        class_name = read_json(config_file(path), where).get("_class_name")
        if class_name not in [*kinds]:
            raise ConfigError(
                f"{where} = {path} is not a known autoencoder: its _class_name is {shorten_repr(class_name)}. Name one "
                f"of {', '.join(kinds)}."
            )
        kind = kinds[class_name]
    config = kind(**kind.spelled_out({"from_pretrained": path}, where))
    try:
        config.check_files()
        if not config_file(path).is_file():
            raise CheckpointError(
                f"{where} = {path} has no config.json, which names the kind of autoencoder. Copy diffusers' "
                "config.json next to the weights."
            )
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("ae.from_pretrained", where)) from None
    return config


def spelled_out(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the parsed model.json of ``where`` with preset and autoencoder settings filled in.

    Raises ConfigError if a key contradicts the preset or the autoencoder's config.json.
    """
    content, ae = _with_preset(content, where), content.get("ae")
    if isinstance(ae, dict) and isinstance(ae.get("model_id"), str) and ae["model_id"] in AE_CONFIGS:
        content["ae"] = AE_CONFIGS[ae["model_id"]].spelled_out(ae, f"{where}: ae")
    return content


def _section(section: Any, kinds: Mapping[str, type], where: str, usual: str | None = None) -> Any:
    """Return a section as an instance of the class that its model_id, by default ``usual``, names."""
    model_id = section.get("model_id", usual) if isinstance(section, dict) else usual
    if not isinstance(model_id, str) or model_id not in kinds:
        raise not_known(f"{where}.model_id = {shorten_repr(model_id)}", str(model_id), kinds)
    kind = kinds[model_id]
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    missing = [*([] if is_frozen else ["@dataclass(frozen=True)"]), *sorted(getattr(kind, "__abstractmethods__", ()))]
    if missing:  # (a plugin's class)
        raise PlatformError(
            f"{where}.model_id = {model_id!r} names {kind.__module__}.{kind.__qualname__}, which lacks "
            f"{', '.join(missing)}. Complete it, or uninstall its package."
        )
    return from_mapping(kind, section, where)


def _sections(section: Any, kinds: Mapping[str, type], where: str, usual: str | None) -> Any:
    """Return one such section, a tuple of them for a list, or None."""
    if isinstance(section, list):
        entries = enumerate(section)
        return tuple(_section(entry, kinds, f"{where}[{number}]", usual) for number, entry in entries) or None
    return None if section is None else _section(section, kinds, where, usual)


def _several(section: Any) -> tuple[Any, ...]:
    return section if isinstance(section, tuple) else () if section is None else (section,)


def _with_preset(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace ``predictor.preset`` by its sizes; sizes in the section must agree with it."""
    predictor = content.get("predictor")
    if not isinstance(predictor, dict) or "preset" not in predictor:
        return dict(content)
    settings = dict(predictor)
    name = settings.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        raise not_known(f"{where}: predictor.preset = {shorten_repr(name)}", str(name), PRESETS)
    for key, value in PRESETS[name].items():
        if settings.setdefault(key, value) != value:
            raise ConfigError(
                f"{where}: predictor.{key} = {shorten_repr(settings[key])} contradicts preset {name}, which has "
                f"{value}. Drop either the preset or {key}."
            )
    return {**content, "predictor": settings}
