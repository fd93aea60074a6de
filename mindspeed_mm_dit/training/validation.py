"""The loss on held-out images: its mean, and its mean in each quarter of the noise levels. NumPy only.

The loss of a training step depends mostly on the timesteps it sampled. A validation covers the noise levels evenly and
always in the same way, so its mean can be compared with earlier ones; the quarters show at which noise levels a model
gets better or worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
"""The quarters of the noise level, in percent; the level is t / T of a Gaussian process, 1 - t of a flow."""


@dataclass(frozen=True)
class ValidationLoss:
    """The result of one validation."""

    mean: float
    """Over all samples."""
    quarters: dict[str, float]
    """Mean over the samples of each of QUARTERS; quarters without samples are left out."""

    @classmethod
    def from_sums(cls, sums: np.ndarray) -> ValidationLoss:
        """Divide the sums of losses by their numbers of samples; ``sums`` (2, 4) is a sum of ``sums_by_quarter``."""
        total, count = sums.sum(1).tolist()
        quarters = {name: loss / samples for name, loss, samples in zip(QUARTERS, *sums.tolist()) if samples}
        return cls(total / count, quarters)

    def line(self, iteration: int) -> str:
        """Return the log line, in Megatron's form for several losses."""
        values = {"loss": self.mean, **{quarter_name(name): loss for name, loss in self.quarters.items()}}
        columns = "".join(f" {name} value: {value:.6E} |" for name, value in values.items())
        return f" validation loss at iteration {iteration} |{columns}"

    def scalars(self) -> dict[str, float]:
        """Return the values by their names in TensorBoard."""
        return {"valid/loss": self.mean, **{quarter_scalar(name): loss for name, loss in self.quarters.items()}}


def quarter_name(quarter: str) -> str:
    """Return the name in the log of the loss in one of QUARTERS."""
    return f"noise {quarter}%"


def quarter_scalar(quarter: str) -> str:
    """Return the name in TensorBoard of the loss in one of QUARTERS."""
    return f"valid/loss_noise_{quarter}"


def sums_by_quarter(losses: np.ndarray, noise_levels: np.ndarray) -> np.ndarray:
    """Return sum and number of the ``losses`` (B,) in each quarter of ``noise_levels`` (B,), 0 to 1: (2, 4)."""
    quarters = np.minimum(4 * noise_levels, 3).astype(np.int64)
    return np.stack([np.bincount(quarters, losses, 4), np.bincount(quarters, minlength=4)])
