"""The composite that trains: autoencoder, diffusion and predictor; a batch in, the loss of each sample out."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.framework import nn, ops, runtime
from mindspeed_mm_dit.models.autoencoder import draw_latents
from mindspeed_mm_dit.models.init import check_declared, initial_weights
from mindspeed_mm_dit.models.pixels import to_images
from mindspeed_mm_dit.models.registry import PREDICTOR_MODEL_MAPPINGS, load_autoencoder
from mindspeed_mm_dit.objectives.registry import objective_of

Tensor = Any


class DiTModel(nn.Module):
    """Holds ae, diffusion and predictor, as MindSpeed-MM's SoRAModel does.

    Only the predictor has weights that are trained and saved. Nothing here is random: what an objective
    draws, dropped labels and posterior noise come with the batch. Arguments go by name, as the batch names them.

    ``autoencoder``: that of section "ae", where it is in memory already, or a NoAutoencoder for a model that is only
    given cached latents; None loads it.
    """

    def __init__(self, config: ModelConfig, autoencoder: Any = None) -> None:
        super().__init__()
        self.ae: Any = load_autoencoder(config.ae) if autoencoder is None else autoencoder
        self.diffusion = objective_of(config.diffusion).build(config.diffusion)
        self.predictor = PREDICTOR_MODEL_MAPPINGS[config.predictor.model_id](config.predictor)
        names = config.predictor.condition.names
        self._condition_arrays, self.loss_names = len(names), (*names, *self.diffusion.draw_names)
        self._parameters_declared = config.predictor.parameters()
        check_declared(self._parameters_declared.shapes(), runtime.shapes(self.predictor), config.predictor.model_id)

    def initial_weights(self, seed: int) -> dict[str, np.ndarray]:
        """Return what every parameter of the predictor begins as, float32, by name: a function of ``seed`` alone."""
        return initial_weights(self._parameters_declared, seed)

    @property
    def blocks(self) -> Any:
        """The predictor's blocks, in order."""
        return functools.reduce(getattr, self._parameters_declared.stem.split("."), self.predictor)

    def forward(
        self,
        pixels: Tensor | None = None,
        posterior_noise: Tensor | None = None,
        latent_mean: Tensor | None = None,
        latent_std: Tensor | None = None,
        **given: Tensor,
    ) -> Tensor:
        """Return the training loss of each sample, (B,) float32.

        given: the condition, by its names (``labels`` (B,) int64), and what the objective draws, by its
        ``draw_names``; what else is in the batch is left alone. posterior_noise: (B, C, h, w) float32.
        The images come as pixels (B, 3 or 1, H, W) uint8, or from a latent cache as the mean and std of their
        posterior, (B, C, h, w) float32, unscaled.
        """
        latents = self.latents(pixels, posterior_noise, latent_mean, latent_std)
        return self.losses(latents, *(given[name] for name in self.loss_names))

    def latents(
        self,
        pixels: Tensor | None = None,
        posterior_noise: Tensor | None = None,
        latent_mean: Tensor | None = None,
        latent_std: Tensor | None = None,
    ) -> Tensor:
        """Return the scaled latents (B, C, h, w) float32 of a batch, encoded now or from a cache."""
        if latent_mean is None:
            return self.encode(pixels, posterior_noise)
        return draw_latents(latent_mean, latent_std, posterior_noise, self.ae.config.scaling_factor)

    def encode(self, pixels: Tensor, posterior_noise: Tensor | None) -> Tensor:
        """Turn pixels (B, 3 or 1, H, W) uint8 into scaled latents (B, C, h, w) float32; nothing here is trained."""
        return ops.to_float32(self.ae.encode(to_images(pixels), posterior_noise))

    def losses(self, latents: Tensor, *given: Tensor) -> Tensor:
        """Return the training loss of each sample, (B,) float32, from scaled latents (B, C, ...).

        given: what ``loss_names`` names, in that order: the condition, and what the objective draws.
        """
        condition, draws = given[: self._condition_arrays], given[self._condition_arrays :]
        noised = self.diffusion.noised(latents, *draws)  # (B, C, ...)
        output = ops.to_float32(self.predictor(noised, draws[0], *condition))  # (B, C or 2C, ...)
        return self.diffusion.loss(output, latents, noised, *draws)  # (B,)

    def predict(self, noised: Tensor, t: Tensor, *condition: Tensor) -> Tensor:
        """Return what the predictor says of ``noised`` (B, C, ...), float32."""
        return ops.to_float32(self.predictor(noised, t, *condition))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictor's: nothing else is trained or saved."""
        return self.predictor.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the predictor's."""
        return self.predictor.load_state_dict(*args, **kwargs)
