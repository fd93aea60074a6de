"""All trained parameters as one vector: one reduction a step, and a slice for every worker.

The vector is padded with zeros so that it divides into equal slices; zeros stay zeros under AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: int
    """Slices the vector divides into."""

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def length(self) -> int:
        """Elements of the vector, padding included."""
        return -(-sum(self.sizes) // self.shards) * self.shards

    @property
    def slice_length(self) -> int:
        """Elements of one worker's slice."""
        return self.length // self.shards

    def vector(self, tensors: Sequence[Any]) -> Tensor:
        """Join tensors, in the order of the names, to a vector (length,) float32."""
        padding = ops.zeros(self.length - sum(self.sizes))
        return ops.cat([*(tensor.reshape((-1,)) for tensor in tensors), padding], 0)

    def assign(self, parameters: Sequence[Parameter], vector: Tensor) -> None:
        """Write a vector into the parameters, in place: a compiled graph keeps the memory it was compiled with."""
        start = 0
        for parameter, size in zip(parameters, self.sizes):
            ops.assign(parameter, vector[start : start + size].reshape(parameter.shape))
            start += size

    def arrays(self, vector: np.ndarray) -> Arrays:
        """Cut a vector on the host into arrays by name."""
        cuts = np.split(vector[: sum(self.sizes)], np.cumsum(self.sizes)[:-1])
        return {name: cut.reshape(shape) for name, shape, cut in zip(self.names, self.shapes, cuts)}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Join arrays by name to a vector on the host."""
        joined = np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in self.names])
        return np.pad(joined, (0, self.length - len(joined)))
