"""Muon (Jordan et al. 2024): steps matrices by their orthogonalised momentum; other parameters use AdamW.

Matrices stacked in one layer (q, k and v; the modulations of a block) are treated as separate matrices; the predictor's
config says how many there are. The step is scaled by 0.2 sqrt(max(rows, columns)), so that an entry changes about as
much as with AdamW (Liu et al. 2025) and AdamW's learning rate and weight decay still fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_mm_dit.optimizers import adam
from mindspeed_mm_dit.optimizers.contract import OptimizerSpec, Parameter, Tensor, UpdateRule, flag, require

MIN_NORM = 1e-7
"""Lower bound of the norm that a matrix is divided by."""
QUINTIC = (3.4445, -4.775, 2.0315)
"""Coefficients of the iteration: steep at 0, and near 1 from about 0.1 on."""
Scale = Literal["match_rms_adamw", "original"]
"""How the step is scaled, with PyTorch's names."""

_SCALES = "scale of a step; match_rms_adamw: as large as AdamW's; original: sqrt(max(1, rows / columns)) of the matrix"


@dataclass(frozen=True)
class MuonConfig(adam.AdamConfig):
    """Settings of ``--optimizer muon``: its own, with Megatron's names, and those of AdamW for other parameters."""

    muon_momentum: float = flag(0.95, "momentum, the decay of the running mean of a matrix's gradients")
    """Decay of the running mean of the gradients, in [0, 1)."""
    muon_nesterov: bool = flag(True, "Nesterov momentum: mix in the newest gradient a second time")
    """Step by the mean with the newest gradient mixed in a second time (Nesterov)."""
    muon_scale_mode: Literal["match_rms_adamw", "original"] = flag(
        "match_rms_adamw", _SCALES, type=str, choices=("match_rms_adamw", "original")
    )
    """How the step is scaled."""
    muon_num_ns_steps: int = flag(5, "number of Newton-Schulz iterations that orthogonalise a matrix")
    """Number of Newton-Schulz iterations, 1 to 100."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "muon_momentum", 0 <= self.muon_momentum < 1, "must lie in [0, 1)")
        require(self, "muon_num_ns_steps", 1 <= self.muon_num_ns_steps <= 100, "must be from 1 to 100")


def change(
    config: MuonConfig, gradient: Tensor, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the momentum to orthogonalise, and the momentum to keep."""
    mu = config.muon_momentum
    momentum = mu * state[0] + (1 - mu) * gradient
    return (1 - mu) * gradient + mu * momentum if config.muon_nesterov else momentum, momentum


def orthogonalize(
    x: Tensor, steps: int, quintic: tuple[float, float, float] = QUINTIC, smallest_norm: float = MIN_NORM
) -> Tensor:
    """Return matrices x (n, rows, columns) with singular values brought near 1 (Newton-Schulz), in the dtype of x."""
    a, b, c = quintic
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-2, -1) if is_tall else x  # (n, m, M), m <= M
    x = x / (x * x).sum((-2, -1), keepdims=True).sqrt().clamp(min=smallest_norm)
    for _ in range(steps):
        gram = x @ x.swapaxes(-2, -1)  # (n, m, m)
        x = a * x + (b * gram + c * (gram @ gram)) @ x  # (n, m, M)
    return x.swapaxes(-2, -1) if is_tall else x


def scale_of(mode: Scale, rows: int, columns: int) -> float:
    """Return the factor of an orthogonalised matrix, besides the learning rate."""
    return max(1.0, rows / columns) ** 0.5 if mode == "original" else 0.2 * max(rows, columns) ** 0.5


def update_matrices(config: MuonConfig, x: Tensor, numbers: tuple[Any, ...]) -> Tensor:
    """Return the amount to subtract from matrices with momentum x (n, rows, columns)."""
    (lr,) = numbers
    return lr * scale_of(config.muon_scale_mode, *x.shape[-2:]) * orthogonalize(x, config.muon_num_ns_steps)


RULE = UpdateRule(("momentum_buffer",), change, update_matrices=update_matrices)


def rule_of(config: MuonConfig, parameter: Parameter) -> UpdateRule:
    """Return Muon's rule for matrices, AdamW's for the rest."""
    return RULE if parameter.matrices else adam.RULE


MUON = OptimizerSpec(MuonConfig, rule_of)
