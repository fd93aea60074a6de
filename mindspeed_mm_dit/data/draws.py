"""Every random draw of a training sample, as a pure function of (seed, sample index).

Sample index i is the i-th sample the run consumes, over all ranks. Each kind of draw has its own stream of
NumPy's counter-based Philox generator: the key is (seed, stream), the counter starts at the sample index. So
the draws do not depend on the number of ranks, the micro-batch size, a resume or the framework, and
a new kind of draw changes no other.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The kinds of draw. The numbers are part of the meaning of a seed: never reuse one."""

    ORDER = 1
    TIMESTEP = 2
    NOISE = 3
    LABEL_DROP = 4
    FLIP = 5
    POSTERIOR = 6
    VALID_SPLIT = 7
    SAMPLE_START = 8
    SAMPLE_NOISE = 9
    CAPTION = 10
    CLIP_START = 11
    SAMPLE_LABEL = 12
    SOURCE = 13
    ENCODER_DROP = 14


VALIDATION_START = 1 << 62
"""Sample indices of validation start here, so validation never shares a draw with training."""


def generator(seed: int, stream: Stream, sample_index: int, block: int = 0) -> np.random.Generator:
    """Return the generator of one stream at one sample index; ``block`` separates several draws there."""
    return philox((seed, stream), (0, block, sample_index, 0))


def philox(key: tuple[int, int], counter: tuple[int, int, int, int] = (0, 0, 0, 0)) -> np.random.Generator:
    """Return NumPy's Philox4x64-10 (Salmon et al. 2011) for whole numbers in [0, 2**64)."""
    # Without the dtype NumPy takes numbers from 2**63 on for floats.
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64)))


def timesteps(seed: int, sample_indices: np.ndarray, num_train_timesteps: int) -> np.ndarray:
    """Return timesteps, uniform in 0 ... T-1, (B,) int64."""
    return np.array(
        [generator(seed, Stream.TIMESTEP, p).integers(num_train_timesteps) for p in sample_indices.tolist()], np.int64
    )


def evenly_spread(numbers: np.ndarray) -> np.ndarray:
    """Return the points ``numbers`` (B,) of the van der Corput sequence, which fills [0, 1) evenly, (B,) float64.

    Any 2**k consecutive points that begin at a multiple of 2**k put one point into each 2**k-th part of [0, 1) (van der
    Corput 1935: the binary digits of the number, mirrored at the point).
    """
    points, digit_value = np.zeros(len(numbers)), 0.5
    while numbers.any():
        points += digit_value * (numbers & 1)
        numbers, digit_value = numbers >> 1, digit_value / 2
    return points


def normals(
    seed: int, stream: Stream, sample_indices: np.ndarray, shape: tuple[int, ...], block: int = 0
) -> np.ndarray:
    """Return standard normal noise, (B, *shape) float32."""
    out = np.empty((len(sample_indices), *shape), np.float32)
    for row, sample_index in zip(out, sample_indices.tolist()):
        generator(seed, stream, sample_index, block).standard_normal(dtype=np.float32, out=row)
    return out


def uniforms(seed: int, stream: Stream, sample_indices: np.ndarray, block: int = 0) -> np.ndarray:
    """Return numbers uniform in [0, 1), (B,) float64."""
    return np.array([generator(seed, stream, p, block).random() for p in sample_indices.tolist()])


def coins(seed: int, stream: Stream, sample_indices: np.ndarray, probability: float, block: int = 0) -> np.ndarray:
    """Return draws that are True with ``probability``, (B,) bool."""
    if probability == 0:
        return np.zeros(len(sample_indices), bool)
    return uniforms(seed, stream, sample_indices, block) < probability
