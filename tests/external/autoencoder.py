"""An autoencoder as another package brings it: four neighbouring pixels become four channels, shifted and scaled."""

from dataclasses import dataclass

from mindspeed_mm_dit.configs.autoencoder import AutoencoderConfig, LatentScale, Shape, divided
from mindspeed_mm_dit.models.autoencoder import Autoencoder, AutoencoderSpec


@dataclass(frozen=True)
class FoldedConfig(AutoencoderConfig):
    """Pixels of 2 x 2 as channels."""

    channels: int = 1
    shift_factor: float = 0.0
    model_id: str = "folded"

    downsample_factor = 2
    samples_posterior = False

    @property
    def latent_channels(self) -> int:
        return 4 * self.channels

    def latent_shape(self, size: Shape) -> Shape:
        return self.latent_channels, *divided(size, 2)

    def sample_size(self, latent: Shape) -> Shape:
        return 2 * latent[1], 2 * latent[2]

    def scale(self) -> LatentScale:
        return LatentScale(shift=self.shift_factor, scale=2.0)

    def identity(self) -> str:
        return f"folded, {self.channels} channels"


class Folded(Autoencoder):
    """Encodes images to folded ones and back, on either framework."""

    def moments(self, images):
        from mindspeed_mm_dit.framework import ops

        B, C, H, W = images.shape
        x = ops.reshape(images, (B, C, H // 2, 2, W // 2, 2))
        return ops.reshape(ops.permute(x, (0, 1, 3, 5, 2, 4)), (B, 4 * C, H // 2, W // 2)), None

    def decode(self, scaled_latents):
        from mindspeed_mm_dit.framework import ops

        x = self.raw(scaled_latents)
        B, C, h, w = x.shape
        x = ops.permute(ops.reshape(x, (B, C // 4, 2, 2, h, w)), (0, 1, 4, 2, 5, 3))
        return ops.reshape(x, (B, C // 4, 2 * h, 2 * w))


FOLDED = AutoencoderSpec(FoldedConfig, Folded)
