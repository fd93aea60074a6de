"""A file of reference values, and the network it was computed with."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.fitting import check_names
from mindspeed_mm_dit.checkpoint.shapes import check_claimed_sizes
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.data.files import UnusableFile, check_file
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.dit import DiT

ADAMW_LR = 1e-4
"""Learning rate of the one optimizer step in a file."""

_CONFIG = ("hidden_size", "num_layers", "num_heads", "patch_size", "input_size", "in_channels", "num_classes")
"""What the numbers of ``config`` are."""
FORMAT = "see docs/parity.md for the format"


class Given(dict[str, np.ndarray]):
    """The arrays of a file of reference values by name; one that is asked for and missing is a CheckpointError."""

    def __missing__(self, name: str) -> np.ndarray:
        raise CheckpointError(f"--reference: {name}", "is missing, and other values of the file need it", FORMAT)


class Reference:
    """The arrays ``given`` by a file, and DiTs with the weights of ``checkpoint``.

    Raises CheckpointError for a file without ``config`` (hidden, depth, heads, patch, input size, channels, classes),
    for sizes that no network has or this machine cannot hold, and for weights of another network.
    """

    def __init__(self, given: Given, checkpoint: str | Path) -> None:
        self.given = given
        if "config" not in given:
            raise CheckpointError("--reference", "has no 'config'", FORMAT)
        self.config = _network(self.given["config"])
        self._checkpoint = checkpoint
        self._weights = read_weights(find_checkpoint(checkpoint), use_ema=False)

    def fresh_model(self) -> Any:
        """Return a DiT with the weights of the checkpoint."""
        model = DiT(self.config)
        check_names(
            runtime.shapes(model),
            {name: array.shape for name, array in self._weights.items()},
            f"--checkpoint = {self._checkpoint}",
            "is not of the network that config of --reference describes",
            "name the weights that the file was made with",
        )
        runtime.load_arrays(model, self._weights)
        return runtime.to_runtime_device(model)


def read_arrays(path: str | Path) -> Given:
    """Read the arrays of an .npz; raises CheckpointError for what is none, and for arrays that are no numbers."""
    try:
        check_file(path)
        if not zipfile.is_zipfile(path):
            raise UnusableFile("is not an .npz of arrays, or is cut short")
        file = np.load(path, allow_pickle=False)
        with file:
            given = Given(file)
    except UnusableFile as problem:
        words = str(problem) if os.path.lexists(path) else "there is no such file"
        raise CheckpointError(f"--reference = {path}", words, FORMAT) from None
    except (OSError, ValueError, EOFError, LookupError, MemoryError, NotImplementedError, RuntimeError,
            zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        raise CheckpointError(f"--reference = {path}", f"is not an .npz of arrays: {error}", FORMAT) from None
    for name, array in given.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise CheckpointError(f"--reference: {name}", "is no array of real numbers", FORMAT)
    return given


def _network(sizes: np.ndarray) -> DiTConfig:
    """Return the network that ``config`` of a file describes."""
    what = f"--reference: config = {shown(sizes.tolist())}"
    if sizes.shape != (len(_CONFIG),) or sizes.dtype.kind not in "iu":
        raise CheckpointError(what, f"must be {len(_CONFIG)} whole numbers: {', '.join(_CONFIG)}", FORMAT)
    try:
        config = from_mapping(DiTConfig, dict(zip(_CONFIG, sizes.tolist())), what)
    except ConfigError as error:
        raise CheckpointError(error.what, error.reason, error.cure) from None
    check_claimed_sizes(config, what)
    return config


def unknown_quantity(name: str) -> CheckpointError:
    """Return the error of a key that means nothing to us."""
    return CheckpointError(f"--reference: {name}", "is no quantity this command knows", FORMAT)
