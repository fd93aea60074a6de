"""FLOP of a training step, from the predictor's count of its forward pass, and model FLOP utilisation (MFU)."""

from __future__ import annotations

from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.models.meta import multiply_adds


def train_flop(predictor: PredictorConfig) -> int:
    """Return the FLOP of one sample in one training step: forward, and twice that in backward; 2 per multiply-add."""
    return 6 * multiply_adds(predictor)


def recompute_flop(predictor: PredictorConfig) -> int:
    """Return the FLOP that recomputing the blocks adds per sample and step; they do not count as useful in MFU."""
    return 2 * multiply_adds(predictor)


PEAKS: dict[str, dict[str, float]] = {
    # part of the device's name: dense TFLOP/s of the vendor's data sheet; fp32 with PyTorch's defaults (no TF32)
    "B200": {"bf16": 2250.0, "fp32": 75.0},
    "H200": {"bf16": 989.0, "fp32": 67.0},
    "H100 PCIe": {"bf16": 756.0, "fp32": 51.0},
    "H100": {"bf16": 989.0, "fp32": 67.0},
    "H800": {"bf16": 989.0, "fp32": 67.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "A800": {"bf16": 312.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "fp32": 91.6},
    "4090": {"bf16": 165.2, "fp32": 82.6},
}
"""Ascend parts and CPUs are not listed, because parts of the same name differ too much: use --peak-tflops."""

CARDS = {"4090": 24, "L40S": 48, "H100": 80, "H200": 141, "B200": 192}
"""Memory in GiB of the devices whose peak a plan assumes if only the memory is known; ascending."""


def card_with(gib: float) -> str:
    """Return the smallest of CARDS with ``gib`` of memory, or the largest of all."""
    return next((name for name, memory in CARDS.items() if memory >= gib), list(CARDS)[-1])


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the peak TFLOP/s of a device in ``precision`` "bf16" or "fp32"; None if its name has no known part."""
    for part, peaks in PEAKS.items():
        if part in device_name:
            return peaks[precision]
    return None


def utilisation(images_per_second: float, flop_per_image: float, peak: float | None, devices: int = 1) -> float | None:
    """Return the MFU: useful arithmetic / peak of all ``devices``, in [0, 1]; None if the peak is unknown."""
    return None if peak is None else images_per_second * flop_per_image / (peak * 1e12 * devices)
