"""The loss that aligns a network's projected tokens with the features of teachers (REPA; Yu et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_mm_dit.framework import ops

Tensor = Any  # a tensor of the active framework


def projection_loss(projected: Sequence[Tensor], features: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the negative weighted cosine similarity, mean over tokens and teachers, (B,) (Yu et al. 2024, eq. 8).

    projected, features: one (B, N, width) float32 per teacher; weights: one per teacher's cosine.
    """
    assert len(projected) == len(features) == len(weights) > 0
    total = sum(
        weight * ops.mean_per_sample(ops.cosine_similarity(ours, theirs, -1))
        for ours, theirs, weight in zip(projected, features, weights)
    )
    return -total / len(projected)
