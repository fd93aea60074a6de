"""The training model: encoders, diffusion and predictor. It takes a batch and returns the loss per sample."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame, ImageTokens
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import ParameterSpecs
from mindspeed_mm_dit.data.conditions import encode_conditions
from mindspeed_mm_dit.framework import nn, ops
from mindspeed_mm_dit.models.autoencoder import draw_latents, to_images
from mindspeed_mm_dit.models.frames import frame_conditions, frame_features
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import build_predictor, load_encoders, load_image_encoder, load_teachers
from mindspeed_mm_dit.models.text_encoder import TextEncoder
from mindspeed_mm_dit.objectives.guidance import projection_loss
from mindspeed_mm_dit.objectives.registry import objective_of

Tensor = Any


class DiTModel(nn.Module):
    """Holds ae, text encoders, diffusion and predictor, as MindSpeed-MM's SoRAModel does.

    Only the predictor has weights that are trained and saved. Nothing here is random: timesteps, noise, dropped labels
    and posterior noise come with the batch. Arguments are passed by their names in the batch.

    ``autoencoder``, ``text_encoders``: from ``registry.load_encoders``, or a NoAutoencoder and no text encoders for a
    model that only reads from a cache. If ``autoencoder`` is None, both are loaded. ``options``: of
    ``registry.build_predictor``.
    """

    def __init__(
        self, config: ModelConfig, autoencoder: Any = None, text_encoders: Sequence[TextEncoder] = (), **options: Any
    ) -> None:
        super().__init__()
        if autoencoder is None:
            autoencoder, text_encoders = load_encoders(config)
        self.ae: Any = autoencoder
        self.text_encoders = tuple(text_encoders)
        objective = objective_of(config.diffusion)
        self.diffusion = objective.build(config.diffusion)
        self.calls_model = objective.calls_model
        unconditional = config.predictor.conditions.unconditional(1) if objective.calls_model else None
        self._unconditional_label = None if unconditional is None else int(unconditional["labels"][0])
        self.predictor = build_predictor(config, **options)
        self._conditions = config.predictor.conditions
        self._condition_arrays = len(self._conditions.names)
        begins = self._conditions.frames is not None and self._conditions.frames.mask_channels == 1
        self._frames = self._conditions.names.index("frames") if begins else None
        self._draws = len(self.diffusion.draw_names)
        self._features = tuple(config.feature_shapes)
        self._config = config
        self._teacher_weights = tuple(teacher.weight for teacher in config.teachers)
        self.loss_names = (*self._conditions.names, *self.diffusion.draw_names, *self._features)
        self.declared: ParameterSpecs = parameters_of(config)
        for name, parameter in self.predictor.named_parameters():
            parameter.requires_grad = name in self.declared and self.declared[name].trained

    @functools.cached_property
    def _teachers(self) -> tuple[Any, ...]:
        """Loaded on first use: a cache may contain their features."""
        return load_teachers(self._config)

    @functools.cached_property
    def _image_encoder(self) -> Any:
        """Loaded on first use, like teachers."""
        return load_image_encoder(self._config.image_encoder)

    def initial_weights(self, seed: int) -> dict[str, np.ndarray]:
        """Return the initial value of every parameter of the predictor, float32, by name; depends only on ``seed``."""
        return initial_weights(self.declared, seed)

    @property
    def blocks(self) -> Any:
        """The predictor's blocks, in order."""
        modules = dict(self.predictor.named_modules())
        return [modules[name] for name in self.declared.blocks]

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the training loss of each sample, (B,) float32.

        batch: images (B, 3 or 1, H, W) or videos (B, 3 or 1, F, H, W) as pixels, uint8, or from a cache as the mean and
        std of their posterior, latent_mean and latent_std (B, C, ...) float32, unscaled; posterior_noise of the same
        shape if the posterior is sampled; the arrays of the conditions (``data/conditions``); the objective's draws,
        by its ``draw_names``; from a cache the features of teachers; optionally loss_weights (B,) float32, which
        multiply the losses. Other entries are ignored.
        """
        losses = self.losses(self.latents(batch), *self.loss_inputs(batch))
        return losses * batch["loss_weights"] if "loss_weights" in batch else losses

    def latents(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the scaled latents (B, C, ...) float32 of a batch, encoded now or from a cache."""
        noise = batch.get("posterior_noise")
        if "latent_mean" not in batch:
            return self.encode(batch["pixels"], noise)
        return draw_latents(batch["latent_mean"], batch.get("latent_std"), noise, self.ae.scaled)

    def loss_inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of ``losses`` besides latents: encoded conditions, the objective's draws, features."""
        conditions = encode_conditions(self._conditions, batch, self)
        return *conditions, *(batch[name] for name in self.diffusion.draw_names), *self.features(batch)

    def features(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return each teacher's features of the images, (B, N, width) float32, computed now or from a cache."""
        if not self._features or self._features[0] in batch:
            return tuple(batch[name] for name in self._features)
        images = to_images(batch["pixels"])  # (B, 3 or 1, H, W)
        return tuple(teacher(images) for teacher in self._teachers)

    def frames(self, condition: FirstFrame, batch: Mapping[str, Tensor]) -> Tensor:
        """Return mask and latents (B, M + C, F, H, W) of conditioning frames; see ``frames.frame_conditions``."""
        return frame_conditions(condition, batch, self)

    def image_features(self, condition: ImageTokens, batch: Mapping[str, Tensor]) -> Tensor:
        """Return CLIP's features (B, L, width) of the conditioning frames, computed now or from a cache."""
        return frame_features(condition, batch, lambda: self._image_encoder)

    def encode(self, pixels: Tensor, posterior_noise: Tensor | None) -> Tensor:
        """Turn pixels (B, 3 or 1, ...) uint8 into scaled latents (B, C, ...) float32, without gradients."""
        return ops.to_float32(self.ae.encode(to_images(pixels), posterior_noise))

    def losses(self, latents: Tensor, *inputs: Tensor) -> Tensor:
        """Return the training loss of each sample, (B,) float32, from scaled latents (B, C, ...).

        inputs: the result of :meth:`loss_inputs`, in the order of ``loss_names``.
        """
        condition, rest = inputs[: self._condition_arrays], inputs[self._condition_arrays :]
        draws, features = rest[: self._draws], rest[self._draws :]
        if self._unconditional_label is not None:
            return self.diffusion.losses(self.predictor, self._unconditional_label, latents, *condition, *draws)  # (B,)
        noised = self.diffusion.add_noise(latents, *draws)  # (B, C, ...)
        if self._frames is not None:  # conditioning frames do not count in the loss
            draws = (*draws, condition[self._frames][:, :1])  # (B, 1, F, H, W)
        if not self._features:
            output = ops.to_float32(self.predictor(noised, draws[0], *condition))  # (B, C or 2C, ...)
            return self.diffusion.loss(output, latents, noised, *draws)  # (B,)
        output, projected = self.predictor(noised, draws[0], *condition, project=True)
        projected = [ops.to_float32(tokens) for tokens in projected]  # (B, N, width) each
        losses = self.diffusion.loss(ops.to_float32(output), latents, noised, *draws)  # (B,)
        return losses + projection_loss(projected, features, self._teacher_weights)  # (B,)

    def predict(self, noised: Tensor, t: Tensor, *condition: Tensor) -> Tensor:
        """Return the predictor's output for ``add_noise`` (B, C, ...), float32."""
        return ops.to_float32(self.predictor(noised, t, *condition))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictor's state dict; nothing else is trained or saved."""
        return self.predictor.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the predictor's state dict."""
        return self.predictor.load_state_dict(*args, **kwargs)
