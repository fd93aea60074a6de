"""All trained parameters as one vector: one reduction a step, and a slice for every worker.

The vector is padded with zeros so that it divides into equal slices; zeros stay zeros under AdamW.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops

from mindspeed_mm_dit.framework.mindspore.runtime import ON_CPU

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
        parts = map(Tensor, self.cut(vector.asnumpy())) if ON_CPU else self.cut(vector)  # slicing there costs 10 times
        for parameter, part in zip(parameters, parts):
            ops.assign(parameter, part)

    def cut(self, vector: Any) -> list[Any]:
        """Cut a vector (length,), tensor or array, into the shapes of the parameters, in the order of the names."""
        starts = itertools.accumulate(self.sizes, initial=0)
        return [
            vector[start : start + size].reshape(shape) for start, size, shape in zip(starts, self.sizes, self.shapes)
        ]

    def arrays(self, vector: np.ndarray) -> Arrays:
        """Cut a vector on the host into arrays by name."""
        return dict(zip(self.names, self.cut(vector)))

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Join arrays by name to a vector on the host."""
        joined = np.concatenate([np.asarray(arrays[name], np.float32).ravel() for name in self.names])
        return np.pad(joined, (0, self.length - len(joined)))
