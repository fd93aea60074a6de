"""The autoencoders, one record each."""

from __future__ import annotations

from mindspeed_mm_dit.configs.autoencoder import PixelConfig
from mindspeed_mm_dit.configs.autoencoder_kl_wan import QwenImageVAEConfig, WanVAEConfig
from mindspeed_mm_dit.configs.autoencoder_of_images import (
    AutoencoderDCConfig,
    AutoencoderKLConfig,
    AutoencoderTinyConfig,
    Flux2VAEConfig,
)
from mindspeed_mm_dit.framework import active
from mindspeed_mm_dit.framework.lazy_imports import later
from mindspeed_mm_dit.models.autoencoder import AutoencoderKind, PixelAutoencoder

_DIFFUSERS = later("mindspeed_mm_dit.models.diffusers_autoencoders")
_PORTABLE = later("mindspeed_mm_dit.models.autoencoder_kl.autoencoder")


PIXEL = AutoencoderKind(PixelConfig, PixelAutoencoder)
AUTOENCODER_KL = AutoencoderKind(
    AutoencoderKLConfig, lambda config: (_DIFFUSERS if active() == "pytorch" else _PORTABLE).AutoencoderKL(config)
)
FLUX2_VAE = AutoencoderKind(Flux2VAEConfig, lambda config: _PORTABLE.AutoencoderKLFlux2(config))
WAN_VIDEO_VAE = AutoencoderKind(WanVAEConfig, lambda config: _DIFFUSERS.AutoencoderKLWan(config))
QWEN_IMAGE_VAE = AutoencoderKind(QwenImageVAEConfig, lambda config: _DIFFUSERS.AutoencoderKLQwenImage(config))
AUTOENCODER_TINY = AutoencoderKind(AutoencoderTinyConfig, lambda config: _DIFFUSERS.DiffusersAutoencoder(config))
AUTOENCODER_DC = AutoencoderKind(AutoencoderDCConfig, lambda config: _DIFFUSERS.DiffusersAutoencoder(config))
