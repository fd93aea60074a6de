"""Files of reference values of Muon's steps: matrices and their gradients, no network.

docs/verification.md describes the format. Besides each result, a file has the same in float64, and with the iteration
in bfloat16.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.optimizers.muon import QUINTIC, SMALLEST_NORM, MuonConfig, change, orthogonalised, scale_of
from mindspeed_mm_dit.tools.verify.reference.file import FORMAT, Kind, ReferenceArrays, Weights
from mindspeed_mm_dit.tools.verify.table import Bound, Quantity


class Muon:
    """The quantities of a file, computed in ``dtype``."""

    dtype: type = np.float32

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        if weights:
            flag, path = next(iter(weights.items()))
            raise ConfigError(f"{flag} = {path}", "a file of an optimizer's steps has no network", "leave it out")
        self.arrays = arrays
        a, b, c = arrays.get("ns_coefficients", np.array(QUINTIC)).tolist()
        self._quintic, self._eps = (a, b, c), float(arrays.get("eps", SMALLEST_NORM))
        self._steps = int(arrays.get("ns_steps", np.array(5)))

    def states(self, run: str, matrix: str, parts: str | None) -> np.ndarray:
        """Return a matrix after each step of a run, (steps, rows, columns)."""
        return self._run(run, matrix, parts)[0]

    def momentum(self, matrix: str, parts: str | None) -> np.ndarray:
        """Return the momentum after the last step of the run ``original``."""
        return self._run("original", matrix, parts)[1]

    def orthogonalised(self, matrix: str, parts: str | None) -> np.ndarray:
        """Return the first gradient, its singular values brought near 1."""
        gradient = self._matrix(matrix, parts)[1][0]
        return self._each(ops.tensor(gradient), int(parts or 1), self._steps)

    def _run(self, run: str, matrix: str, parts: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the matrix after each step, and the last momentum."""
        param, gradients = self._matrix(matrix, parts)
        config, lr, count = self._config(run), float(self.arrays["lr"]), int(parts or 1)
        decay = 0.0 if run == "no_weight_decay" else float(self.arrays["weight_decay"])
        length = lr * scale_of(config.muon_scale_mode, param.shape[0] // count, param.shape[1])
        weights, momentum, states = param, ops.tensor(np.zeros_like(param)), []
        for gradient in gradients:
            direction, momentum = change(config, ops.tensor(gradient), (momentum,), ())
            weights = weights * (1 - lr * decay) - length * self._each(direction, count, config.muon_num_ns_steps)
            states.append(weights)
        return np.stack(states), ops.numpy(momentum)

    def _config(self, run: str) -> MuonConfig:
        rounds = re.fullmatch(r"ns_steps(\d+)", run)
        return MuonConfig(
            muon_momentum=float(self.arrays["momentum"]),
            muon_nesterov=run != "no_nesterov",
            muon_scale_mode="match_rms_adamw" if run == "match_rms_adamw" else "original",
            muon_num_ns_steps=int(rounds[1]) if rounds else self._steps,
        )

    def _matrix(self, matrix: str, parts: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Return a matrix and its gradients; raises CheckpointError if they do not fit, or it cannot be split so."""
        self.arrays.check_shape(f"param/{matrix}", (None, None))
        param = self.arrays[f"param/{matrix}"]
        self.arrays.check_shape(f"grad/{matrix}", (None, *param.shape))
        if parts is not None and (int(parts) < 1 or param.shape[0] % int(parts)):
            reason = f"cannot be split into {parts} matrices of the same height: it has {param.shape[0]} rows"
            raise CheckpointError(f"--reference: param/{matrix}", reason, FORMAT)
        return param.astype(self.dtype), self.arrays[f"grad/{matrix}"].astype(self.dtype)

    def _each(self, x: Any, parts: int, steps: int) -> np.ndarray:
        matrices = ops.reshape(x, (parts, x.shape[0] // parts, x.shape[1]))
        return ops.numpy(ops.reshape(orthogonalised(matrices, steps, self._quintic, self._eps), tuple(x.shape)))


_STEPS = Bound(
    "Five rounds of the iteration enlarge the smallest singular values five hundredfold, and their rounding with them: "
    "two float32 programs differ by up to 1e-6 of the change. An error of the formula is 1e-2 of it, or more.",
    least=lambda reference: 5e-5,
)
_BFLOAT16 = Bound(
    "An iteration in bfloat16 is 6e-2 of the change off by itself, and depends on the machine.",
    least=lambda reference: 0.1,
)
_SINGLE_IN_BFLOAT16 = Bound(
    "Of a single matrix it is up to 1e-1 off: there is no second step in which roundings cancel.",
    least=lambda reference: 0.2,
)
_MATRIX = r"(.+?)(?:_split(\d+))?"


def _rows(prefix: str, bound: Bound) -> tuple[Quantity, ...]:
    runs = r"(original|match_rms_adamw|no_nesterov|no_weight_decay|ns_steps\d+)"
    return (
        Quantity(f"{prefix}momentum_buffer/{_MATRIX}", Muon.momentum, bound),
        Quantity(
            f"{prefix}orthogonalised/{_MATRIX}",
            Muon.orthogonalised,
            _SINGLE_IN_BFLOAT16 if bound is _BFLOAT16 else bound,
        ),
        Quantity(
            f"{prefix}{runs}/{_MATRIX}",
            Muon.states,
            bound,
            start=lambda program, run, matrix, parts: program.arrays[f"param/{matrix}"],
        ),
    )


MUON = Kind(
    signature="grad/.+",
    inputs="lr|weight_decay|momentum|ns_coefficients|ns_steps|eps|(param|grad)/.+",
    program=Muon,
    rows=_rows("bfloat16/", _BFLOAT16) + _rows("", _STEPS),
    has_network=False,
)
