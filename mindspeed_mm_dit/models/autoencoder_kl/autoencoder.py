"""AutoencoderKL on a portable network, for every framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig, Flux2VAEConfig
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.autoencoder_kl.files import KLArchitecture, read_autoencoder_kl, require_same_names
from mindspeed_mm_dit.models.autoencoder_kl.network import AutoencoderKLNetwork
from mindspeed_mm_dit.models.joint import pack, unpack
from mindspeed_mm_dit.models.layers import as_tokens

Tensor = Any  # a tensor of the active framework


class AutoencoderKL(Autoencoder):
    """Encodes images to scaled latents and back."""

    def __init__(self, config: AutoencoderKLConfig | Flux2VAEConfig) -> None:
        super().__init__(config)
        architecture, weights = self._read()
        network = AutoencoderKLNetwork(architecture)
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        require_same_names(f"ae.from_pretrained = {config.from_pretrained}", shapes, weights)
        runtime.load_arrays(network, weights)
        self.network = runtime.freeze(network, config.dtype)
        runtime.compiled(self.network.encoder)
        runtime.compiled(self.network.decoder)

    def _read(self) -> tuple[KLArchitecture, dict[str, np.ndarray]]:
        return read_autoencoder_kl(self.config)

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with ops.no_grad(), runtime.low_precision(False):  # (``ae.dtype`` sets the precision, not --bf16)
            mean, log_variance = ops.chunk(ops.to_float32(self.network(images)), 2, 1)  # 2 x (B, C, h, w)
            return mean, ops.exp(0.5 * ops.clamp(log_variance, -30.0, 20.0))

    def decode(self, scaled_latents: Tensor) -> Tensor:
        with ops.no_grad(), runtime.low_precision(False):
            return ops.to_float32(self._decoded(self.raw(scaled_latents)))

    def _decoded(self, raw: Tensor) -> Tensor:
        return self.network.decode(raw)


class AutoencoderKLFlux2(AutoencoderKL):
    """FLUX.2's, which cuts latents into patches of 2 x 2; its config has their mean and std (``scale``)."""

    def _read(self) -> tuple[KLArchitecture, dict[str, np.ndarray]]:
        architecture, weights = super()._read()
        return architecture, {name: array for name, array in weights.items() if not name.startswith("bn.")}

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = super().moments(images)  # (B, C, H, W) each
        return _in_patches(mean), _in_patches(std)

    def _decoded(self, raw: Tensor) -> Tensor:
        return super()._decoded(unpack(as_tokens(raw), *raw.shape[2:]))


def _in_patches(x: Tensor) -> Tensor:
    B, C, H, W = x.shape
    return ops.reshape(ops.permute(pack(x), (0, 2, 1)), (B, 4 * C, H // 2, W // 2))
