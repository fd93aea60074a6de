"""The inputs in a file of reference values, checked against each other and against the network they are for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError

_BATCH = ("x0", "x1", "noise")
"""Latents, one a sample."""
_CHAINS = ("sample/start", "sample/brownian")


def check_inputs(given: Mapping[str, np.ndarray], config: DiTConfig, num_timesteps: int | None) -> None:
    """Raise CheckpointError, naming the array, for latents, times and labels that ``config``'s network cannot be given.

    num_timesteps: times are whole numbers below it; None where they are the real ones of flow matching, 0 to 1.
    """
    latent = (config.in_channels, config.input_size, config.input_size)
    latents = [name for name in _BATCH if name in given]
    batch = next((len(given[name]) for name in (*latents, "t", "y") if name in given and given[name].ndim), 0)
    for name in latents:
        _check_shape(given, name, (batch, *latent))
    for name in ("t", "y"):
        _check_shape(given, name, (batch,))
    if "sample/start" in given:
        _check_shape(given, "sample/start", (given["sample/start"].shape[:1] or (0,)) + latent)
        _check_shape(given, "sample/y", given["sample/start"].shape[:1])
        if "sample/brownian" in given:
            steps = given["sample/brownian"].shape[:1] or (0,)
            _check_shape(given, "sample/brownian", steps + given["sample/start"].shape)
    for name in ("y", "sample/y"):
        _check_range(given, name, config.num_classes, "iu", "the null class is the last")
    if num_timesteps is None:
        _check_range(given, "t", 1, "f", "flow matching has data at 1")
    else:
        _check_range(given, "t", num_timesteps - 1, "iu", f"the published DiT has {num_timesteps} timesteps")


def as_taken(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the latents, times and labels of a file in the kinds of number that networks take."""
    kinds = {"y": np.int64, "sample/y": np.int64, **dict.fromkeys((*_BATCH, *_CHAINS), np.float32)}
    if "t" in given:
        kinds["t"] = np.float32 if given["t"].dtype.kind == "f" else np.int64
    return {name: given[name].astype(kind) for name, kind in kinds.items() if name in given}


def _check_shape(given: Mapping[str, np.ndarray], name: str, wanted: tuple[int, ...]) -> None:
    if name in given and given[name].shape != wanted:
        raise CheckpointError(f"--reference: {name}", f"has the shape {given[name].shape}, expected {wanted}")


def _check_range(given: Mapping[str, np.ndarray], name: str, largest: int, kinds: str, why: str) -> None:
    """Check the kind of number (whole: "iu", real: "f"), and that all lie from 0 to ``largest``."""
    if name not in given:
        return
    values, words = given[name], "real" if kinds == "f" else "whole"
    if values.dtype.kind not in kinds or not ((values >= 0) & (values <= largest)).all():  # not: NaN too
        raise CheckpointError(f"--reference: {name}", f"must hold {words} numbers from 0 to {largest}: {why}")
