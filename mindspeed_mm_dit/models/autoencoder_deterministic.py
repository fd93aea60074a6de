"""Autoencoders of diffusers without a posterior, on PyTorch: AutoencoderTiny (TAESD) and AutoencoderDC, frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_mm_dit.configs.autoencoder_deterministic import DeterministicAutoencoderConfig
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.pretrained import load_diffusers


class DeterministicAutoencoder(Autoencoder):
    """Encodes images to scaled latents and back."""

    def __init__(self, config: DeterministicAutoencoderConfig) -> None:
        super().__init__(config)
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
        self.module = runtime.freeze(load_diffusers(config), config.dtype)

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(runtime.device_type(), enabled=False):  # ``ae.dtype`` decides, also inside a bf16 step
            return self.module.encode(images.to(self._dtype), return_dict=False)[0].float(), None

    @torch.no_grad()
    def decode(self, scaled_latents: Tensor) -> Tensor:
        with torch.autocast(runtime.device_type(), enabled=False):
            return self.module.decode(self.raw(scaled_latents).to(self._dtype)).sample.float()
