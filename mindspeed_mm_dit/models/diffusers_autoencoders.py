"""Frozen autoencoders of diffusers on PyTorch: AutoencoderKL, AutoencoderTiny (TAESD) and AutoencoderDC for images,
and Wan's for videos (Wan et al. 2025).

With Wan's autoencoder a model learns normalised latents: (raw - mean) / std per channel, with the numbers of the
autoencoder's config.json. MindSpeed-MM's ``wan_video_vae`` also encodes to normalised latents, but decodes raw ones;
our ``decode`` takes the latents that ``encode`` returns.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_mm_dit.configs.autoencoder import PretrainedAutoencoderConfig, WanVAEConfig
from mindspeed_mm_dit.configs.files import error_text
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.pretrained import load_diffusers, quiet


class DiffusersAutoencoder(Autoencoder):
    """An autoencoder of diffusers, with or without a posterior."""

    memory_format = torch.preserve_format
    """Memory format of images while they are encoded."""

    def __init__(self, config: PretrainedAutoencoderConfig) -> None:
        import diffusers

        super().__init__(config)
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
        loaded = self._load(config)
        with quiet(diffusers.utils.logging):
            self.module = runtime.freeze(loaded, config.dtype).to(memory_format=self.memory_format)

    def _load(self, config: Any) -> Any:
        return load_diffusers(config)

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        with self._without_autocast():
            encoded = self.module.encode(images.to(self._dtype, memory_format=self.memory_format), return_dict=False)[0]
        if isinstance(encoded, Tensor):
            return encoded.float(), None
        return encoded.mean.float().contiguous(), encoded.std.float().contiguous()

    @torch.no_grad()
    def decode(self, scaled_latents: Tensor) -> Tensor:
        latents = self.raw(scaled_latents.float()).to(self._dtype)
        with self._without_autocast():
            return self._decoded(latents).float()

    def _decoded(self, latents: Tensor) -> Tensor:
        return self.module.decode(latents).sample

    def _without_autocast(self) -> torch.autocast:
        """Turn autocast off, so that ``ae.dtype`` applies inside a bf16 training step too."""
        return torch.autocast(runtime.device_type(), enabled=False)


class AutoencoderKL(DiffusersAutoencoder):
    """The autoencoder of latent diffusion; its weights may also be a single file, as its authors published them."""

    memory_format = torch.channels_last

    def _load(self, config: Any) -> Any:
        import diffusers

        config.check_files()
        path = Path(config.from_pretrained)
        try:
            with quiet(diffusers.utils.logging):
                if path.is_dir():
                    return diffusers.AutoencoderKL.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                return diffusers.AutoencoderKL.from_single_file(
                    str(path), config=str(path.parent), local_files_only=True
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"ae.from_pretrained = {path} cannot be loaded by diffusers: {error_text(error)}."
            ) from error


class AutoencoderKLWan(DiffusersAutoencoder):
    """Wan's video autoencoder; raises ConfigError if its downsampling does not fit F, H or W exactly."""

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__(config)
        if config.enable_tiling:
            self.module.enable_tiling(**dataclasses.asdict(config.tiling()))

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        self.config.latent_shape(tuple(images.shape[2:]))
        return super().moments(images)


class AutoencoderKLQwenImage(AutoencoderKLWan):
    """Qwen-Image's autoencoder: an image is a video of one frame."""

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, std = super().moments(images[:, :, None])  # (B, C, 1, h, w) each
        return mean[:, :, 0], None if std is None else std[:, :, 0]

    def _decoded(self, latents: Tensor) -> Tensor:
        return super()._decoded(latents[:, :, None])[:, :, 0]
