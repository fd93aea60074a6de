"""Check that two programs are the same network: outputs, a loss, every gradient, module by module.

The reference is one of them in float64. How far rounding may move a quantity is measured there, with every number
perturbed at random by ROUNDINGS roundings; and if both are on PyTorch, by that program in its original precision too.
The arithmetic of the other program plays no part, so an error in it cannot widen its bound.

A difference as small as rounding, such as another eps, shows where both compute in float64: there two implementations
of one formula agree to SAME_FORMULA_ERROR. A module that is past its bound there, though its inputs are right, is wrong
if the output of the network has its difference, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindspeed_mm_dit.data.order import philox
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.verify.compare import Comparison
from mindspeed_mm_dit.tools.verify.module_recorder import (
    ModuleRecorder,
    describe_first_wrong,
    functions_for,
    perturbed_weights,
)
from mindspeed_mm_dit.tools.verify.pairs import Names, Pair, Pairing, parameters_paired
from mindspeed_mm_dit.tools.verify.processes import randomize_zeros
from mindspeed_mm_dit.tools.verify.prove import DRAWS, ROUNDINGS, UNITS, rounding_tolerances
from mindspeed_mm_dit.tools.verify.table import MODULES, Bound, Computed, Finding, judge_steps, noise_of, relative_error

SEED = 1234
OUTPUT = "output/"
"""Name of the output of the whole network."""
MEASURED = Bound(
    f"Measured on the program that is the reference: twice the largest error of {DRAWS} passes in which the weights, "
    "and the results and gradients of every module (on PyTorch, of every function, too), were moved at random by up to "
    f"{ROUNDINGS} roundings, and of one without that; at least twice {ROUNDINGS} roundings."
)
JUDGED = {"output": MEASURED, "loss": MEASURED, "gradient": MEASURED}
SAME_FORMULA_ERROR = 1e-10
"""Two implementations of one formula differ by less in float64."""
REMAINING = 1e-3
"""If a smaller fraction of a module's difference remains in the modules around it, the difference ends there."""


@dataclass(frozen=True)
class Program:
    """A module and how it is called."""

    module: Any
    inputs: Any
    """What it is called with: a mapping by keyword, a sequence, or one array."""
    output: Callable[[Any], Any]
    """Selects the tensor of its output that is compared."""
    loss: Callable[[Any], Any] | None = None

    @property
    def backend(self) -> Any:
        """The functions for its framework."""
        return functions_for(self.module)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Its parameters, by name."""
        return {name: self.backend.to_numpy(p) for name, p in self.backend.parameters(self.module).items()}

    def measure(self, exact: bool = False) -> Computed:
        """Return all that is compared of a forward and backward pass; exact: with inputs in float64."""
        inputs, watch = self.backend.to_tensors(self.inputs, self.module, exact), ModuleRecorder(self.module)
        output, loss, gradients = self.backend.gradients(self.module, lambda: self._call(inputs), self._loss)
        values = watch.end()
        values |= {f"gradient/{name}": gradient for name, gradient in gradients.items()}
        return values | {
            OUTPUT: self.backend.to_numpy(self.output(output)),
            "loss/1": self.backend.to_numpy(loss).reshape(-1),
        }

    def _call(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.module(**inputs)
        return self.module(*inputs) if isinstance(inputs, (list, tuple)) else self.module(inputs)

    def _loss(self, result: Any) -> Any:
        output = self.output(result)
        if self.loss is not None:
            return self.loss(output)
        target = philox((SEED, 0)).standard_normal(tuple(output.shape), np.float32)
        return (output * self.backend.like(target, output)).mean()


def prove(
    mine: Any,
    theirs: Any,
    inputs: Any,
    *,
    names: Names | None = None,
    loss: Callable[[Any], Any] | None = None,
    their_inputs: Any = None,
    output: Callable[[Any], Any] | None = None,
    their_output: Callable[[Any], Any] | None = None,
    precision: str | None = None,
) -> Comparison:
    """Compare ``mine`` with ``theirs``; see ``dit.prove``."""
    first = output or _tensor_in(mine)
    ours = Program(mine, inputs, first, loss)
    other = Program(theirs, inputs if their_inputs is None else their_inputs, their_output or _tensor_in(theirs), loss)
    if precision not in (None, *UNITS):
        raise ConfigError(f"precision = {precision!r} must be one of {', '.join(UNITS)}.")
    names, weights = names or {}, other.parameters
    shapes, their_shapes = (
        {name: array.shape for name, array in parameters.items()} for parameters in (ours.parameters, weights)
    )
    pairs = parameters_paired(shapes, their_shapes, names)
    with ours.backend.restored(mine), other.backend.restored(theirs):
        shared = {name for pair in pairs for name in pair.theirs}  # (a table that mine computes stays as it is)
        weights = {
            name: randomize_zeros(name, array, SEED) if name in shared else array for name, array in weights.items()
        }
        other.backend.load(theirs, weights)
        ours.backend.load(mine, {pair.mine: pair.join(weights) for pair in pairs})
        return _compared(ours, other, pairs, names, precision or _precision(ours))


def _compared(ours: Program, other: Program, pairs: list[Pair], names: Names, precision: str) -> Comparison:
    """Measure both, and one of them in float64 and with rounding noise: ``theirs`` if it is on PyTorch."""
    values, is_theirs = ours.measure(), ours.backend is other.backend or other.backend.HAS_FLOAT64
    float64, *noisy = _float64_and_noisy(other if is_theirs else ours, precision)
    reference = float64 if is_theirs else other.measure()
    if values[OUTPUT].shape != reference[OUTPUT].shape:
        raise ConfigError(
            f"The output of mine has shape {values[OUTPUT].shape}, and that of theirs {reference[OUTPUT].shape}. Pass "
            "output= and their_output=, functions that bring both into one form."
        )
    pairing = Pairing(values, reference, pairs, names)
    named = pairing.named
    judged, exact = (values, named(float64)) if is_theirs else (named(reference), float64)
    noise = noise_of([named(each) for each in noisy] if is_theirs else noisy, exact)
    tolerances, kinds = rounding_tolerances(precision), {**dict.fromkeys(MODULES, MEASURED), **JUDGED}
    findings = judge_steps(judged, exact, kinds, tolerances, noise)
    sides = (type(other.module).__name__, type(ours.module).__name__)
    _check_tells(findings, sides[0 if is_theirs else 1], precision)
    within = [each for each in findings if each.kind in MODULES and each.name != OUTPUT and "//" not in each.name]
    right = {each.which for each in findings if each.kind == "output" and each.good}
    within = [each for each in within if each.noise != math.inf and (each.good or not _ends(each, right))]
    notes, wrong = _in_float64(ours, exact, findings) if is_theirs and precision == "float32" else ({}, [])
    return Comparison(
        labels=("theirs", "mine"),
        facts=(other.backend.settings(), ours.backend.settings()),
        about={
            "model": " against ".join(reversed(sides)),
            "precision": precision,
            "truth": f"{sides[0 if is_theirs else 1]} in float64",
            **notes,
        },
        findings=[*(each for each in findings if each.kind not in MODULES or each.name == OUTPUT), *wrong],
        watched=within,
        bounds=JUDGED,
        their_names={name: theirs for name, theirs in pairing.modules.items() if name != theirs},
    )


def _in_float64(ours: Program, exact: Computed, findings: Sequence[Finding]) -> tuple[dict[str, str], list[Finding]]:
    """Compute ``ours`` in float64, too: return a note for the report, and the modules that are wrong there.

    exact: values of the other program in float64, by the names of ours; findings: in float32, whose bounds apply.
    """
    if not ours.backend.HAS_FLOAT64:
        return {}, []
    try:
        values = _exact(ours)
    except Exception as error:  # (an NPU, a custom kernel, a module that cannot be copied)
        return {"in float64": f"mine cannot compute: {str(error).partition(chr(10))[0]}"}, []
    errors = {name: relative_error(values[name], array) for name, array in exact.items() if name in values}
    note = f"the outputs are {errors[OUTPUT]:.1e} apart"
    if errors[OUTPUT] > SAME_FORMULA_ERROR:
        differing = [name for name in errors if errors[name] > SAME_FORMULA_ERROR]
        first = next(name for name in differing if name.startswith(("input/", "output/")))
        kind, _, module = first.partition("/")
        location = f"the input of {module.rpartition('/')[0]}" if kind == "input" else module.partition("#")[0]
        note += f", from {location or 'the network'} on: a constant such as eps, or a table in float32"
    outputs = {name: value for name, value in errors.items() if name.startswith("output/") and "#" not in name}
    bounds = {finding.name: finding.tolerance for finding in findings}
    wrong = []
    for name, value in outputs.items():
        of_inputs = [errors[each] for each in errors if each.startswith(f"input/{name[7:]}/")]
        of_parents = [outputs.get(f"output/{parent}", value) for parent in _parents(name[7:])]
        is_local = max(of_inputs, default=0.0) < REMAINING * value < min(of_parents, default=0.0)
        if value > bounds.get(name, math.inf) and is_local:
            wrong.append(Finding(name, value, bounds[name]))
    return {"in float64": note}, wrong


def _check_tells(findings: Sequence[Finding], side: str, precision: str) -> None:
    """Raise ConfigError if the reference is not finite, or float32 moves its output by its own size: all would pass."""
    moved = {OUTPUT} if precision == "float32" else set()  # (bfloat16 may well, in a sine of large angles)
    judged = [each for each in findings if each.kind not in MODULES or each.name == OUTPUT]
    if any(each.noise == math.inf or (each.name in moved and each.tolerance >= 1) for each in judged):
        lost = [replace(each, error=math.inf) for each in findings if each.tolerance >= 1]
        raise ConfigError(
            f"{side} computes values that are not finite, or nothing but rounding, which proves nothing "
            f"({describe_first_wrong(lost)}). Use inputs and weights of ordinary magnitude."
        )


def _ends(finding: Finding, right: Collection[str]) -> bool:
    """Return whether a difference in the forward pass ends within a module whose output is right: a matter of taste."""
    module = finding.which.partition("/")[0].partition("#")[0]
    return finding.kind in ("input", "output") and any(name in right for name in _parents(module))


def _parents(module: str) -> list[str]:
    """Return the modules that contain this one."""
    return [module[:index] for index, letter in enumerate(module) if letter == "."] + [""] * bool(module)


def _float64_and_noisy(program: Program, precision: str) -> list[Computed]:
    """Return the values of a program in float64; then in float32, and DRAWS times with every number perturbed.

    Operators of float32 may be less exact than their roundings, such as an exponential within attention.
    """
    if not program.backend.HAS_FLOAT64:
        return [program.measure(), *(_moved(program, precision, draw) for draw in range(DRAWS))]
    single = replace(program, module=copy.deepcopy(program.module).float())
    return [_exact(program), single.measure(), *(_moved(single, precision, draw) for draw in range(DRAWS))]


def _exact(program: Program) -> Computed:
    """Return what a copy of a program computes in float64."""
    with program.backend.float64_arithmetic():
        return replace(program, module=copy.deepcopy(program.module).double()).measure(True)


def _moved(program: Program, precision: str, draw: int) -> Computed:
    size, backend = ROUNDINGS * UNITS[precision], program.backend
    weights = perturbed_weights(program.module, lambda name: size, draw)
    with backend.restored(program.module, whole=False), weights, backend.RoundingNoise(program.module, size, draw):
        return program.measure()


def _tensor_in(module: Any) -> Callable[[Any], Any]:
    """Return the function that selects the first tensor of the output of ``module``."""
    return lambda output: functions_for(module).tensors(output)[0][1]


def _precision(program: Program) -> str:
    kinds = {str(p.dtype).rpartition(".")[2].lower() for p in program.backend.parameters(program.module).values()}
    return "bfloat16" if kinds & {"bfloat16", "float16"} else "float32"
