"""Prove that two programs are the same network: outputs, a loss, every gradient, module by module.

The truth is one of them in float64. How far rounding may move a quantity is measured there, with every number moved at
random by ROUNDINGS roundings; and if both are on PyTorch, by that program in its own precision too. The other program's
arithmetic plays no part, so an error in it cannot widen its own bound.

What is as small as rounding, such as another eps, shows where both compute in float64: there one formula written twice
agrees to ONE_FORMULA. A module that is past its bound there, though its inputs are right, is wrong if the output of the
network has its difference, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.parameters import Shape
from mindspeed_mm_dit.data.draws import philox
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.verify.compare import Comparison
from mindspeed_mm_dit.tools.verify.examples import nudged
from mindspeed_mm_dit.tools.verify.first_wrong_module import Watch, first_wrong, functions_for, moved_weights
from mindspeed_mm_dit.tools.verify.layouts import UNITS
from mindspeed_mm_dit.tools.verify.pairs import Names, Pair, Pairing, parameters_paired
from mindspeed_mm_dit.tools.verify.prove import DRAWS, ROUNDINGS, asked_of
from mindspeed_mm_dit.tools.verify.table import MODULES, Bound, Computed, Finding, judge_steps, noise_of, relative_error

SEED = 1234
OUTPUT = "output/"
"""Name of what the whole network gives."""
MEASURED = Bound(
    f"Measured on the program that is the truth: twice the largest error of {DRAWS} passes in which the weights, and "
    "the results and gradients of every module (on PyTorch, of every function, too), were moved at random by up to "
    f"{ROUNDINGS} roundings, and of one without that; at least twice {ROUNDINGS} roundings."
)
JUDGED = {"output": MEASURED, "loss": MEASURED, "gradient": MEASURED}
ONE_FORMULA = 1e-10
"""Two programs of one formula differ by less in float64."""
LEFT = 1e-3
"""If less of a module's difference is left in what is around it, the difference ends there."""


@dataclass(frozen=True)
class Program:
    """A module, and how it is asked."""

    module: Any
    inputs: Any
    """What it is called with: a mapping by keyword, a sequence, or one array."""
    output: Callable[[Any], Any]
    """Returns of what it gives the tensor that is compared."""
    loss: Callable[[Any], Any] | None = None

    @property
    def room(self) -> Any:
        """The functions for its framework."""
        return functions_for(self.module)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Its parameters, by name."""
        return {name: self.room.host(p) for name, p in self.room.parameters(self.module).items()}

    def measure(self, exact: bool = False) -> Computed:
        """Return all that is compared of a forward and backward pass; exact: with inputs in float64."""
        given, watch = self.room.placed(self.inputs, self.module, exact), Watch(self.module)
        output, loss, gradients = self.room.gradients(self.module, lambda: self._ask(given), self._loss)
        found = watch.end()
        found |= {f"gradient/{name}": gradient for name, gradient in gradients.items()}
        return found | {OUTPUT: self.room.host(self.output(output)), "loss/1": self.room.host(loss).reshape(-1)}

    def _ask(self, given: Any) -> Any:
        if isinstance(given, Mapping):
            return self.module(**given)
        return self.module(*given) if isinstance(given, (list, tuple)) else self.module(given)

    def _loss(self, found: Any) -> Any:
        output = self.output(found)
        if self.loss is not None:
            return self.loss(output)
        target = philox((SEED, 0)).standard_normal(tuple(output.shape), np.float32)
        return (output * self.room.like(target, output)).mean()


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
    own = Program(mine, inputs, first, loss)
    other = Program(theirs, inputs if their_inputs is None else their_inputs, their_output or _tensor_in(theirs), loss)
    if precision not in (None, *UNITS):
        raise ConfigError(f"precision = {precision!r}", f"must be one of {', '.join(UNITS)}")
    names, weights = names or {}, other.parameters
    shapes, their_shapes = ({name: array.shape for name, array in found.items()} for found in (own.parameters, weights))
    pairs = parameters_paired(shapes, their_shapes, names)
    with own.room.restored_afterwards(mine), other.room.restored_afterwards(theirs):
        shared = {name for pair in pairs for name in pair.theirs}  # (a table that mine computes stays as it is)
        weights = {name: nudged(name, array, SEED) if name in shared else array for name, array in weights.items()}
        other.room.load(theirs, weights)
        own.room.load(mine, {pair.mine: pair.join(weights) for pair in pairs})
        return _compared(own, other, pairs, names, precision or _precision(own))


def _compared(own: Program, other: Program, pairs: list[Pair], names: Names, precision: str) -> Comparison:
    """Measure both, and one of them in float64 and with rounding; ``theirs`` is that one if it is on PyTorch."""
    found, is_theirs = own.measure(), own.room is other.room or other.room.HAS_FLOAT64
    truth, *noisy = _truth(other if is_theirs else own, precision)
    reference = truth if is_theirs else other.measure()
    _check_form(found[OUTPUT].shape, reference[OUTPUT].shape)
    pairing = Pairing(found, reference, pairs, names)
    named = pairing.named
    judged, exact = (found, named(truth)) if is_theirs else (named(reference), truth)
    noise = noise_of([named(each) for each in noisy] if is_theirs else noisy, exact)
    asked, kinds = asked_of(precision), {**dict.fromkeys(MODULES, MEASURED), **JUDGED}
    findings = judge_steps(judged, exact, kinds, asked, noise)
    sides = (type(other.module).__name__, type(own.module).__name__)
    _check_tells(findings, sides[0 if is_theirs else 1], precision)
    within = [each for each in findings if each.kind in MODULES and each.name != OUTPUT and "//" not in each.name]
    right = {each.which for each in findings if each.kind == "output" and each.good}
    within = [each for each in within if each.noise != math.inf and (each.good or not _ends(each, right))]
    told, wrong = _in_float64(own, exact, findings) if is_theirs and precision == "float32" else ({}, [])
    return Comparison(
        labels=("theirs", "mine"), facts=(other.room.settings(), own.room.settings()),
        about={"model": " against ".join(reversed(sides)), "precision": precision,
               "truth": f"{sides[0 if is_theirs else 1]} in float64", **told},
        findings=[*(each for each in findings if each.kind not in MODULES or each.name == OUTPUT), *wrong],
        watched=within, bounds=JUDGED,
        their_names={name: theirs for name, theirs in pairing.modules.items() if name != theirs},
    )  # fmt: skip


def _in_float64(own: Program, truth: Computed, findings: Sequence[Finding]) -> tuple[dict[str, str], list[Finding]]:
    """Compute ``own`` in float64, too: return what is said of it, and the modules that are wrong there.

    truth: of the other program, by names of own; findings: of float32, whose bounds hold for modules here as well.
    """
    if not own.room.HAS_FLOAT64:
        return {}, []
    try:
        found = _exact(own)
    except Exception as error:  # (an NPU, a kernel of its own, what cannot be copied)
        return {"in float64": f"mine cannot compute: {str(error).partition(chr(10))[0]}"}, []
    off = {name: relative_error(found[name], array) for name, array in truth.items() if name in found}
    said = f"the outputs are {off[OUTPUT]:.1e} apart"
    if off[OUTPUT] > ONE_FORMULA:
        first = next(name for name, far in off.items() if far > ONE_FORMULA and name.startswith(("input/", "output/")))
        kind, _, module = first.partition("/")
        place = f"the input of {module.rpartition('/')[0]}" if kind == "input" else module.partition("#")[0]
        said += f", from {place or 'the network'} on: a constant such as eps, or a table in float32"
    outputs = {name: far for name, far in off.items() if name.startswith("output/") and "#" not in name}
    bounds = {finding.name: finding.tolerance for finding in findings}
    wrong = []
    for name, far in outputs.items():
        fed = [off[each] for each in off if each.startswith(f"input/{name[7:]}/")]
        around = [outputs.get(f"output/{above}", far) for above in _around(name[7:])]
        if far > bounds.get(name, math.inf) and max(fed, default=0.0) < LEFT * far < min(around, default=0.0):
            wrong.append(Finding(name, far, bounds[name]))
    return {"in float64": said}, wrong


def _check_form(mine: Shape, theirs: Shape) -> None:
    if mine != theirs:
        raise ConfigError("output", f"mine gives {mine}, theirs {theirs}",
                          "output= and their_output= are functions that bring both into one form")  # fmt: skip


def _check_tells(findings: Sequence[Finding], said: str, precision: str) -> None:
    """Raise ConfigError if the truth is not finite, or float32 moves its output by its own size: all would pass."""
    moved = {OUTPUT} if precision == "float32" else set()  # (bfloat16 may well, in a sine of large angles)
    judged = [each for each in findings if each.kind not in MODULES or each.name == OUTPUT]
    if any(each.noise == math.inf or (each.name in moved and each.tolerance >= 1) for each in judged):
        lost = [replace(each, error=math.inf) for each in findings if each.tolerance >= 1]
        raise ConfigError(said, f"gives what is not finite, or rounding alone, and proves nothing; {first_wrong(lost)}",
                          "give inputs and weights of usual sizes")  # fmt: skip


def _ends(finding: Finding, right: Collection[str]) -> bool:
    """Return whether a difference in the forward pass ends within a module whose output is right: a matter of taste."""
    module = finding.which.partition("/")[0].partition("#")[0]
    return finding.kind in ("input", "output") and any(name in right for name in _around(module))


def _around(module: str) -> list[str]:
    """Return the modules that hold this one."""
    return [module[:place] for place, letter in enumerate(module) if letter == "."] + [""] * bool(module)


def _truth(program: Program, precision: str) -> list[Computed]:
    """Return what a program computes in float64; then in float32, and DRAWS times in float32 with every number moved.

    Operators of float32 may be less exact than their roundings, such as an exponential within attention.
    """
    if not program.room.HAS_FLOAT64:
        return [program.measure(), *(_moved(program, precision, draw) for draw in range(DRAWS))]
    single = replace(program, module=copy.deepcopy(program.module).float())
    return [_exact(program), single.measure(), *(_moved(single, precision, draw) for draw in range(DRAWS))]


def _exact(program: Program) -> Computed:
    """Return what a copy of a program computes in float64."""
    with program.room.exactly():
        return replace(program, module=copy.deepcopy(program.module).double()).measure(True)


def _moved(program: Program, precision: str, draw: int) -> Computed:
    size, room = ROUNDINGS * UNITS[precision], program.room
    weights = moved_weights(program.module, lambda name: size, draw)
    with room.restored_afterwards(program.module, whole=False), weights, room.Roundings(program.module, size, draw):
        return program.measure()


def _tensor_in(module: Any) -> Callable[[Any], Any]:
    """Return the function that takes the first tensor of what ``module`` gives."""
    return lambda output: functions_for(module).tensors(output)[0][1]


def _precision(program: Program) -> str:
    kinds = {str(p.dtype).rpartition(".")[2].lower() for p in program.room.parameters(program.module).values()}
    return "bfloat16" if kinds & {"bfloat16", "float16"} else "float32"
