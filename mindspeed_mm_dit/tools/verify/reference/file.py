"""A file of reference values: its arrays, checks of its inputs, networks with its weights, and kinds of files.

To add a kind, write a module in this folder with a ``FileKind`` and its program, which takes (arrays, weights by flag)
and computes the quantities of the rows. Then add the kind to ``parity.KINDS``.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.state import check_names
from mindspeed_mm_dit.configs.files import UnusableFile, check_file, read_npz
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, nearest
from mindspeed_mm_dit.framework import ops, optim, runtime
from mindspeed_mm_dit.integrations.formats.config_json import check_declared_sizes
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers.muon import MIN_NORM, QUINTIC, MuonConfig, change, orthogonalize, scale_of
from mindspeed_mm_dit.tools.verify.table import FORWARD, GRADIENTS, Bound, Quantity, Rows, UnknownQuantity

Tensor = Any
Weights = Mapping[str, "str | Path"]
"""Flag -> file or folder with the weights of one part of the model."""
FORMAT = "See docs/verification.md for the format."


class ReferenceArrays(dict[str, np.ndarray]):
    """The arrays of a file of reference values by name; looking up a missing one raises CheckpointError."""

    def __missing__(self, name: str) -> np.ndarray:
        raise CheckpointError(f"{name} is not in --reference, and other values of the file need it. {FORMAT}")

    def tensor(self, name: str) -> Tensor:
        """Return an array as a tensor of int64 or float32, as networks take it."""
        return ops.tensor(self[name].astype(np.int64 if self[name].dtype.kind in "iub" else np.float32))

    def check_shape(self, name: str, expected: tuple[int | None, ...]) -> None:
        """Raise CheckpointError unless the array ``name`` has the ``expected`` shape; None is any size but 0."""
        actual = self[name].shape
        if len(actual) != len(expected) or any(
            size == 0 if other is None else size != other for size, other in zip(actual, expected)
        ):
            sizes = str(expected).replace("None", "any")
            raise CheckpointError(f"{name} in --reference has shape {actual}, and must have {sizes}. {FORMAT}")

    def check_range(self, name: str, most: int, kinds: str = "iu", why: str = "") -> None:
        """Raise CheckpointError unless the array ``name`` holds whole ("iu") or real ("f") numbers up to ``most``."""
        values, words = self[name], "real" if kinds == "f" else "whole"
        if values.dtype.kind not in kinds or not ((values >= 0) & (values <= most)).all():  # not: NaN too
            raise CheckpointError(f"{name} in --reference must hold {words} numbers from 0 to {most}. {why or FORMAT}")

    def sizes(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the whole numbers in ``config`` by ``names``."""
        numbers = self["config"]
        if numbers.shape != (len(names),) or numbers.dtype.kind not in "iu":
            raise CheckpointError(
                f"config in --reference is {shorten_repr(numbers.tolist())}, and must be {len(names)} whole numbers: "
                f"{', '.join(names)}. {FORMAT}"
            )
        return dict(zip(names, numbers.tolist()))


def read_arrays(path: str | Path) -> ReferenceArrays:
    """Read the arrays of an .npz; raises CheckpointError if it is no .npz, or an array does not hold real numbers."""
    try:
        check_file(path)
        if not zipfile.is_zipfile(path):
            raise UnusableFile("is not an .npz of arrays, or is cut short")
        if not (arrays := ReferenceArrays(read_npz(path))):
            raise UnusableFile("holds no arrays")
    except UnusableFile as problem:
        words = str(problem) if os.path.lexists(path) else "does not exist"
        raise CheckpointError(f"--reference = {path} {words}. {FORMAT}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise CheckpointError(f"{name} in --reference must be an array of real numbers. {FORMAT}")
    return arrays


def unknown_quantity(name: str, hint: str = "") -> CheckpointError:
    """Return the error for an unknown key; ``hint``: a sentence."""
    return CheckpointError(f"{name} in --reference is no quantity that mm-dit parity knows. {hint or FORMAT}")


def config_of(kind: type, sizes: Mapping[str, Any], what: str) -> Any:
    """Return the config of a network with these ``sizes``; ``what`` names their source in errors.

    Raises CheckpointError for invalid sizes, and for those that do not fit this machine's memory.
    """
    try:
        config: Any = from_mapping(kind, sizes, what)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    check_declared_sizes(config, what)
    return config


def loaded(
    network: Callable[[Any], Any], config: Any, weights: Mapping[str, np.ndarray], flag: str, compiled: bool = True
) -> Any:
    """Return a network with the ``weights`` of ``flag``, ready to use; raises CheckpointError if they do not match.

    compiled: whether MindSpore may compile it; then its modules cannot be watched.
    """
    check_names(
        parameters_of(config).shapes(),
        {name: array.shape for name, array in weights.items()},
        flag,
        "is not of the network that config of --reference describes",
        "Name the weights that the file was made with.",
    )
    model = network(config)
    runtime.load_arrays(model, weights)
    model = runtime.to_runtime_device(model)
    return runtime.jit_forward(model) if compiled else model


def watched(network: Any, run: Callable[[], object]) -> dict[str, Any]:
    """Return the output of each module's first call during ``run``, by module name."""
    outputs: dict[str, Any] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs.setdefault(name, output)

        return hook

    hooks = [module.register_forward_hook(record(name)) for name, module in network.named_modules()]
    run()
    for hook in hooks:
        hook.remove()
    return outputs


def evaluate(network: Any, *inputs: Tensor) -> Tensor:
    """Return the output of ``network`` for ``inputs``, without gradients."""
    with ops.no_grad():
        return network(*inputs)


@dataclass(frozen=True)
class FileKind:
    """A kind of files of reference values; names are given as regular expressions."""

    signature: str
    """Names that appear in no file of a later kind in the registry."""
    inputs: str
    """Names that are inputs, or for information."""
    program: Callable[[ReferenceArrays, Weights], Any]
    """Recomputes a file, each quantity on demand."""
    rows: Rows
    """Every quantity that such a file may hold."""
    has_network: bool = True
    """Whether the values are those of a network, whose weights ``--checkpoint`` names."""
    not_checked: Mapping[str, str] = field(default_factory=dict)
    """Names that are not recomputed here -> the reason."""


ADAMW_LR = 1e-4
"""Learning rate of the step in most files."""
KEYS_BIAS = Bound(
    "The keys' bias has a gradient of rounding alone, which Adam scales up.", least=lambda reference: 1e-4
)

ZERO = Bound(
    "The bias of the keys' norm shifts all scores of a query alike, which softmax does not see: its gradient is zero "
    "but for rounding, unless keys are rotated by position.",
    least=lambda reference: 1e-7 / max(float(norm(reference)), 1e-30),
)


class OptimizerStep:
    """A step of AdamW (eps 1e-8, no decay) on the mean of the losses, done when a result is first used.

    ``network``: creates a network whose weights this step may change. ``losses``: network -> losses (B,).
    """

    def __init__(
        self,
        network: Callable[[], Any],
        losses: Callable[[Any], Tensor],
        lr: float = ADAMW_LR,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self._network, self._losses, self._lr, self._betas = network, losses, lr, betas

    @cached_property
    def network(self) -> Any:
        """The network that learns."""
        return self._network()

    @cached_property
    def _before(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return optim.gradients(self.network, lambda: self._losses(self.network))

    @property
    def losses(self) -> np.ndarray:
        """Loss of each sample before the step, (B,)."""
        return self._before[0]

    @property
    def gradients(self) -> Mapping[str, np.ndarray]:
        """Gradient of the mean loss by parameter."""
        return self._before[1]

    def gradient_norm(self, parameter: str) -> np.ndarray:
        """Return the norm of one of the gradients; raises UnknownQuantity."""
        return norm(_lookup(self.gradients, parameter))

    @property
    def grad_norm(self) -> np.ndarray:
        """Norm of all gradients as one vector."""
        return np.sqrt(sum(norm(gradient) ** 2 for gradient in self.gradients.values()))

    @cached_property
    def _after(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        assert self.gradients is not None  # those of the weights before the step
        optim.adamw_step(self.network, lambda: self._losses(self.network), self._lr, self._betas)
        with ops.no_grad():
            losses = ops.numpy(self._losses(self.network))
        return losses, {name: ops.numpy(p) for name, p in self.network.named_parameters()}

    @property
    def network_after(self) -> Any:
        """The network after the step."""
        assert self._after is not None
        return self.network

    @property
    def losses_after(self) -> np.ndarray:
        """Loss of each sample after the step, (B,)."""
        return self._after[0]

    @property
    def weights_after(self) -> Mapping[str, np.ndarray]:
        """Every parameter after the step."""
        return self._after[1]


def rows_of_step(step: Callable[[Any], OptimizerStep], prefix: str = "") -> Rows:
    """Return the rows about one step, for files of reference values.

    step: program -> its step. prefix: regular expression of the text before a parameter's name.
    """
    return (
        Quantity(rf"grad_norm/{prefix}(.+attn\.k_norm\.bias)", lambda p, name: step(p).gradient_norm(name), ZERO),
        Quantity(rf"grad_norm/{prefix}(.+)", lambda p, name: step(p).gradient_norm(name), GRADIENTS),
        Quantity(r"grad_norm_total", lambda p: step(p).grad_norm, GRADIENTS),
        Quantity(
            rf"param_norm_after_one_adamw_step/{prefix}(.+attn\.(?:qkv|k_norm)\.bias)",
            lambda p, name: norm(_lookup(step(p).weights_after, name)),
            KEYS_BIAS,
        ),
        Quantity(
            rf"param_norm_after_one_adamw_step/{prefix}(.+)",
            lambda p, name: norm(_lookup(step(p).weights_after, name)),
            FORWARD,
        ),
        Quantity(r"loss_after_one_adamw_step", lambda p: step(p).losses_after),
    )


def norm(array: np.ndarray) -> np.ndarray:
    """Return the norm of all elements, summed in float64."""
    return np.asarray(np.linalg.norm(array.astype(np.float64)))


def _lookup(arrays: Mapping[str, np.ndarray], parameter: str) -> np.ndarray:
    if parameter not in arrays:
        raise UnknownQuantity(nearest(parameter, arrays))
    return arrays[parameter]


class Muon:
    """The quantities of a file, computed in ``dtype``."""

    dtype: type = np.float32

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        if weights:
            flag, path = next(iter(weights.items()))
            raise ConfigError(
                f"{flag} = {path} is not used: the values in --reference are steps of an optimizer without a network. "
                "Leave it out."
            )
        self.arrays = arrays
        a, b, c = arrays.get("ns_coefficients", np.array(QUINTIC)).tolist()
        self._quintic, self._eps = (a, b, c), float(arrays.get("eps", MIN_NORM))
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
            raise CheckpointError(
                f"param/{matrix} in --reference has {param.shape[0]} rows, and cannot be split into {parts} matrices "
                f"of the same height. {FORMAT}"
            )
        return param.astype(self.dtype), self.arrays[f"grad/{matrix}"].astype(self.dtype)

    def _each(self, x: Any, parts: int, steps: int) -> np.ndarray:
        matrices = ops.reshape(x, (parts, x.shape[0] // parts, x.shape[1]))
        return ops.numpy(ops.reshape(orthogonalize(matrices, steps, self._quintic, self._eps), tuple(x.shape)))


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


MUON = FileKind(
    signature="grad/.+",
    inputs="lr|weight_decay|momentum|ns_coefficients|ns_steps|eps|(param|grad)/.+",
    program=Muon,
    rows=_rows("bfloat16/", _BFLOAT16) + _rows("", _STEPS),
    has_network=False,
)
