"""The autoencoders, one record each."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.autoencoder import PixelConfig
from mindspeed_mm_dit.configs.autoencoder_kl_wan import QwenImageVAEConfig, WanVAEConfig
from mindspeed_mm_dit.configs.autoencoder_of_images import (
    AutoencoderDCConfig,
    AutoencoderKLConfig,
    AutoencoderTinyConfig,
)
from mindspeed_mm_dit.framework import own
from mindspeed_mm_dit.models.autoencoder import AutoencoderKind, PixelAutoencoder


def _autoencoder_kl(config: Any) -> Any:
    return own("mindspeed_mm_dit.models.autoencoder_kl").AutoencoderKL(config)


def _wan_video_vae(config: Any) -> Any:
    from mindspeed_mm_dit.models.diffusers_autoencoders import AutoencoderKLWan

    return AutoencoderKLWan(config)


def _qwen_image_vae(config: Any) -> Any:
    from mindspeed_mm_dit.models.diffusers_autoencoders import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(config)


def _deterministic(config: Any) -> Any:
    from mindspeed_mm_dit.models.diffusers_autoencoders import DiffusersAutoencoder

    return DiffusersAutoencoder(config)


PIXEL = AutoencoderKind(PixelConfig, PixelAutoencoder)
AUTOENCODER_KL = AutoencoderKind(AutoencoderKLConfig, _autoencoder_kl)
WAN_VIDEO_VAE = AutoencoderKind(WanVAEConfig, _wan_video_vae)
QWEN_IMAGE_VAE = AutoencoderKind(QwenImageVAEConfig, _qwen_image_vae)
AUTOENCODER_TINY = AutoencoderKind(AutoencoderTinyConfig, _deterministic)
AUTOENCODER_DC = AutoencoderKind(AutoencoderDCConfig, _deterministic)
