"""AutoencoderKL on PyTorch: diffusers' module, frozen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.pretrained import quiet

if TYPE_CHECKING:
    from diffusers import AutoencoderKL as DiffusersAutoencoderKL

    from mindspeed_mm_dit.configs.autoencoder_kl import AutoencoderKLConfig


class AutoencoderKL(Autoencoder):
    """Encodes images to scaled latents and back."""

    def __init__(self, config: AutoencoderKLConfig) -> None:
        super().__init__(config)
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
        self.module = runtime.freeze(_load(config), config.dtype).to(memory_format=torch.channels_last)

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with self._own_precision():
            posterior = self.module.encode(images.to(self._dtype, memory_format=torch.channels_last)).latent_dist
        return posterior.mean.float().contiguous(), posterior.std.float().contiguous()

    @torch.no_grad()
    def decode(self, scaled_latents: Tensor) -> Tensor:
        latents = self.raw(scaled_latents).to(self._dtype)
        with self._own_precision():
            return self.module.decode(latents).sample.float()

    def _own_precision(self) -> torch.autocast:
        """``ae.dtype`` decides, also inside the autocast of a bf16 training step."""
        return torch.autocast(runtime.device_type(), enabled=False)


def _load(config: AutoencoderKLConfig) -> DiffusersAutoencoderKL:
    from diffusers import AutoencoderKL as DiffusersAutoencoderKL
    from diffusers.utils import logging

    config.check_files()
    path = Path(config.from_pretrained)
    try:
        with quiet(logging):
            if path.is_dir():
                module = DiffusersAutoencoderKL.from_pretrained(path, local_files_only=True)
            else:
                module = DiffusersAutoencoderKL.from_single_file(
                    str(path), config=str(path.parent), local_files_only=True
                )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"ae.from_pretrained = {path}", f"diffusers cannot load it: {error}") from error
    return module
