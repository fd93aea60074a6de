"""The first step, tried before there is a run: what predictor, objective and micro-batch do not agree on ends there.

A small step is taken as it is, in milliseconds. A large one is taken on PyTorch's meta device, where tensors have
shapes and no numbers: no memory, but a second of CPU time, most of it to import what knows the shapes.
"""

from __future__ import annotations

import numpy as np
import torch

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.objectives.registry import draw_of

SMALL_MULTIPLY_ADDS = 1e9
"""Of a step, forward and backward: half a second of one CPU core."""
SMALL_ELEMENTS = 4_000_000
"""Weights of a network that is small: 16 MB."""


def rehearse(config: ModelConfig, micro_batch_size: int) -> None:
    """Take the loss of one micro-batch, from its latents on, and its gradient.

    More samples than one are as many as channels, and one more: an axis that is taken for another then shows.

    Raises:
        ConfigError: the first step would end in this error.
    """
    samples = 1 if micro_batch_size == 1 else config.predictor.in_channels + 1
    where = torch.device("cpu" if _is_small(config, samples) else "meta")
    given = config.predictor.conditions.examples(samples)
    given |= draw_of(config.diffusion)(0, np.arange(samples), config.latent_shape)
    try:
        with where:
            model = DiTModel(config, NoAutoencoder(config.ae)).to(where)
            latents = torch.zeros(samples, *config.latent_shape)
            arrays = [torch.from_numpy(np.asarray(given[name])).to(where) for name in model.loss_names]
            losses = model.losses(latents, *arrays)
            losses.mean().backward()
    except UserError:
        raise
    except Exception as error:
        if "meta tensor" in str(error):  # a network of another package that looks at numbers
            return
        raise _refused(config, samples, f"{type(error).__name__}: {error}") from error
    if losses.shape != (samples,):
        raise _refused(config, samples, f"losses of shape {tuple(losses.shape)}, not one of each sample")


def _is_small(config: ModelConfig, samples: int) -> bool:
    predictor = config.predictor
    work = 3 * samples * predictor.multiply_adds()
    elements = predictor.parameters().num_elements()
    return runtime.device_type() == "cpu" and work <= SMALL_MULTIPLY_ADDS and elements <= SMALL_ELEMENTS


def _refused(config: ModelConfig, samples: int, reason: str) -> ConfigError:
    return ConfigError(
        f"model.json: predictor {config.predictor.model_id!r} with diffusion {config.diffusion.model_id!r}",
        f"the first step, of {samples} samples, ends with {' '.join(reason.split())[:300]}",
        "the two do not fit each other; choose another of them, or mend the one that is yours",
    )
