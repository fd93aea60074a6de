"""Sections ``teacher`` and ``image_encoder`` of model.json: frozen image networks.

A DiT learns to predict the features of a teacher while it trains (REPA). Wan 2.1 attends to the features that CLIP's
vision half, the image encoder, has of the first frame.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from mindspeed_mm_dit.configs.files import check_model_folder, digest_of_files
from mindspeed_mm_dit.configs.limits import Between, PathText, Section
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.text_encoder import resolve_folder

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


@dataclass(frozen=True)
class TeacherConfig(Section, ABC):
    """Base of the config classes of section ``teacher``: frozen dataclasses with a field ``model_id``.

    A teacher turns an image into features (N, width), one for each token of the network that learns from it.
    """

    section = "teacher"

    weight: Annotated[float, Between(0, 1e3)] = 0.5
    """Weight of its term in the loss, 0 to 1000; the objective itself has weight 1 (REPA: ``proj-coeff``)."""
    model_id: str = ""
    """Kind of teacher."""

    frameworks: ClassVar[tuple[str, ...]] = ("pytorch",)
    """Frameworks that can run it."""

    @abstractmethod
    def width(self) -> int:
        """Return the width of a feature, without reading weights; raises ConfigError if its files do not contain it."""

    @abstractmethod
    def identity(self) -> str:
        """Return everything that decides its output, as text: its files and precision."""

    def weight_bytes(self) -> int:
        """Return the bytes of its weights in memory; 0 if its files do not exist yet."""
        return 0


@dataclass(frozen=True)
class TransformersVisionConfig(Section):
    """Base of the vision transformers in a folder that transformers saved."""

    from_pretrained: PathText = ""
    """Local folder as transformers saves it: config.json and weights."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which it runs."""

    kinds: ClassVar[Mapping[str, str]]
    """Values of ``model_type`` in config.json that it accepts, each with its class in transformers."""
    pixels: ClassVar[tuple[tuple[float, ...], tuple[float, ...]]]
    """Mean and standard deviation of each of 3 channels in [0, 1]; its inputs are normalised by them."""
    frameworks: ClassVar[tuple[str, ...]] = ("pytorch",)
    """Frameworks that can run it."""

    @property
    def setting(self) -> str:
        """The key of model.json that names its folder."""
        return self.full_key("from_pretrained")

    @property
    def folder(self) -> Path:
        """Its folder; raises ConfigError if it is in a package that is not installed."""
        return resolve_folder(self.setting, self.from_pretrained)

    @property
    def module(self) -> str:
        """Its class in transformers."""
        return self.kinds[self._read()["model_type"]]

    def number(self, key: str) -> int:
        """Return ``key`` of config.json, a positive whole number; raises ConfigError for another kind of network."""
        value = self._read().get(key)
        if type(value) is not int or value < 1:
            problem = f"has {key} = {value!r} in its config.json, which is not a size"
            raise self.error("from_pretrained", f"{problem}. Copy the folder again.")
        return value

    def _read(self) -> dict[str, Any]:
        """Return config.json, or its part about the vision half; raises ConfigError for another kind of network."""
        check_model_folder(self.setting, self.folder)
        content = read_json(self.folder / "config.json", self.setting)
        for part in (content, content.get("vision_config")):
            if isinstance(part, dict) and part.get("model_type") in [*self.kinds]:
                return part
        raise self.error(
            "from_pretrained",
            f"is not a {next(iter(self.kinds))}: its config.json has model_type = {content.get('model_type')!r}. "
            "Name a folder of that kind, or another model_id.",
        )

    def width(self) -> int:
        """Return the width of a feature, without reading weights; raises ConfigError if its files do not contain it."""
        return self.number("hidden_size")

    def weight_bytes(self) -> int:
        """Return the bytes of its weights in memory; 0 if its files do not exist yet."""
        files = [*self.folder.glob("*.safetensors")] or [*self.folder.glob("*.bin")]
        return sum(file.stat().st_size for file in files)

    def identity(self) -> str:
        """Return everything that decides its output, as text: its files and precision."""
        return f"{digest_of_files(str(self.folder), self.setting)}, {self.dtype}"


@dataclass(frozen=True)
class TransformersTeacherConfig(TransformersVisionConfig, TeacherConfig):
    """Base of the teachers that transformers loads."""


@dataclass(frozen=True)
class Dinov2Config(TransformersTeacherConfig):
    """DINOv2 (Oquab et al. 2023), the teacher of REPA, with or without registers."""

    model_id: Literal["dinov2"] = "dinov2"

    kinds: ClassVar[Mapping[str, str]] = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
    pixels = _IMAGENET


@dataclass(frozen=True)
class SiglipConfig(TransformersTeacherConfig):
    """The vision encoder of SigLIP (Zhai et al. 2023)."""

    model_id: Literal["siglip"] = "siglip"

    kinds: ClassVar[Mapping[str, str]] = {"siglip_vision_model": "SiglipVisionModel"}
    pixels = _HALVES


@dataclass(frozen=True)
class ImageEncoderConfig(TransformersVisionConfig):
    """The ``image_encoder/`` folder of Wan 2.1's image-to-video: transformers' CLIPVisionModel."""

    model_id: Literal["clip_vision"] = "clip_vision"
    """Kind of image encoder."""

    kinds: ClassVar[Mapping[str, str]] = {"clip_vision_model": "CLIPVisionModel"}
    pixels = _CLIP
    section = "image_encoder"

    def tokens(self) -> int:
        """Return the number of features of an image: one for each patch, and one for the whole."""
        return int(self.number("image_size") // self.number("patch_size")) ** 2 + 1


def feature_names(count: int) -> tuple[str, ...]:
    """Return the names of the features of ``count`` teachers in a batch and in a cache."""
    return tuple(f"features{number}" for number in range(count))


def tokens_per_side(num_tokens: int) -> int:
    """Return the number of tokens along one side of a square image."""
    return math.isqrt(num_tokens)
