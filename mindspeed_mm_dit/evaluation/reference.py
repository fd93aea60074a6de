"""A file of reference values, and the network it was computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.checkpoint.weights import check_names, read_weights
from mindspeed_mm_dit.configs.model import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.dit import DiT

ADAMW_LR = 1e-4
"""Learning rate of the one optimizer step in a file."""


class Reference:
    """The arrays of ``path``, an .npz, and DiTs with the weights of ``checkpoint``.

    Raises CheckpointError for a file without ``config`` (hidden, depth, heads, patch, input size, channels, classes),
    and for weights of another network.
    """

    def __init__(self, path: str | Path, checkpoint: str | Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as file:
                self.given: dict[str, np.ndarray] = dict(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"--reference = {path}", f"is not an .npz of arrays: {error}") from None
        if "config" not in self.given:
            raise CheckpointError(f"--reference = {path}", "has no 'config'", "see docs/parity.md for the format")
        hidden, depth, heads, patch, size, channels, classes = (int(n) for n in self.given["config"])
        self.config = DiTConfig(
            input_size=size, num_classes=classes, in_channels=channels, patch_size=patch, hidden_size=hidden,
            num_layers=depth, num_heads=heads,
        )  # fmt: skip
        self._weights = read_weights(find_checkpoint(checkpoint), use_ema=False)

    def fresh_model(self) -> Any:
        """Return a DiT with the weights of the checkpoint."""
        model = DiT(self.config)
        check_names(runtime.shapes(model), {name: a.shape for name, a in self._weights.items()}, "--checkpoint")
        runtime.load_arrays(model, self._weights)
        return runtime.to_runtime_device(model)


def unknown_quantity(name: str) -> CheckpointError:
    """Return the error of a key that means nothing to us."""
    return CheckpointError(
        f"--reference: {name}", "is no quantity this command knows", "see docs/parity.md for the format"
    )
