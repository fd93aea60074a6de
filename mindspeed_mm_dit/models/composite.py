"""The composite that trains: encoders, diffusion and predictor; a batch in, the loss of each sample out."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import Parameter
from mindspeed_mm_dit.framework import nn, ops, runtime
from mindspeed_mm_dit.models.autoencoder import draw_latents
from mindspeed_mm_dit.models.init import check_declared, initial_weights
from mindspeed_mm_dit.models.pixels import to_images
from mindspeed_mm_dit.models.registry import PREDICTOR_MODEL_MAPPINGS, load_encoders
from mindspeed_mm_dit.models.text_encoder import TextEncoder
from mindspeed_mm_dit.objectives.registry import objective_of

Tensor = Any


class DiTModel(nn.Module):
    """Holds ae, text encoder, diffusion and predictor, as MindSpeed-MM's SoRAModel does.

    Only the predictor has weights that are trained and saved. Nothing here is random: what an objective
    draws, dropped labels and posterior noise come with the batch. Arguments go by name, as the batch names them.

    ``autoencoder``, ``text_encoders``: what ``registry.load_encoders`` has loaded, or a NoAutoencoder and none for a
    model that is only given what a cache holds; without an autoencoder all are loaded.
    """

    def __init__(
        self, config: ModelConfig, autoencoder: Any = None, text_encoders: tuple[TextEncoder, ...] = ()
    ) -> None:
        super().__init__()
        if autoencoder is None:
            autoencoder, text_encoders = load_encoders(config)
        self.ae: Any = autoencoder
        self.text_encoders = text_encoders
        self.diffusion = objective_of(config.diffusion).build(config.diffusion)
        self.predictor = PREDICTOR_MODEL_MAPPINGS[config.predictor.model_id](config.predictor)
        names = config.predictor.condition.names
        self._condition_arrays, self.loss_names = len(names), (*names, *self.diffusion.draw_names)
        self._parameters_declared = config.predictor.parameters()
        check_declared(self._parameters_declared.shapes(), runtime.shapes(self.predictor), config.predictor.model_id)

    @property
    def declared(self) -> dict[str, Parameter]:
        """What the predictor's config says of each parameter, by name."""
        return dict(self._parameters_declared)

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
        caption_ids: Tensor | None = None,
        caption_mask: Tensor | None = None,
        **given: Tensor,
    ) -> Tensor:
        """Return the training loss of each sample, (B,) float32.

        given: the condition, by its names (``labels`` (B,) int64, or ``text`` (B, L, D) float32), and what the
        objective draws, by its ``draw_names``; what else is in the batch is left alone. A text may come as the tokens
        of its caption instead, caption_ids and caption_mask (B, L) int64. posterior_noise: (B, C, ...) float32.
        Images (B, 3 or 1, H, W) or clips (B, 3 or 1, F, H, W) come as pixels, uint8, or from a cache as the mean and
        std of their posterior, (B, C, ...) float32, unscaled.
        """
        latents = self.latents(pixels, posterior_noise, latent_mean, latent_std)
        if caption_ids is not None:
            assert self.text_encoders, "captions come where no cache holds their states"
            given["text"] = self.text_encoders[0].network(caption_ids, caption_mask).states
        return self.losses(latents, *(given[name] for name in self.loss_names))

    def latents(
        self,
        pixels: Tensor | None = None,
        posterior_noise: Tensor | None = None,
        latent_mean: Tensor | None = None,
        latent_std: Tensor | None = None,
    ) -> Tensor:
        """Return the scaled latents (B, C, ...) float32 of a batch, encoded now or from a cache."""
        if latent_mean is None:
            return self.encode(pixels, posterior_noise)
        return draw_latents(latent_mean, latent_std, posterior_noise, self.ae.scaled)

    def encode(self, pixels: Tensor, posterior_noise: Tensor | None) -> Tensor:
        """Turn pixels (B, 3 or 1, ...) uint8 into scaled latents (B, C, ...) float32; nothing here is trained."""
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
