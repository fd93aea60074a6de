"""Section ``image_encoder`` of model.json: CLIP's vision half, whose features of the first frame Wan 2.1 attends to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mindspeed_mm_dit.configs.teacher import TransformersVisionConfig

_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


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
