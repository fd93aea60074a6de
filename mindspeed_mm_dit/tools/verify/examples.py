"""Weights and samples that need no data, and a network's results on them."""

from __future__ import annotations

import json
import platform
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint.adapting import read_source
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.order import Stream, normals, philox
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import build_predictor
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.tools.verify.first_wrong_module import Watch

Arrays = dict[str, np.ndarray]

NUDGE = 0.05
"""Standard deviation of the values that replace zero-initialised weights, behind which no error would show."""
_PARTS = re.compile(r"|\w+|\w+\.\d+|\w+\.\d+\.\w+")
"""Names of modules that are watched. In a list such as ``blocks``, these are each item and its direct parts: small
enough to locate an error, and few enough for a disk."""


def measure(model: ModelConfig, weights: Path, inputs: Path) -> Arrays:
    """Return losses and gradients of a network on the samples of an .npz, and its modules' inputs and outputs."""
    from safetensors.numpy import load_file

    from mindspeed_mm_dit.framework import ops, runtime
    from mindspeed_mm_dit.tools.verify.reference.file import Step

    process = runtime.to_runtime_device(objective_of(model.diffusion).build(model.diffusion))
    network = build_predictor(model)
    runtime.load_arrays(network, load_file(weights))
    network = runtime.to_runtime_device(network)
    with np.load(inputs) as file:
        tensors = runtime.to_device(dict(file))
    latents, draws = tensors["latents"], [tensors[name] for name in process.draw_names]
    condition = [tensors[name] for name in tensors if name not in ("latents", *process.draw_names)]

    def losses(network: Any) -> Any:
        noised = process.noised(latents, *draws)
        return process.loss(ops.to_float32(network(noised, draws[0], *condition)), latents, noised, *draws)

    watch, step = Watch(network, lambda name: bool(_PARTS.fullmatch(name))), Step(lambda: network, losses)
    arrays = {f"gradient/{name}": gradient for name, gradient in step.gradients.items()}
    arrays |= {f"watched/{name}": values for name, values in watch.end().items()}
    samples = np.arange(len(step.losses))[None]
    return {**arrays, "losses": step.losses[None], "positions": samples, "grad_norm": step.grad_norm[None]}


def draw_inputs(config: ModelConfig, seed: int, count: int) -> Arrays:
    """Generate ``count`` samples, at least 2: latents, noise, times from data to noise, and labels.

    The last label is the unconditional class.
    """
    numbers = np.arange(count)
    noise = normals(seed, Stream.NOISE, numbers, config.latent_shape)
    return {
        "latents": normals(seed, Stream.SAMPLE_START, numbers, config.latent_shape),
        **objective_of(config.diffusion).draws_at(config.diffusion, numbers / (count - 1), noise),
        **config.predictor.conditions.examples(count),
    }


def weights_of(model: ModelConfig, checkpoint: str | None, seed: int) -> Mapping[str, np.ndarray]:
    """Return the weights of a checkpoint of any format; without one, a run's initial weights, with no zeros."""
    if checkpoint is not None:
        return read_source(checkpoint, model.predictor).weights
    initial = initial_weights(parameters_of(model.predictor), seed)
    return {name: nudged(name, value, seed) for name, value in initial.items()}


def write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write the initial weights of the processes."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, path)


def nudged(name: str, value: np.ndarray, seed: int) -> np.ndarray:
    """Return ``value``, or random values if it is all zero, because no error shows behind zeros."""
    if value.any():
        return value
    draw = philox((seed, zlib.crc32(name.encode())))
    return draw.standard_normal(value.shape, np.float32) * np.float32(NUDGE)


def facts() -> dict[str, str]:
    """Return the versions and the device of this process."""
    from mindspeed_mm_dit.framework import runtime

    return {
        "mindspeed_mm_dit": __version__, **runtime.versions(), "python": platform.python_version(),
        "device": runtime.device_name(), "system": platform.platform(),
    }  # fmt: skip


def facts_as_array() -> np.ndarray:
    """Return :func:`facts` as an array, for a file of arrays."""
    return np.array(json.dumps(facts()))
