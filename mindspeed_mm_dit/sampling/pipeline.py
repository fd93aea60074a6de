"""A model in Python: sample it as ``mm-dit sample`` does, and train it on your own batches.

``mindspeed_mm_dit.load`` and ``mindspeed_mm_dit.create`` return a :class:`Pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.limits import MAX_INT64, shorten_repr, whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.conditions import kind_of, request_arrays
from mindspeed_mm_dit.data.order import Stream, bernoulli, normals
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import check_text_widths
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.conditions import requested_conditions
from mindspeed_mm_dit.sampling.generate import generate, plan_samples
from mindspeed_mm_dit.sampling.load import CheckpointDescription, Experts, describe, load_model
from mindspeed_mm_dit.sampling.outputs import GeneratedSamples
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest, arguments_of, naming_arguments

Tensor = Any
CAPTION_DROPOUT = 0.1
"""Fraction of captions that ``Pipeline.loss`` drops; in a run, data.json sets it."""


@dataclass(frozen=True, repr=False)
class Pipeline:
    """A model with everything needed to sample it and to train it."""

    model: Any
    """The composite: ``ae``, ``text_encoders``, ``diffusion`` and ``predictor``."""
    description: CheckpointDescription
    """Its model.json, and what else its checkpoint says about it."""
    experts: Experts | None = None
    """The low-noise expert; ``model`` is then the high-noise expert."""

    @classmethod
    def load(cls, request: ModelRequest) -> Pipeline:
        """Load a checkpoint of any format; raises CheckpointError or ConfigError if that fails."""
        description = describe(request)
        try:
            model = load_model(description, bf16=request.bf16, torch_compile=request.torch_compile)
        except (UserError, OSError):
            if description.path.exists():
                raise
            return cls.load(request)  # the run has deleted this checkpoint meanwhile: load the newest one
        return cls(model, description, Experts(description) if description.low else None)

    @classmethod
    def untrained(cls, config: ModelConfig, seed: int) -> Pipeline:
        """Return a model with initial weights, on the device."""
        check_text_widths(config)
        model = DiTModel(config)
        runtime.load_arrays(model.predictor, model.initial_weights(whole_number("seed", seed, 0)))
        return cls(runtime.to_runtime_device(model), CheckpointDescription(config))

    def __repr__(self) -> str:
        """Return in three lines what it generates, its conditions, and what to call."""
        size = parameters_of(self.config.predictor).num_elements()
        items, names = self.config.predictor.conditions.items, self.description.classes
        classes = ", ".join([*names[:10], *(["..."] if len(names) > 10 else [])])
        return (
            f"<{self.config.predictor.model_id} of {size:,} parameters, {self.config.diffusion.model_id}, "
            f"generates {' x '.join(map(str, self.config.sample_size))}\n"
            f" conditioned on {' and '.join(items)}{f': {classes}' if classes else ''}\n"
            f" .sample(...) generates, .loss(...) trains, .config and .predictor are its parts>"
        )

    @property
    def config(self) -> ModelConfig:
        """Its model.json."""
        return self.description.config

    @property
    def predictor(self) -> Any:
        """The network, an ordinary module: ``predictor(x_t, t, *condition)``."""
        return self.model.predictor

    @property
    def _tokenizers(self) -> list[Any]:
        return [encoder.tokenizer for encoder in self.model.text_encoders]

    @arguments_of(SampleRequest)
    def sample(self, request: SampleRequest) -> GeneratedSamples:
        """Generate ``num`` samples of each class, prompt or vector (P,), bit for bit those of ``mm-dit sample``.

        A single class or prompt needs no list; an array of classes contains labels. image, last_image: a file, a PIL
        image, or an array (H, W, 3 or 1) uint8, of the video's size; or a list, one for each prompt. weaker: a
        ``Pipeline``. size: (H, W) or "HxW".

        Raises:
            ConfigError: the model cannot generate this; the message names the argument.
        """
        config, request, conditions = plan_samples(request, self.description, self._tokenizers)
        states = generate(self.model, config, conditions, request, self.experts)
        samples, path = (states[:, -1], states) if request.path > 1 else (states, None)
        titles = tuple(conditions.titles(self.description.classes))
        return GeneratedSamples(samples, titles, conditions.labels, request.seed, path)

    @naming_arguments()
    def loss(
        self,
        pixels: np.ndarray,
        classes: Sequence[str | int] | np.ndarray | str | int | None = None,
        *,
        prompts: Sequence[str] | str | None = None,
        vectors: np.ndarray | None = None,
        step: int = 0,
        seed: int = 0,
    ) -> Tensor:
        """Return the training loss of each sample, (B,) float32, to call ``.mean().backward()`` on.

        pixels: (B, C, H, W) uint8, or for videos (B, C, F, H, W), of any size that the model takes. Noise, times and
        dropped conditions depend only on ``seed`` and the sample index, ``step`` * B + the number in the batch.

        Raises:
            ConfigError: the model cannot learn from these pixels, or a sample has no class, prompt or vector.
        """
        if self.experts is not None:
            raise ConfigError("loss needs a single expert, and this pipeline has two. Load the one that you train.")
        pixels, shape = self._check_pixels(np.asarray(pixels))
        step, seed = whole_number("step", step, 0, MAX_INT64 // len(pixels) - 1), whole_number("seed", seed, 0)
        sample_indices = step * len(pixels) + np.arange(len(pixels))
        if classes is None and self.config.predictor.conditions.label is not None:
            raise ConfigError("classes is missing, and this model is conditioned on it. Pass one for each sample.")
        request = SampleRequest(classes, prompts=prompts, vectors=vectors)
        values = requested_conditions(request, self.config, self.description, self._tokenizers).values
        for item, value in values.items():
            if len(value) != len(pixels):
                raise ConfigError(
                    f"pixels has {len(pixels)} samples, and there are {len(value)} of {item}. Pass one for each sample."
                )
        batch = {"pixels": pixels, **self._condition_arrays(values, sample_indices, seed)}
        batch |= objective_of(self.config.diffusion).draws(self.config.diffusion, seed, sample_indices, shape)
        if self.config.ae.samples_posterior:
            batch["posterior_noise"] = normals(seed, Stream.POSTERIOR, sample_indices, shape)
        return self.model(**runtime.to_device(batch))

    def _check_pixels(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return a training batch and the shape of its latents; raises ConfigError if it is not a batch."""
        axes, what = len(self.config.latent_shape), f"pixels is {pixels.dtype} of shape {shorten_repr(pixels.shape)}"
        if pixels.dtype != np.uint8 or pixels.ndim != 1 + axes or not pixels.size:
            letters = "(B, C, H, W)" if axes == 3 else "(B, C, F, H, W)"
            raise ConfigError(f"{what}, and must be uint8 of shape {letters}, with values from 0 to 255.")
        if pixels.shape[1] != self.config.ae.channels:
            raise ConfigError(f"{what}, and the model takes {self.config.ae.channels} channel(s).")
        shape = self.config.ae.latent_shape(pixels.shape[2:])
        return pixels, self.config.predictor.resized(shape).latent_shape

    def _condition_arrays(
        self, values: Mapping[str, Sequence[Any]], sample_indices: np.ndarray, seed: int
    ) -> dict[str, np.ndarray]:
        """Return the arrays of the conditions of a training batch, some of them dropped."""
        conditions, tokenizers = self.config.predictor.conditions, self._tokenizers
        arrays, numbers = dict(request_arrays(conditions.guided, values, tokenizers)), conditions.dropout_keys()
        for condition in conditions.guided:  # (the frames of a clip are among its pixels)
            dropout = CAPTION_DROPOUT if condition.item == "caption" else condition.dropout
            drops = bernoulli(seed, Stream.LABEL_DROP, sample_indices, dropout, numbers[condition.dropout_key])
            for name, unconditional in kind_of(condition).unconditional(condition, None, tokenizers).items():
                arrays[name] = np.where(
                    drops.reshape(-1, *(1 for _ in unconditional.shape[1:])), unconditional, arrays[name]
                )
        return arrays
