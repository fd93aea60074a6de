"""The first step, tried before there is a run: what predictor, objective and micro-batch do not agree on ends there.

A small step is taken as it is, in milliseconds. A large one is taken on PyTorch's meta device, where tensors have
shapes and no numbers: no memory, but a second of CPU time, most of it to import what knows the shapes. MindSpore has
no such device: there a narrowed copy of the network is asked, on smaller latents.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import active, ops, runtime
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.objectives.registry import draw_of

SMALL_MULTIPLY_ADDS = 1e9
"""Of a step, forward and backward: half a second of one CPU core."""
SMALL_ELEMENTS = 4_000_000
"""Weights of a network that is small: 16 MB."""


def rehearse(config: ModelConfig, micro_batch_size: int) -> None:
    """Take the loss of one micro-batch, from its latents on, and on PyTorch its gradient.

    More samples than one are as many as channels, and one more: an axis that is taken for another then shows. On
    MindSpore with an accelerator nothing is tried: it computes there alone.

    Raises:
        ConfigError: the first step would end in this error.
    """
    on_shapes, on_cpu = runtime.shapes_alone(), runtime.device_type() == "cpu"
    if on_shapes is None and not on_cpu:
        return
    samples = 1 if micro_batch_size == 1 else config.predictor.in_channels + 1
    with_numbers = on_cpu and _is_small(config, samples)
    tried = _smaller(config, samples) if on_shapes is None and not with_numbers else config
    try:
        with on_shapes if on_shapes is not None and not with_numbers else nullcontext():
            losses = _losses(tried, samples)
    except UserError:
        raise
    except Exception as error:
        if "meta tensor" in str(error):  # a network of another package that looks at numbers
            return
        raise _refused(config, samples, f"{type(error).__name__}: {error}") from error
    if tuple(losses.shape) != (samples,):
        raise _refused(config, samples, f"losses of shape {tuple(losses.shape)}, not one of each sample")


def example(model: DiTModel, config: ModelConfig, samples: int) -> tuple[Any, ...]:
    """Return what ``model.losses`` is given for a micro-batch of ``config``: latents of zeros, conditions, draws."""
    given = config.predictor.conditions.examples(samples)
    given |= draw_of(config.diffusion)(0, np.arange(samples), config.latent_shape)
    given |= {name: np.ones((samples, *shape), np.float32) for name, shape in config.feature_shapes.items()}
    latents = ops.tensor(np.zeros((samples, *config.latent_shape), np.float32))
    return latents, *(ops.tensor(np.asarray(given[name])) for name in model.loss_names)


def _losses(config: ModelConfig, samples: int) -> Any:
    model = runtime.to_runtime_device(DiTModel(config, NoAutoencoder(config.ae)))
    losses = model.losses(*example(model, config, samples))
    if active() == "pytorch":
        losses.mean().backward()
    return losses


def _is_small(config: ModelConfig, samples: int) -> bool:
    predictor = config.predictor
    work = 3 * samples * predictor.multiply_adds()
    return work <= SMALL_MULTIPLY_ADDS and predictor.parameters().num_elements() <= SMALL_ELEMENTS


def _smaller(config: ModelConfig, samples: int) -> ModelConfig:
    """Return the same with a narrowed network, on latents halved until its step is small, or as far as it goes."""
    config = replace(config, predictor=config.predictor.narrowed())
    while not _is_small(config, samples):
        channels, *sizes = config.latent_shape
        try:
            half = config.predictor.resized((channels, *(max(1, size // 2) for size in sizes)))
            if half == config.predictor:
                break
            config = replace(config, predictor=half)
        except ConfigError:  # not a whole number of patches
            break
    return config


def _refused(config: ModelConfig, samples: int, reason: str) -> ConfigError:
    return ConfigError(
        f"model.json: predictor {config.predictor.model_id!r} with diffusion {config.diffusion.model_id!r}",
        f"the first step, of {samples} samples, ends with {' '.join(reason.split())[:300]}",
        "the two do not fit each other; choose another of them, or mend the one that is yours",
    )
