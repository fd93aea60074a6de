"""Layouts of a training step, and the verdict on each: compare it with a float64 reference, within measured bounds.

A layout is *how* a step is computed. Its ``what`` flags change the mathematics, and with it the reference, which is the
step on one rank in float64. How far rounding may move each quantity is measured there too: in the same step, the
weights, the outputs of every module, and every gradient are perturbed at random by ROUNDINGS roundings of the precision
in question. The arithmetic of the layout plays no part, so an error in it cannot widen its bound.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.tools.verify.module_recorder import AFTER_BACKWARD, describe_first_wrong
from mindspeed_mm_dit.tools.verify.processes import Arrays, StepResult
from mindspeed_mm_dit.tools.verify.table import (
    MODULES,
    STEPS,
    Bound,
    Computed,
    Finding,
    Tolerances,
    judge_steps,
    noise_of,
    worst,
)

UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Unit roundoff of each precision: the largest relative error of one rounding."""
RECOMPUTED = "recompute_modules"
WATCHED_BY = {"mindspore": ("--pynative",)}
"""Flags needed to watch modules, by framework: a compiled graph does not call modules."""


@dataclass(frozen=True)
class Layout:
    """How a step is spread over ranks, memory and precision."""

    name: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    """Flags of pretrain_dit.py that change how the step is computed."""
    what: tuple[str, ...] = ()
    """Flags that change what is computed: optimizer, clipping."""
    micro_batches: int = 1
    """Micro-batches of a step on each rank."""
    context_parallel: int = 1
    """Size of the context-parallel group, whose ranks split the tokens of a sample."""
    sharding: Mapping[str, Any] | None = None
    """Keys of fsdp2.yaml that differ from the user's; None: the weights are replicated."""
    precision: str = "float32"
    framework: str = "pytorch"
    host: str = "standalone"
    """Host of the step, a value of ``--host``."""
    cpu_reference: bool = False
    """Whether its reference is computed on the host's CPU, not on the accelerator; skipped if there is none."""

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks}, {self.label}"

    @property
    def label(self) -> str:
        """The name, with the framework if that is not PyTorch."""
        return self.name if self.framework == "pytorch" else f"{self.name} ({self.framework})"

    @property
    def reference_key(self) -> tuple[bool, tuple[str, ...]]:
        """Key of the float64 reference: layouts with the same key are compared with the same one."""
        return self.cpu_reference, self.what

    @property
    def stem(self) -> str:
        """Stem of the layout's file names, which ``--layouts`` also matches."""
        return f"{self.framework}-{self.ranks}-{self.name}".replace(" ", "-").replace("/", "-")


_CLIPPED, _UNCLIPPED = ("--clip-grad", "0.001"), ("--clip-grad", "0")
_MUON = ("--optimizer", "muon")
_LORA = ("--lora-target-modules", "{*}", "--lora-r", "2", "--lora-alpha", "1")
_SHARDED: Mapping[str, Any] = {"sharding_size": "auto"}
_HYBRID: Mapping[str, Any] = {"sharding_size": 2}
_RECOMPUTED: Mapping[str, Any] = {RECOMPUTED: True, "use_reentrant": False}
_BF16: Mapping[str, Any] = {"param_dtype": "bf16", "reduce_dtype": "fp32", "cast_forward_inputs": False}
_ULYSSES = ("--context-parallel-size", "2")

LAYOUTS: tuple[Layout, ...] = (
    Layout("whole batch"),
    Layout("device", cpu_reference=True),
    Layout("micro-batches", micro_batches=4),
    Layout("recompute", sharding={**_SHARDED, **_RECOMPUTED}, micro_batches=2),
    Layout("torch.compile", flags=("--torch-compile",)),
    Layout("autocast", flags=("--bf16",), precision="bfloat16"),
    Layout("clipping active", what=_CLIPPED, micro_batches=2),
    Layout("no clipping", what=_UNCLIPPED),
    Layout("Muon", what=_MUON),
    Layout("LoRA", what=_LORA, micro_batches=2),
    Layout("replicated", 2),
    Layout("replicated, micro-batches", 2, micro_batches=2),
    Layout("replicated, autocast", 2, ("--bf16",), precision="bfloat16"),
    Layout("replicated, clipping active", 2, what=_CLIPPED, micro_batches=2),
    Layout("FSDP2", 2, sharding=_SHARDED),
    Layout("FSDP2, micro-batches, recompute", 2, sharding={**_SHARDED, **_RECOMPUTED}, micro_batches=2),
    Layout("FSDP2, bf16", 2, sharding={**_SHARDED, **_BF16}, precision="bfloat16"),
    Layout("FSDP2, clipping active", 2, what=_CLIPPED, sharding=_SHARDED, micro_batches=2),
    Layout("FSDP2, Muon", 2, what=_MUON, sharding=_SHARDED),
    Layout("FSDP2, LoRA", 2, what=_LORA, sharding=_SHARDED),
    Layout("FSDP2, torch.compile", 2, ("--torch-compile",), sharding=_SHARDED),
    Layout("Ulysses", 2, _ULYSSES, context_parallel=2),
    Layout("replicated", 4),
    Layout("FSDP2", 4, sharding=_SHARDED, micro_batches=2),
    Layout("hybrid", 4, sharding=_HYBRID, micro_batches=2),
    Layout("hybrid, Ulysses", 4, _ULYSSES, context_parallel=2, sharding=_HYBRID),
    Layout("MindSpeed-MM, old route", 2, sharding=_SHARDED, micro_batches=2, host="mindspeed-mm"),
    Layout("MindSpeed-MM, native engine", 2, sharding=_SHARDED, micro_batches=2, host="mindspeed-mm-native"),
    Layout("whole batch, graph", framework="mindspore"),
    Layout("micro-batches, pynative", flags=("--pynative",), micro_batches=2, framework="mindspore"),
    Layout("LoRA, graph", what=_LORA, framework="mindspore"),
    Layout("replicated, graph", 2, micro_batches=2, framework="mindspore"),
    Layout("FSDP2, clipping active, graph", 2, what=_CLIPPED, sharding=_SHARDED, framework="mindspore"),
)
"""All layouts, in the order in which they are verified."""


def chosen(patterns: Sequence[str], layouts: Sequence[Layout] = LAYOUTS) -> list[Layout]:
    """Return the layouts whose name or stem matches one of ``patterns`` (``*`` matches anything); without any, all.

    Raises ConfigError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(_matches(layout, pattern) for layout in layouts):
            names = list(dict.fromkeys(layout.name for layout in layouts))
            raise ConfigError(
                f"--layouts = {pattern} matches no layout. {nearest(pattern, names)}The layouts are {'; '.join(names)}."
            )
    return [layout for layout in layouts if not patterns or any(_matches(layout, pattern) for pattern in patterns)]


def _matches(layout: Layout, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (layout.name, layout.stem, str(layout)))


ROUNDINGS = 8
"""Perturbation of a number, in roundings: a sum of many terms is rounded once per partial sum."""
DRAWS = 3
"""Number of perturbed steps; the largest error counts."""
UNDECIDED_ROUNDINGS = 0.25
"""If rounding moves an entry of a gradient by this fraction of itself, its sign is uncertain. An optimizer that follows
the sign of single entries, as Adam does, may step either way, so such entries are left out when steps and averages are
compared."""

UNWATCHED = "only where modules are not watched: in a compiled graph, or not every time"
_LOCATIONS = {
    "step": "the optimizer: gradients are right, the weights after its step are not",
    "average": "the average: weights are right, their average is not",
    "loss": "after the first step, which is right",
}
"""Where an error after backward is, by kind of quantity."""

MEASURED = Bound(
    f"Measured: twice the largest error of {DRAWS} steps in float64 in which the weights, every module's output, and "
    f"every gradient were perturbed at random by up to {ROUNDINGS} roundings; at least twice {ROUNDINGS} roundings."
)


PROVED = dict.fromkeys(STEPS, MEASURED)
"""The quantities that are verified in a layout: the loss of every sample, the gradient norm, every gradient, and the
change of every weight and its EMA by the optimizer step."""


def rounding_tolerances(precision: str) -> Tolerances:
    """Return the tolerance that is always allowed."""
    return Tolerances(rounding=2 * ROUNDINGS * UNITS[precision])


def signs_are_certain(gradient: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return a mask of the entries of a gradient whose sign is certain (UNDECIDED_ROUNDINGS).

    ``moved``: how far rounding moved each entry.
    """
    usual = math.sqrt(float((moved.astype(np.float64) ** 2).mean()))
    return np.maximum(moved, usual) < UNDECIDED_ROUNDINGS * np.abs(gradient)


def quantities_of_result(result: StepResult, start: Arrays, counts: Arrays) -> Computed:
    """Return the quantities of ``result`` by their names in the table; weights and averages as changes from the start.

    ``start``: the initial weights of all layouts; ``counts``: for each parameter, a mask of the entries to compare.
    """
    quantities = dict(result.quantities)
    for kind, tree in (("step", "model"), ("average", "ema")):
        for name, counted in counts.items():
            there = result.arrays.get(f"{tree}/{name}", np.zeros(0))
            fits = there.shape == counted.shape
            quantities[f"{kind}/{name}"] = (there.astype(np.float64) - start[name])[counted] if fits else there
    return quantities


@dataclass(frozen=True)
class Reference64:
    """A step in float64, and the same step with rounding noise."""

    exact: StepResult
    rounded: Mapping[str, Sequence[StepResult]]
    """The perturbed steps by precision."""

    def judge(self, layout: Layout, result: StepResult) -> list[Finding]:
        """Judge every quantity of ``result``, in the order of the table; those without any certain entry come last."""
        names = [name[9:] for name in self.exact.arrays if name.startswith("gradient/")]
        counts = {name: self._decided(name, layout.precision) for name in names}
        ours, exact, *noisy = (
            quantities_of_result(each, self.exact.start, counts)
            for each in (result, self.exact, *self.rounded[layout.precision])
        )
        undecided = [Finding(name, 0.0, 1.0, 0.0, 0.0) for name, values in exact.items() if not values.size]
        tolerances = rounding_tolerances(layout.precision)
        return judge_steps(ours, exact, PROVED, tolerances, noise_of(noisy, exact)) + undecided

    def _decided(self, name: str, precision: str) -> np.ndarray:
        """Return a mask of the parameter's entries whose gradient rounding moves little (UNDECIDED_ROUNDINGS)."""
        exact, *noisy = (each.arrays[f"gradient/{name}"] for each in (self.exact, *self.rounded[precision]))
        return signs_are_certain(exact, np.max([np.abs(each - exact) for each in noisy], 0))

    def first_wrong(self, verdict: Verdict, result: StepResult) -> str:
        """Return in words where a layout departs from the reference; ``result``: its rerun, with modules watched."""
        layout, samples = verdict.layout, len(self.exact.losses[0])
        exact = {
            name: values
            for name, values in self.exact.watched.items()
            if name in result.watched and (len(values) == samples or values.shape == result.watched[name].shape)
        }  # (leaves out compiled modules, and tables of positions of which each rank has a part)
        noise = noise_of([each.watched for each in self.rounded[layout.precision]], exact)
        tolerances, bounds = rounding_tolerances(layout.precision), dict.fromkeys(MODULES, MEASURED)
        where = describe_first_wrong(judge_steps(result.watched, exact, bounds, tolerances, noise))
        if where == AFTER_BACKWARD and verdict.named in {f.name for f in self.judge(layout, result) if f.good}:
            return UNWATCHED
        return where


class CrashedLayout(str):
    """The last output of processes that ended before the layout's steps were done; no bound was applied."""


@dataclass(frozen=True)
class Verdict:
    """The result of one layout."""

    layout: Layout
    findings: Sequence[Finding] = ()
    reason: str = ""
    """Why it is not verified, if it is not."""
    where: str = ""
    """Where it departs from the reference, if it does."""
    result: StepResult | None = None

    @property
    def word(self) -> str:
        """PASS, FAIL or "not proved"."""
        if self.reason:
            return "FAIL" if isinstance(self.reason, CrashedLayout) else "not proved"
        return "FAIL" if self.wrong else "PASS" if self.conclusive else "not proved"

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings about one kind of quantity."""
        return [finding for finding in self.findings if finding.kind == kind]

    @cached_property
    def conclusive(self) -> list[Finding]:
        """The findings that show something; in the others, rounding is larger than the quantity."""
        return [finding for finding in self.findings if finding.is_conclusive]

    @cached_property
    def wrong(self) -> list[Finding]:
        """The findings past their bounds, in the order of the table."""
        return [finding for finding in self.findings if not finding.good]

    @property
    def named(self) -> str:
        """Name of the quantity furthest past its bound: a gradient; if those are right, a step, average or loss."""
        return worst_quantity(self.findings)

    @property
    def location(self) -> str:
        """Where it goes wrong, in words; empty if that was not searched."""
        return describe_location(self.where, self.named)


def worst_quantity(findings: Sequence[Finding]) -> str:
    """Return the quantity furthest past its bound: a gradient; if those are right, a step, average or loss; or ""."""
    for kind in ("gradient", "step", "average", "loss", "gradient norm"):
        if wrong := [finding for finding in findings if finding.kind == kind and not finding.good]:
            return worst(wrong).name
    return ""


def describe_location(where: str, name: str) -> str:
    """Return in words where a step goes wrong; after backward, that depends on the kind of the quantity ``name``."""
    return _LOCATIONS.get(name.partition("/")[0], where) if where == AFTER_BACKWARD else where
