"""Resizes linear layers from or to patches for another patch size. NumPy in float64, no framework.

A patch is enlarged by bilinear interpolation, x' = B x, and shrunk by the pseudo-inverse of enlarging. The layer from
patches to tokens is resized so that an enlarged patch has the same token as the original, w' = (B^T)^+ w (PI-resize of
FlexiViT, Beyer et al. 2023); the layer from tokens to patches so that it outputs the resized patch, W' = B W.
Enlarging and shrinking back gives the same weights, for both.
"""

from __future__ import annotations

import numpy as np


def resize_matrix(before: int, after: int) -> np.ndarray:
    """Return b (after, before) float64, which resizes a row of ``before`` pixels; b x b^T resizes a patch x."""
    if after < before:
        return np.linalg.pinv(resize_matrix(after, before))
    centres = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)  # half-pixel, edges repeated
    left = np.minimum(centres.astype(int), max(before - 2, 0))
    fraction = centres - left
    matrix = np.zeros((after, before))
    matrix[np.arange(after), left] += 1 - fraction
    matrix[np.arange(after), np.minimum(left + 1, before - 1)] += fraction
    return matrix


def resized_input(weight: np.ndarray, after: int) -> np.ndarray:
    """Resize the weights (..., P, P) of a layer from patches to tokens to patches of ``after`` pixels."""
    matrix = np.linalg.pinv(resize_matrix(weight.shape[-1], after).T)  # (after, P)
    return matrix @ weight.astype(np.float64) @ matrix.T


def resized_output(weight: np.ndarray, after: int) -> np.ndarray:
    """Resize the weights (P, P, ...) of a layer from tokens to patches to patches of ``after`` pixels."""
    matrix = resize_matrix(weight.shape[0], after)  # (after, P)
    return np.einsum("ip,jq,pq...->ij...", matrix, matrix, weight.astype(np.float64))
