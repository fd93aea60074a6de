"""What an autoencoder is on paper: sizes, scale and files. Each kind is a class of section ``ae`` of model.json.

Raw latents are what an encoder gives, scaled latents what a model learns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mindspeed_mm_dit.configs.files import digest_of_files
from mindspeed_mm_dit.errors import ConfigError

Shape = tuple[int, ...]
_SETTINGS = {"height": "max_height", "width": "max_width"}


@dataclass(frozen=True)
class LatentScale:
    """Scaled latents are (raw - shift) * scale / std; each is one number, or one for each channel."""

    shift: float | tuple[float, ...] = 0.0
    """Taken away from raw latents."""
    scale: float | tuple[float, ...] = 1.0
    """What they are multiplied by then."""
    std: float | tuple[float, ...] = 1.0
    """What they are divided by then; where this is published, to multiply by 1 / std would round otherwise."""


class AutoencoderConfig(ABC):
    """Base of the config classes of section ``ae``: frozen dataclasses with a field ``model_id``."""

    model_id: str
    channels: int = 3
    """Channels of an image or a frame: 1 (grey) or 3 (RGB)."""
    latent_channels: int
    """Channels C of a latent."""
    downsample_factor: int
    """Height of an image over height of its latent."""
    pixel_axes: ClassVar[tuple[int, ...]] = (2,)
    """How many axes, behind the channels, what it encodes has: (2,) images, (3,) videos, (2, 3) both."""
    frameworks: ClassVar[tuple[str, ...]] = ("pytorch", "mindspore")
    """Those that run it."""
    is_cacheable: ClassVar[bool] = True
    """Whether its latents are worth keeping on disk."""
    diffusers_class: ClassVar[str] = ""
    """What diffusers calls it in ``_class_name`` of config.json; empty where it has none."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which it runs."""

    @property
    @abstractmethod
    def samples_posterior(self) -> bool:
        """Whether a training sample is a draw from the posterior, and carries noise for it."""

    @abstractmethod
    def latent_shape(self, size: Shape) -> Shape:
        """Return (C, ...) of the latents of an image of (H, W) pixels or a video of (F, H, W).

        Raises ConfigError for a size that it does not take whole.
        """

    @abstractmethod
    def sample_size(self, latent: Shape) -> Shape:
        """Return (H, W), or (F, H, W), in pixels of what latents (C, ...) are decoded to."""

    def scale(self) -> LatentScale:
        """Return what makes raw latents those that a model learns; raises ConfigError where its files are damaged."""
        return LatentScale()

    def digest(self) -> str:
        """Return the SHA-256 of its files, "" where it has none; raises DataError where they are missing."""
        return ""

    @abstractmethod
    def identity(self) -> str:
        """Return what decides the numbers that it makes: its files, precision, tiles."""

    def check_files(self) -> None:  # noqa: B027 (one without files has nothing to check)
        """Raise a UserError where its files are missing, damaged or contradict model.json; no weights are read."""

    def weight_bytes(self) -> int:
        """Return the bytes of its weights in memory, about."""
        return 0

    def workspace_bytes(self, size: Shape) -> int:
        """Return the bytes that encoding one image or video of ``size`` in pixels takes for a moment, about."""
        return 0

    @classmethod
    def spelled_out(cls, section: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return section ``ae`` with what it leaves to be looked up in files; raises ConfigError if they contradict."""
        return dict(section)


class PretrainedAutoencoderConfig(AutoencoderConfig):
    """One with files, at ``from_pretrained``."""

    from_pretrained: str

    def digest(self) -> str:
        """Return the SHA-256 of its files; raises DataError where they are missing."""
        return digest_of_files(self.from_pretrained)

    def identity(self) -> str:
        """Return the digest of its files and its precision."""
        return f"{self.digest()}, {self.dtype}"


def divided(size: Shape, factor: int) -> Shape:
    """Return (h, w), the last two of ``size`` in pixels divided by ``factor``; raises ConfigError if they cannot be."""
    height, width = size[-2:]
    for name, side in (("height", height), ("width", width)):
        if side % factor:
            setting = "image_size" if size == (height, height) else _SETTINGS[name]
            lower = side - side % factor
            raise ConfigError(
                f"dataset_param.{setting} = {side}",
                f"is no multiple of the autoencoder's factor: {side} % {factor} = {side % factor}",
                f"use {f'{lower} or ' if lower else ''}{lower + factor}",
            )
    return height // factor, width // factor
