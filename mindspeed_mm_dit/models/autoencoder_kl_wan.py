"""Wan's video autoencoder (Wan et al. 2025) on PyTorch: diffusers' AutoencoderKLWan, frozen.

Raw latents are what the network gives; normalised latents are what a model learns: (raw - mean) / std of each channel,
with the numbers of the autoencoder's config.json. MindSpeed-MM's ``wan_video_vae`` encodes to normalised latents too,
but decodes raw ones; ours takes back what ``encode`` gave.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.pretrained import load_diffusers


class AutoencoderKLWan(Autoencoder):
    """Encodes videos to normalised latents and back."""

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__(config)
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
        self.module = runtime.freeze(load_diffusers(config), config.dtype)
        if config.enable_tiling:
            self.module.enable_tiling(**dataclasses.asdict(config.tiling()))

    @torch.no_grad()
    def moments(self, videos: Tensor) -> tuple[Tensor, Tensor]:
        self.config.latent_shape(tuple(videos.shape[2:]))
        with self._own_precision():
            posterior = self.module.encode(videos.to(self._dtype)).latent_dist
        return posterior.mean.float(), posterior.std.float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        raw = self.raw(latents.float()).to(self._dtype)
        with self._own_precision():
            return self.module.decode(raw).sample.float()

    def _own_precision(self) -> torch.autocast:
        """``ae.dtype`` decides, also inside the autocast of a bf16 training step."""
        return torch.autocast(runtime.device_type(), enabled=False)
