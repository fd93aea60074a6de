"""What is noted of a step that is computed again: its samples, and the first tensor that is not finite."""

from __future__ import annotations

from typing import NamedTuple


class NotFinite(NamedTuple):
    """Where in a step the first tensor with a nan or an infinity stands."""

    module: str
    """Of the predictor, as its parameters name it; empty for the predictor itself."""
    tensor: str
    """"output", "gradient of output", "parameter weight", "gradient of parameter weight", "input x_t", "loss"."""
    micro_batch: int
    """Of this rank, from 0; -1: before the first."""
    rows: tuple[int, ...]
    """Samples of the micro-batch with such a value; none where the tensor is of no sample."""


class Sample(NamedTuple):
    """One sample of a step."""

    position: int
    """In the run."""
    path: str
    """File of its image."""
    label: str
    """Name of its class."""
    was_dropped: bool
    """Whether it was trained on without its label."""
