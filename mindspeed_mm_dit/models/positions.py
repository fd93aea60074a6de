"""Sinusoidal embeddings of positions and timesteps, in NumPy. No framework."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

FREQUENCY_WIDTH = 256
"""Width of DiT's sinusoidal timestep embedding."""


def stretched_grid(height: int, width: int, base: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of each patch of a grid, each (height * width,), row by row.

    Both run from 0 to below ``base``, the side of the square that the positions were made for. Along a side of another
    length they are spaced more closely or widely (PixArt-alpha, Chen et al. 2023; rotary ones as EVA-02, Fang et al.
    2023).
    """
    rows, columns = np.divmod(np.arange(height * width), width)
    return rows * (base / height), columns * (base / width)


def sincos_positions_2d(width: int, base: int, grid: tuple[int, int] | None = None) -> np.ndarray:
    """Return DiT's frozen position embedding, (tokens, width) float32, of a square of side ``base`` or a ``grid``.

    The first half of each vector encodes the column, the second half the row (Peebles & Xie 2023, after MAE);
    each half is sin then cos of position * 10000**(-i / (width / 4)).
    """
    frequencies = 1.0 / 10000 ** (np.arange(width // 4, dtype=np.float64) / (width / 4))
    rows, columns = stretched_grid(*(grid or (base, base)), base)
    angles = [np.outer(position, frequencies) for position in (columns, rows)]
    return np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], axis=1).astype(np.float32)


def timestep_frequencies(width: int) -> np.ndarray:
    """Return the angular frequencies of the timestep embedding, (width / 2,) float32, from 1 down to 1 / 10000.

    The exponent is rounded to float32 before exp, as in the published model; at a timestep of 999 the difference
    would show.
    """
    half = width // 2
    exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half)
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def rotary_tables_2d(
    head_dim: int, base: int, num_prefix: int = 0, grid: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of rotary positions, each (num_prefix + tokens, head_dim / 2) float32, of a square of
    side ``base`` or a ``grid``.

    The first half of the pairs rotates with the row, the second with the column: pair i of n by position *
    10000**(-i / n), computed in float64. num_prefix: number of tokens before those of the grid, without a position.
    """
    pairs = head_dim // 4
    frequencies = 10000.0 ** (-np.arange(pairs) / pairs)
    rows, columns = stretched_grid(*(grid or (base, base)), base)
    angles = np.concatenate([np.outer(rows, frequencies), np.outer(columns, frequencies)], axis=1)
    angles = np.concatenate([np.zeros((num_prefix, 2 * pairs)), angles])
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotary_pairs_by_axis(head_dim: int) -> tuple[int, int, int]:
    """Return how many pairs of a head rotate with frames, rows and columns: a third of them each, frames the rest."""
    per_side = head_dim // 6
    return head_dim // 2 - 2 * per_side, per_side, per_side


def rotary_table(wave: Callable[[np.ndarray], np.ndarray], pairs: int, length: int) -> np.ndarray:
    """Return the cosines or sines (``wave``) of rotary positions along one axis, (length, pairs) float32.

    Pair i of n rotates by position * 10000**(-i / n), computed in float64 (Su et al. 2021, section 3.2.2).
    """
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(pairs) / pairs))
    return wave(angles).astype(np.float32)


def grid_positions(h: int, w: int) -> np.ndarray:
    """Return (0, row, column) of each patch of a grid, row by row, (h w, 3)."""
    rows, columns = np.divmod(np.arange(h * w), w)
    return np.stack([np.zeros(h * w), rows, columns], 1)


def rotary_at_positions(positions: np.ndarray, widths: tuple[int, ...], theta: float = 10000.0) -> np.ndarray:
    """Return rotary cosines, then sines, of tokens at ``positions`` (N, axes), (2, N, d / 2) float32.

    widths: rotary channels of a head per axis. Pair i of an axis of width n rotates by position * theta**(-2i / n),
    computed in float64.
    """
    angles = [np.outer(position, theta ** (-np.arange(0, n, 2) / n)) for position, n in zip(positions.T, widths)]
    all_angles = np.concatenate(angles, 1)
    return np.stack([np.cos(all_angles), np.sin(all_angles)]).astype(np.float32)
