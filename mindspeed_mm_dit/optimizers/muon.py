"""Muon (Jordan et al. 2024): the momentum of a matrix, its singular values brought near 1; the rest goes by AdamW.

Matrices that one layer holds below each other (q, k and v; the modulations of a block) are stepped as matrices of their
own, as the predictor's config tells them apart. Scale: 0.2 sqrt(max(rows, columns)), so that an entry changes by about
what AdamW would change it (Liu et al. 2025), and learning rate and decay of AdamW can stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_mm_dit.optimizers import adam
from mindspeed_mm_dit.optimizers.contract import Optimizer, Parameter, Rule, Tensor, flag, require

SMALLEST_NORM = 1e-7
"""What a matrix is divided by at least."""
QUINTIC = (3.4445, -4.775, 2.0315)
"""Coefficients of the iteration: steep at 0, and near 1 from about 0.1 on."""
Scale = Literal["match_rms_adamw", "original"]
"""What decides the length of a step, by the names that PyTorch has for it."""

_SCALES = "match_rms_adamw: steps as large as AdamW's; original: as large as the matrix is tall"


@dataclass(frozen=True)
class MuonConfig(adam.AdamConfig):
    """Settings of ``--optimizer muon``: those of AdamW for what is no matrix, and, by Megatron's names, its own."""

    muon_momentum: float = flag(0.95, "decay of the mean of a matrix's gradients")
    """Share of the mean of the gradients that a step keeps."""
    muon_nesterov: bool = flag(True, "let the newest gradient count once more")
    """Step by the mean with the newest gradient mixed in a second time (Nesterov)."""
    muon_scale_mode: Literal["match_rms_adamw", "original"] = flag(
        "match_rms_adamw", _SCALES, type=str, choices=("match_rms_adamw", "original")
    )
    """What decides the length of a step."""
    muon_num_ns_steps: int = flag(5, "rounds of the iteration that makes a matrix orthogonal")
    """Rounds of the Newton-Schulz iteration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "muon_momentum", 0 <= self.muon_momentum < 1, "must lie in [0, 1)")
        require(self, "muon_num_ns_steps", 1 <= self.muon_num_ns_steps <= 100, "must be from 1 to 100")


def change(
    config: MuonConfig, gradient: Tensor, state: tuple[Tensor, ...], numbers: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the momentum that is to be made orthogonal, and the one that is kept."""
    mu = config.muon_momentum
    momentum = mu * state[0] + (1 - mu) * gradient
    return (1 - mu) * gradient + mu * momentum if config.muon_nesterov else momentum, momentum


def orthogonalised(
    x: Tensor, steps: int, quintic: tuple[float, float, float] = QUINTIC, smallest_norm: float = SMALLEST_NORM
) -> Tensor:
    """Bring the singular values of matrices x (n, rows, columns) near 1, in the dtype of x (Newton-Schulz)."""
    a, b, c = quintic
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-2, -1) if is_tall else x  # (n, m, M), m <= M
    x = x / (x * x).sum((-2, -1), keepdims=True).sqrt().clamp(min=smallest_norm)
    for _ in range(steps):
        gram = x @ x.swapaxes(-2, -1)  # (n, m, m)
        x = a * x + (b * gram + c * (gram @ gram)) @ x  # (n, m, M)
    return x.swapaxes(-2, -1) if is_tall else x


def scale_of(mode: Scale, rows: int, columns: int) -> float:
    """Return what an orthogonal matrix is multiplied by, beside the learning rate."""
    return max(1.0, rows / columns) ** 0.5 if mode == "original" else 0.2 * max(rows, columns) ** 0.5


def of_matrices(config: MuonConfig, x: Tensor, numbers: tuple[Any, ...]) -> Tensor:
    """Return what is taken from matrices whose momentum is x (n, rows, columns)."""
    (lr,) = numbers
    return lr * scale_of(config.muon_scale_mode, *x.shape[-2:]) * orthogonalised(x, config.muon_num_ns_steps)


RULE = Rule(("momentum_buffer",), change, of_matrices=of_matrices)


def rule_of(config: MuonConfig, parameter: Parameter) -> Rule:
    """Return Muon's for matrices, AdamW's for the rest."""
    return RULE if parameter.matrices else adam.RULE


MUON = Optimizer(MuonConfig, rule_of)
