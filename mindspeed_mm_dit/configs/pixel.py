"""Section ``ae`` without an autoencoder: a model learns the pixels themselves."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.configs.autoencoder import AutoencoderConfig, Shape
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class PixelConfig(AutoencoderConfig):
    """Section ``ae`` with ``model_id`` "pixel": no autoencoder, the images, or the videos, are the latents."""

    channels: int = 3
    """Channels of an image or a frame: 1 (grey) or 3 (RGB)."""
    model_id: str = "pixel"
    """Key in AE_MODEL_MAPPINGS."""

    downsample_factor = 1
    samples_posterior = False
    pixel_axes = (2, 3)
    is_cacheable = False

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ConfigError(f"ae.channels = {self.channels}", "images are grey (1) or RGB (3)")

    @property
    def latent_channels(self) -> int:  # type: ignore[override]
        """Channels of a latent."""
        return self.channels

    def latent_shape(self, size: Shape) -> Shape:
        """Return (C, ...) of an image or a video, as it is."""
        return self.channels, *size

    def sample_size(self, latent: Shape) -> Shape:
        """Return (H, W), or (F, H, W), of the image or video that latents (C, ...) are."""
        return latent[1:]

    def identity(self) -> str:
        """Return which pixels they are."""
        return f"{self.model_id}, {self.channels} channels"
