"""model.json: the predictor, diffusion, autoencoder, text encoders and teachers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm_dit.configs.autoencoder import (
    AutoencoderConfig,
    AutoencoderKLConfig,
    PretrainedAutoencoderConfig,
    config_file,
)
from mindspeed_mm_dit.configs.condition import ClassLabel, TextCondition
from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig, MeanFlowConfig, WanFlowConfig
from mindspeed_mm_dit.configs.limits import check_between, short_repr
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.teacher import ImageEncoderConfig, TeacherConfig, feature_names
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig, UMT5Config
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError, nearest
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
        self._check_kinds()
        channels = self.predictor.latent_channels
        if channels != self.ae.latent_channels:
            raise ConfigError(
                f"predictor.in_channels = {self.predictor.in_channels}",
                f"does not match the latents of autoencoder '{self.ae.model_id}': {self.ae.latent_channels} channels",
                f"set predictor.in_channels to {self.predictor.in_channels - channels + self.ae.latent_channels}",
            )
        self.diffusion.check_output(channels, self.predictor.out_channels)
        frames = self.predictor.conditions.frames
        if frames is not None and not isinstance(self.diffusion, WanFlowConfig):
            raise ConfigError(
                f"diffusion.model_id = {self.diffusion.model_id!r}",
                "does not support conditioning on frames",
                f"set it to {WanFlowConfig.model_id}",
            )
        if isinstance(self.diffusion, MeanFlowConfig):
            self.diffusion.check_predictor(self.predictor)
        elif self.predictor.num_time_inputs != 1:
            raise ConfigError(
                f"diffusion.model_id = {self.diffusion.model_id!r}",
                f"passes one timestep, but predictor {self.predictor.model_id!r} needs two",
                "set predictor.h_embedder to false, or model_id to mean_flow",
            )
        self._check_direction()

    def _check_direction(self) -> None:
        """Raise ConfigError unless times and velocities have the direction of the predictor's published weights."""
        flow, expected = isinstance(self.diffusion, FlowMatchingConfig), self.predictor.data_time
        actual = self.diffusion.data_time if flow else None
        if expected is not None and expected != actual:
            raise ConfigError(
                f"diffusion.model_id = {self.diffusion.model_id!r}"
                + ("" if actual is None else f", data_time = {actual}"),
                f"predictor {self.predictor.model_id!r} learns a velocity with data at time {expected}",
                f"set model_id to flow_matching and data_time to {expected}",
            )
        if flow and self.diffusion.dynamic_shift is not None and self.predictor.patch_size == 1:
            raise ConfigError(f"diffusion.dynamic_shift = {self.diffusion.dynamic_shift!r}",
                              f"needs patches of 2x2, but predictor {self.predictor.model_id!r} has patches of 1x1",
                              "set it to null")  # fmt: skip

    def _check_kinds(self) -> None:
        """Raise ConfigError unless autoencoder, text encoders and teachers fit the predictor."""
        axes = len(self.predictor.latent_shape) - 1
        if axes not in self.ae.pixel_axes:
            fitting = [name for name, config in AE_CONFIGS.items() if axes in config.pixel_axes]
            raise ConfigError(
                f"ae.model_id = {self.ae.model_id!r}",
                f"does not encode {'images' if axes == 2 else 'videos'}, which predictor "
                f"{self.predictor.model_id!r} needs",
                f"use {' or '.join(fitting)}",
            )
        self._check_text_encoders()
        self._check_teachers()
        needs_image_encoder = self.predictor.conditions.image_tokens is not None
        if needs_image_encoder != (self.image_encoder is not None):
            raise ConfigError(
                "image_encoder",
                "this section is missing: predictor.image_dim needs CLIP's features of the first frame"
                if needs_image_encoder
                else "is not used: predictor.image_dim is null",
                'add {"from_pretrained": "folder"}' if needs_image_encoder else "drop the section",
            )

    def _check_teachers(self) -> None:
        """Raise ConfigError unless each teacher has a projector, and predictor and diffusion support teachers."""
        widths, count = list(self.predictor.z_dims), len(self.teachers)
        if len(widths) != count:
            raise ConfigError(
                f"predictor.z_dims = {widths}",
                f"needs {len(widths)} teachers, but section teacher lists {count}",
                "list the width of each teacher's features, or drop both: weights load without projectors",
            )
        if count and (isinstance(self.diffusion, MeanFlowConfig) or len(self.predictor.latent_shape) != 3):
            raise ConfigError(
                "teacher", f"only works for images and a single timestep, not for {self.diffusion.model_id} "
                f"with latents {self.predictor.latent_shape}", "drop the section and predictor.z_dims",
            )  # fmt: skip

    def _check_text_encoders(self) -> None:
        """Raise ConfigError unless the text encoders are exactly those that the conditions refer to."""
        encoders = [part.encoder for condition in self._texts for part in condition.parts]
        what, predictor = "text_encoder", f"predictor {self.predictor.model_id!r}"
        if encoders and not self.text_encoders:
            raise ConfigError(
                what,
                f"this section is missing: {predictor} is conditioned on text",
                'add {"model_id": "umt5", "from_pretrained": "folder"}',
            )
        if self.text_encoders and not encoders:
            raise ConfigError(what, f"{predictor} is not conditioned on text", "drop the section")
        if encoders and set(encoders) != set(range(len(self.text_encoders))):
            raise ConfigError(
                what,
                f"has {len(self.text_encoders)} encoders, but {predictor} needs {max(encoders) + 1}",
                "give one for each, in the order of the predictor's settings",
            )

    def tuned_by(self) -> dict[str, Any]:
        """Return the flags that restrict training, with their values: none here (see ``configs/tuning.py``)."""
        return {}

    @property
    def text_encoders(self) -> tuple[TextEncoderConfig, ...]:
        """The text encoders, in the order of model.json; empty without the section.

        Settings that a section leaves out are those published with the predictor.
        """
        encoders = [*_several(self.text_encoder)]
        for number, published in (pair for condition in self._texts for pair in condition.published.items()):
            encoders[number : number + 1] = [encoder.completed(published) for encoder in encoders[number : number + 1]]
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
                what,
                f"predictor {self.predictor.model_id!r} learns {learns}, but this command is for images with labels",
                "generate samples with mm-dit sample",
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
    sections = {
        name: _section(content, name, kinds, where)
        for name, kinds in (("ae", AE_CONFIGS), ("diffusion", DIFFUSION_CONFIGS), ("predictor", PREDICTOR_CONFIGS))
    }
    sections["text_encoder"] = _text_encoders(content.get("text_encoder"), f"{where}: text_encoder")
    sections["teacher"] = _teachers(content.get("teacher"), f"{where}: teacher")
    return from_mapping(ModelConfig, {**content, **sections}, where)


def autoencoder_in(path: str, where: str) -> PretrainedAutoencoderConfig:
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
                f"{where} = {path}",
                f"is not a known autoencoder: _class_name is {short_repr(class_name)}",
                f"name one of {', '.join(kinds)}",
            )
        kind = kinds[class_name]
    config = kind(**kind.spelled_out({"from_pretrained": path}, where))
    try:
        config.check_files()
        if not config_file(path).is_file():
            raise CheckpointError(f"{where} = {path}", "has no config.json, which names the kind of autoencoder",
                                  "copy diffusers' config.json next to the weights")  # fmt: skip
    except CheckpointError as error:
        raise CheckpointError(error.what.replace("ae.from_pretrained", where), error.reason, error.cure) from None
    return config


def spelled_out(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the parsed model.json of ``where`` with preset and autoencoder settings filled in.

    Raises ConfigError if a key contradicts the preset or the autoencoder's config.json.
    """
    content, ae = _with_preset(content, where), content.get("ae")
    if isinstance(ae, dict) and isinstance(ae.get("model_id"), str) and ae["model_id"] in AE_CONFIGS:
        content["ae"] = AE_CONFIGS[ae["model_id"]].spelled_out(ae, f"{where}: ae")
    return content


def _section(content: Mapping[str, Any], name: str, kinds: Mapping[str, type], where: str) -> Any:
    if name not in content:
        raise ConfigError(f"{where}: {name}", "this section is required and missing")
    section = content[name]
    model_id = section.get("model_id") if isinstance(section, dict) else None
    return _from_registry(section, model_id, kinds, f"{where}: {name}")


def _from_registry(section: Any, model_id: Any, kinds: Mapping[str, type], where: str) -> Any:
    if not isinstance(model_id, str) or model_id not in kinds:
        raise ConfigError(
            f"{where}.model_id = {short_repr(model_id)}",
            "unknown model_id",
            f"{nearest(str(model_id), kinds)}Known: {', '.join(kinds)}",
        )
    _check_class(kinds[model_id], f"{where}.model_id = {model_id!r}")
    return from_mapping(kinds[model_id], section, where)


def _check_class(kind: type, setting: str) -> None:
    """Raise PlatformError if a plugin's config class is not a frozen dataclass, or has abstract methods."""
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    missing = [] if is_frozen else ["@dataclass(frozen=True)"]
    missing += sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise PlatformError(f"{setting}, {kind.__module__}.{kind.__qualname__}", f"lacks {', '.join(missing)}",
                            "complete it, or uninstall its package")  # fmt: skip


def _several(section: Any) -> tuple[Any, ...]:
    return section if isinstance(section, tuple) else () if section is None else (section,)


def _teachers(section: Any, where: str) -> Any:
    """Return the parsed section ``teacher``: one teacher, or a tuple of them."""
    if isinstance(section, list):
        return tuple(_teachers(entry, f"{where}[{number}]") for number, entry in enumerate(section)) or None
    model_id = section.get("model_id") if isinstance(section, dict) else None
    return None if section is None else _from_registry(section, model_id, TEACHER_CONFIGS, where)


def _text_encoders(section: Any, where: str) -> Any:
    """Return the parsed section ``text_encoder``: one encoder, or a tuple of them; without model_id it is a UMT5."""
    if isinstance(section, list):
        return tuple(_text_encoders(entry, f"{where}[{number}]") for number, entry in enumerate(section)) or None
    if not isinstance(section, dict):
        return None if section is None else from_mapping(UMT5Config, section, where)
    return _from_registry(section, section.get("model_id", UMT5Config.model_id), TEXT_ENCODER_CONFIGS, where)


def _with_preset(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace ``predictor.preset`` by its sizes; sizes in the section must agree with it."""
    predictor = content.get("predictor")
    if not isinstance(predictor, dict) or "preset" not in predictor:
        return dict(content)
    settings = dict(predictor)
    name = settings.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            f"{where}: predictor.preset = {short_repr(name)}",
            "unknown preset",
            f"{nearest(str(name), PRESETS)}Presets are: {', '.join(PRESETS)}",
        )
    for key, value in PRESETS[name].items():
        if settings.setdefault(key, value) != value:
            raise ConfigError(
                f"{where}: predictor.{key} = {short_repr(settings[key])}",
                f"contradicts preset {name}, which has {value}",
                f"drop either the preset or {key}",
            )
    return {**content, "predictor": settings}


MOST_TIMESTEPS = 1_000_000
"""Most steps of a diffusion chain: float64 tables of this length take 0.1 GB, and seconds to make."""


@dataclass(frozen=True)
class GaussianDiffusionConfig:
    """Section ``diffusion`` with ``model_id`` "gaussian_diffusion"."""

    num_train_timesteps: int = 1000
    """Number T of diffusion steps that the network is trained on, 2 to 1,000,000; more than 20 with "linear"."""
    noise_schedule: Literal["linear", "squaredcos_cap_v2"] = "linear"
    """Noise schedule: linear betas (Ho et al. 2020) or squared cosine (Nichol & Dhariwal 2021)."""
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    """What the network predicts: the noise, x_0, or v (Salimans & Ho 2022)."""
    variance_type: Literal["learned_range", "fixed_small", "fixed_large"] = "learned_range"
    """Variance of p(x_{t-1} | x_t): interpolated by the network (needs the predictor's ``learn_sigma``), or one of Ho
    et al.'s two constants."""
    model_id: str = "gaussian_diffusion"
    """Kind of objective."""

    def __post_init__(self) -> None:
        cure = "the published DiT has 1000"
        check_between("diffusion.num_train_timesteps", self.num_train_timesteps, 2, MOST_TIMESTEPS, cure)
        if self.noise_schedule == "linear" and self.num_train_timesteps <= 20:
            raise ConfigError(
                f"diffusion.num_train_timesteps = {self.num_train_timesteps}",
                f"the linear schedule would end at beta = 20 / {self.num_train_timesteps}, which must be below 1",
                "use more than 20, or noise_schedule squaredcos_cap_v2",
            )

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError unless ``out_channels`` is ``in_channels``, or twice as many if the variance is learned."""
        learned = self.variance_type == "learned_range"
        needed = in_channels * (2 if learned else 1)
        if out_channels != needed:
            raise ConfigError(
                f"diffusion.variance_type = {self.variance_type}",
                f"does not fit a network of {out_channels} output channels: it needs {needed}, {in_channels} for noise"
                + (" and as many for variances" if learned else ""),
                "'learned_range' goes with a DiT's learn_sigma true, 'fixed_small' and 'fixed_large' with false",
            )

    @property
    def saved_tensors(self) -> int:
        """Number of float32 tensors of the size of a latent that the loss keeps for backward."""
        return 24 if self.variance_type == "learned_range" else 4
