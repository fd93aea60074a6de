"""The encoders, teachers and networks of a model.json, which names each by its ``model_id``.

A predictor is a config class that names its network (``configs/predictor.py``); the others are records. All are
registered by name (``mindspeed_mm_dit.registry``). No framework is imported before something is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderConfig
from mindspeed_mm_dit.configs.condition import ImageTokens
from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS as PREDICTOR_CONFIGS
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.teacher import (
    Dinov2Config,
    ImageEncoderConfig,
    SiglipConfig,
    TeacherConfig,
    TransformersTeacherConfig,
    TransformersVisionConfig,
    tokens_per_side,
)
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.configs.tuning import LoraSpec, is_linear_weight
from mindspeed_mm_dit.data.captions import Tokenizer
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError
from mindspeed_mm_dit.framework import active
from mindspeed_mm_dit.models.autoencoder import AutoencoderSpec, NoAutoencoder
from mindspeed_mm_dit.models.meta import lora_specs, parameters_of
from mindspeed_mm_dit.models.pretrained import check_weights, read_tensors
from mindspeed_mm_dit.models.text_encoder import TextEncoder, TextEncoderSpec
from mindspeed_mm_dit.objectives.registry import OBJECTIVES as OBJECTIVES
from mindspeed_mm_dit.objectives.registry import register_objective as register_objective
from mindspeed_mm_dit.registry import Registry, import_object

_SPELLED = {"pytorch": "PyTorch", "mindspore": "MindSpore"}


@dataclass(frozen=True)
class TeacherSpec:
    """A kind of teacher, selected by ``model_id`` in section ``teacher`` of model.json."""

    config: type[TeacherConfig]
    """Frozen dataclass of the section."""
    build: Callable[[Any, int], Callable[[Tensor], Tensor]]
    """(config, tokens in a row) -> the network, (images (B, 3, H, W) in [-1, 1]) -> features (B, N, width) float32;
    imports the framework only when called."""
    check_files: Callable[[Any], None] = lambda config: None
    """(config): raise a UserError if weights are missing or cut short; called before any device work."""


AUTOENCODERS = Registry[AutoencoderSpec]("autoencoder")
TEXT_ENCODERS = Registry[TextEncoderSpec]("text_encoder")
TEACHERS = Registry[TeacherSpec]("teacher")


def network_class(kind: type[PredictorConfig]) -> Any:
    """Return the class of the networks that a class of sections ``predictor`` describes."""
    return import_object(kind.network, f"the network of {kind.__name__}")


def network_of(config: PredictorConfig) -> Any:
    """Build the network of a section ``predictor``; its values are loaded later."""
    return network_class(type(config))(config)


class _Builders(Mapping[str, Callable[[PredictorConfig], Any]]):
    """Builds the network of each registered predictor, by ``model_id``: the table that MindSpeed-MM expects."""

    def __getitem__(self, name: str) -> Callable[[PredictorConfig], Any]:
        if name not in PREDICTOR_CONFIGS:
            raise KeyError(name)
        return network_of

    def __iter__(self) -> Iterator[str]:
        return iter(PREDICTOR_CONFIGS)

    def __len__(self) -> int:
        return len(PREDICTOR_CONFIGS)


PREDICTOR_MODEL_MAPPINGS = _Builders()


def build_predictor(config: ModelConfig, base_dtype: str = "", adapters: Mapping[str, LoraSpec] | None = None) -> Any:
    """Build the network of model.json; the values are loaded later.

    base_dtype: format of few bits for the weights of all linear layers, for sampling; a run says so in ``config``.
    adapters: adapter by layer (default: those of ``config``).
    """
    formats = {
        name: p.stored_as or base_dtype
        for name, p in parameters_of(config).items()
        if p.stored_as or (base_dtype and is_linear_weight(name, p))
    }
    if formats:
        from mindspeed_mm_dit.framework import runtime

        with runtime.without_weights():
            network = network_of(config.predictor)
        runtime.pack_weights(network, formats)
    else:
        network = network_of(config.predictor)
    if adapters := lora_specs(config) if adapters is None else adapters:
        from mindspeed_mm_dit.models.layers import add_lora

        add_lora(network, adapters)
    return network


def load_autoencoder(config: AutoencoderConfig, encodes: bool = True) -> Any:
    """Load the autoencoder of section "ae"; without ``encodes`` the weights stay on disk.

    Raises PlatformError if it cannot run on the active framework.
    """
    if not encodes:
        return NoAutoencoder(config)
    check_framework(config)
    return AUTOENCODERS[config.model_id].build(config)


def open_tokenizer(config: TextEncoderConfig) -> Tokenizer:
    """Return the tokenizer of a section "text_encoder"; raises ConfigError unless it belongs to the encoder."""
    return TEXT_ENCODERS[config.model_id].open_tokenizer(config)


def load_text_encoder(config: TextEncoderConfig) -> TextEncoder:
    """Check that tokenizer and encoder belong together, and load both.

    Raises:
        ConfigError: they do not belong together.
        DataError, CheckpointError: one of them is missing or damaged.
        PlatformError: a package that reads it is not installed, or it cannot run on the active framework.
    """
    tokenizer = open_tokenizer(config)
    check_framework(config)
    kind = TEXT_ENCODERS[config.model_id]
    kind.check_files(config)
    return TextEncoder(tokenizer, kind.build(config))


def load_teachers(config: ModelConfig) -> tuple[Any, ...]:
    """Load the teachers of model.json, each with one feature per token of the predictor.

    Raises a UserError if files are missing or damaged, or a teacher cannot run on the active framework.
    """
    for teacher in config.teachers:
        check_framework(teacher)
    side = tokens_per_side(config.predictor.num_tokens)
    return tuple(TEACHERS[teacher.model_id].build(teacher, side) for teacher in config.teachers)


def load_image_encoder(config: ImageEncoderConfig | None) -> Callable[[Any], Any] | None:
    """Load section "image_encoder", if there is one: images (B, 3 or 1, H, W) in [-1, 1] -> features (B, L, width).

    Raises a UserError if files are missing or damaged, or the active framework cannot run it.
    """
    if config is None:
        return None
    check_framework(config)
    from mindspeed_mm_dit.models.pytorch_encoders import CLIPVision

    return CLIPVision(config)


def load_encoders(config: ModelConfig, encodes: bool = True) -> tuple[Any, tuple[TextEncoder, ...]]:
    """Load the autoencoder and the text encoders of model.json; see :func:`load_autoencoder`."""
    texts = config.text_encoders if encodes else ()
    return load_autoencoder(config.ae, encodes), tuple(load_text_encoder(text) for text in texts)


def check_encoders(config: ModelConfig, teachers: bool = True) -> None:
    """Raise a UserError unless the encoders' files fit model.json and the active framework can run them.

    teachers: whether to check the teachers too; sampling does not need them.
    """
    config = config if teachers else config.without_teachers()
    check_framework(config.ae)
    for text in config.text_encoders:
        check_framework(text)
    config.ae.check_files()
    for teacher in config.teachers:
        check_framework(teacher)
        TEACHERS[teacher.model_id].check_files(teacher)
    for text in config.text_encoders:
        TEXT_ENCODERS[text.model_id].check_files(text)
    if config.image_encoder is not None:
        check_framework(config.image_encoder)
        _check_image_tokens(config.image_encoder, config.predictor.conditions.image_tokens)
        check_vision_files(config.image_encoder)


def _check_image_tokens(encoder: ImageEncoderConfig, condition: ImageTokens) -> None:
    """Raise ConfigError unless CLIP's features, by its config.json, have the number and width the predictor takes."""
    actual = (encoder.tokens() * (2 if condition.with_last else 1), encoder.width())
    if actual != (condition.length, condition.width):
        raise ConfigError(
            f"predictor.image_dim = {condition.width} takes {condition.length} features of that width, but "
            f"{encoder.setting} makes {actual[0]} of width {actual[1]} (by its config.json). Name the image_encoder/ "
            "folder of the published model."
        )


def check_framework(config: AutoencoderConfig | TextEncoderConfig | TeacherConfig | ImageEncoderConfig) -> None:
    """Raise PlatformError if an encoder cannot run on the active framework."""
    if active() not in config.frameworks:
        raise PlatformError(
            f"model_id = {config.model_id!r} runs only on "
            f"{' and '.join(_SPELLED[name] for name in config.frameworks)}, not on {active()}. Encode once with "
            "PyTorch (mm-dit cache-latents), and name the folder in dataset_param.latents (for videos in "
            "dataset_param.features)."
        )


def register_autoencoder(model_id: str, kind: AutoencoderSpec) -> None:
    """Add an autoencoder, so that section ``ae`` can name its ``model_id``; ConfigError if the name is taken."""
    AUTOENCODERS[model_id] = kind


def register_text_encoder(model_id: str, kind: TextEncoderSpec) -> None:
    """Add a text encoder, so that section ``text_encoder`` can name its ``model_id``; ConfigError if it is taken."""
    TEXT_ENCODERS[model_id] = kind


def register_teacher(model_id: str, kind: TeacherSpec) -> None:
    """Add a teacher, so that section ``teacher`` can name its ``model_id``; ConfigError if the name is taken."""
    TEACHERS[model_id] = kind


def register_predictor(config: type[PredictorConfig]) -> None:
    """Add a predictor, so that section ``predictor`` can name its ``model_id``; its config names its network.

    Raises ConfigError if the name is taken.
    """
    PREDICTOR_CONFIGS[config.model_id] = config


Tensor = Any


def _build(config: TransformersTeacherConfig, side: int) -> Any:
    from mindspeed_mm_dit.models.pytorch_encoders import TransformersTeacher

    return TransformersTeacher(config, side)


def check_vision_files(config: TransformersVisionConfig) -> None:
    """Raise a UserError unless the weights of a vision transformer are complete, finite, and fit its config.json."""
    config.width()
    check_weights(config.setting, config.folder)
    what, patch = f"{config.setting} = {config.folder}", config.number("patch_size")
    for name, array in read_tensors(config.setting, config.folder):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CheckpointError(f"{what} has weight {name} with numbers that are not finite. Copy the folder again.")
        if array.ndim == 4 and array.shape[-2:] != (patch, patch):  # (the patch embedding is its only convolution)
            raise CheckpointError(
                f"{what} has patch_size = {patch} in its config.json, but its weight {name} is {array.shape}. Copy the "
                "folder again."
            )


DINOV2 = TeacherSpec(Dinov2Config, _build, check_vision_files)
SIGLIP = TeacherSpec(SiglipConfig, _build, check_vision_files)
