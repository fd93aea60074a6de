"""AutoencoderKL on our own network, for every framework."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.autoencoder_of_images import AutoencoderKLConfig
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.autoencoder_kl.files import read_autoencoder_kl, require_same_names
from mindspeed_mm_dit.models.autoencoder_kl.network import AutoencoderKLNetwork

Tensor = Any  # a tensor of the active framework


class AutoencoderKL(Autoencoder):
    """Encodes images to scaled latents and back."""

    def __init__(self, config: AutoencoderKLConfig) -> None:
        super().__init__(config)
        architecture, weights = read_autoencoder_kl(config)
        network = AutoencoderKLNetwork(architecture)
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        require_same_names(f"ae.from_pretrained = {config.from_pretrained}", shapes, weights)
        runtime.load_arrays(network, weights)
        self.network = runtime.freeze(network, config.dtype)
        runtime.compiled(self.network.encoder)
        runtime.compiled(self.network.decoder)

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with ops.no_grad():
            mean, log_variance = ops.chunk(ops.to_float32(self.network(images)), 2, 1)  # 2 x (B, C, h, w)
            return mean, ops.exp(0.5 * ops.clamp(log_variance, -30.0, 20.0))

    def decode(self, scaled_latents: Tensor) -> Tensor:
        with ops.no_grad():
            return ops.to_float32(self.network.decode(self.raw(scaled_latents)))
