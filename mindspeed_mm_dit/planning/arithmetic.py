"""Arithmetic of a train step, from what a predictor says of its forward pass."""

from __future__ import annotations

from mindspeed_mm_dit.configs.predictor import PredictorConfig


def train_flop(predictor: PredictorConfig) -> int:
    """FLOP of one sample in one train step: forward and twice that in backward, two FLOP a multiply-add."""
    return 6 * predictor.multiply_adds()


def recompute_flop(predictor: PredictorConfig) -> int:
    """FLOP that recomputing the blocks adds to a sample's train step; not counted as useful in MFU."""
    return 2 * predictor.multiply_adds()
