"""Fine-tuning: which weights of a model are trained, and which layers have adapters (LoRA).

A pattern names modules of the predictor, in MindSpeed-MM's syntax: ``to_q`` and ``attn1.to_q`` match every module whose
name ends with it, ``blocks.{*}.attn1.to_q`` has any text in place of the braces, ``blocks.{0-3,7}`` is blocks 0 to 3
and 7. The prefix ``predictor.`` is optional. "attention", "mlp" and "all" are sets of layers of any network.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.fsdp2 import numbers_in
from mindspeed_mm_dit.configs.limits import MOST_LAYERS, check_between
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.parameters import ZEROS, Parameter, Parameters, Shape
from mindspeed_mm_dit.errors import ConfigError, UserError, nearest

DOWN, UP = "lora_A", "lora_B"
"""Names of the two layers of an adapter, inside the layer that it adapts."""
TARGETS, FREEZE = "--lora-target-modules", "--freeze"
LARGEST_RANK = 4096
SETS = {"attention": "attn|attention", "mlp": r"(^|_)(mlp|ffn?|feed_forward)(_|$)", "all": ""}
"""Sets of the layers in a network's blocks, by what the first part of their names inside a block has."""
_PREFIX = "predictor."
_WEIGHT = ".weight"


class LoraSpec(NamedTuple):
    """The adapter of one layer."""

    rank: int
    scale: float
    """Factor of its output: alpha / rank."""


@dataclass(frozen=True)
class Tuning:
    """Which part of a model is trained: everything that is not frozen, or only adapters."""

    targets: tuple[str, ...] = ()
    """Patterns of the layers that have an adapter; if there are any, everything else is frozen."""
    rank: int = 8
    """Width r of an adapter: A is (r, in), B (out, r)."""
    alpha: float = 16
    """An adapter adds (alpha / r) B A to the weight."""
    freeze: tuple[str, ...] = ()
    """Patterns of the modules, or single parameters, that are not trained."""

    def __post_init__(self) -> None:
        check_between("--lora-r", self.rank, 1, LARGEST_RANK)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"--lora-alpha = {self.alpha}", "must be a positive number", "write 16")

    @property
    def beside(self) -> LoraSpec:
        """The adapter of every adapted layer."""
        return LoraSpec(self.rank, self.alpha / self.rank)

    def spelled_out(self, parameters: Parameters) -> Tuning:
        """Return this tuning with patterns in place of the names of SETS; raises ConfigError for one without layers."""

        def spelled(flag: str, given: Sequence[str]) -> tuple[str, ...]:
            found = [_members(flag, own, parameters) if own in SETS else [own] for own in given]
            return tuple(dict.fromkeys(pattern for some in found for pattern in some))

        return dataclasses.replace(self, targets=spelled(TARGETS, self.targets), freeze=spelled(FREEZE, self.freeze))

    def layers(self, parameters: Parameters) -> list[str]:
        """Return the names of the layers that have an adapter.

        Raises ConfigError for a pattern that matches none.
        """
        possible = [name.removesuffix(_WEIGHT) for name, p in parameters.items() if _can_have_adapter(name, p)]
        wanted = set().union(*(_named(TARGETS, pattern, possible, _named_by) for pattern in self.targets))
        return [name for name in possible if name in wanted]

    def applied(self, parameters: Parameters) -> Parameters:
        """Return ``parameters`` under this tuning, with frozen ones marked and adapters added.

        Raises ConfigError for a pattern that matches nothing, or if nothing is left to train.
        """
        if not (self.targets or self.freeze):
            return parameters
        layers, names = set(self.layers(parameters)), list(parameters)
        frozen = set(names) if self.targets else set()
        frozen = frozen.union(*(_named(FREEZE, pattern, names, _lies_in) for pattern in self.freeze))
        changed: dict[str, Parameter] = {}
        for name, p in parameters.items():
            changed[name] = dataclasses.replace(p, trained=False, saved=not self.targets) if name in frozen else p
            if (layer := name.removesuffix(_WEIGHT)) in layers and name.endswith(_WEIGHT):
                changed |= {f"{layer}.{part}": own for part, own in adapter_parameters(p.shape, self.rank).items()}
        if not any(p.trained for p in changed.values()):
            raise ConfigError(f"{FREEZE} = {' '.join(self.freeze)}", "leaves nothing to train", "freeze less")
        return Parameters(changed, parameters.blocks)


WHOLE = Tuning()
"""Train the whole model."""


def tuning_in(facts: Mapping[str, Any]) -> Tuning:
    """Return the tuning recorded in ``facts`` by :meth:`TunedModel.tuned_by`; if none is, train the whole model."""
    freeze = tuple(str(facts.get(FREEZE, "")).split())
    if TARGETS not in facts:
        return Tuning(freeze=freeze)
    return Tuning(tuple(facts[TARGETS]), int(facts["--lora-r"]), float(facts["--lora-alpha"]))


def is_tuning(facts: Mapping[str, Any]) -> bool:
    """Return whether ``facts`` record adapters as :func:`tuning_in` reads them."""
    try:
        return isinstance(facts.get(TARGETS), list) and bool(tuning_in(facts).targets)
    except (UserError, LookupError, TypeError, ValueError, OverflowError):
        return False


def without_lists(patterns: Iterable[str]) -> list[str]:
    """Return equivalent patterns with only {*} and ranges like {0-3} in braces: ``blocks.{0-3,7}`` becomes two."""
    found = []
    for pattern in patterns:
        match = re.search(r"\{([^{}]*,[^{}]*|\d+)\}", pattern)
        for part in match[1].replace(" ", "").split(",") if match else ():
            one = f"{{{part}}}" if "-" in part else part
            found += without_lists([pattern[: match.start()] + one + pattern[match.end() :]])  # type: ignore[union-attr]
        found += [] if match else [pattern]
    return found


def adapter_parameters(shape: Shape, rank: int) -> dict[str, Parameter]:
    """Return A (r, in) and B (out, r) of the adapter of a weight (out, in); B, and so the change, starts at zero."""
    out_features, in_features = shape
    return {
        f"{DOWN}{_WEIGHT}": Parameter((rank, in_features), _uniform, matrices=1),
        f"{UP}{_WEIGHT}": Parameter((out_features, rank), ZEROS, matrices=1),
    }


def _uniform(draw: np.random.Generator, shape: Shape) -> np.ndarray:
    """Draw A as peft does: uniform up to 1 / sqrt(in) (He et al. 2015, with a slope of sqrt(5))."""
    return (draw.random(shape, np.float32) * 2 - 1) * np.float32(shape[1] ** -0.5)


@dataclass(frozen=True)
class TunedModel(ModelConfig):
    """A model.json and its tuning. (The tuning is not a key of the file; it comes from flags.)"""

    tuning: Tuning = WHOLE

    @classmethod
    def of(cls, model: ModelConfig, tuning: Tuning) -> TunedModel:
        """Return ``model`` with ``tuning``."""
        return cls(
            **{field.name: getattr(model, field.name) for field in dataclasses.fields(ModelConfig)}, tuning=tuning
        )

    def tuned_by(self) -> dict[str, Any]:
        tuning = self.tuning
        if not tuning.targets:
            return {FREEZE: " ".join(tuning.freeze)}
        return {TARGETS: list(tuning.targets), "--lora-r": tuning.rank, "--lora-alpha": tuning.alpha}


def _members(flag: str, name: str, parameters: Parameters) -> list[str]:
    """Return a pattern for each layer of a set, which takes it in every block; what is frozen is a whole part."""
    linear = [own.removesuffix(_WEIGHT) for own, p in parameters.items() if _can_have_adapter(own, p)]
    found = []
    for layer in linear if flag == TARGETS else parameters:
        block = parameters.block_of(layer)
        inside = layer.removeprefix(f"{block}.")
        part = inside.partition(".")[0]
        if block and re.search(SETS[name], part):
            found.append(f"{block.rpartition('.')[0]}.{{*}}.{inside if flag == TARGETS else part}")
    if not found:
        reason = "names no linear layer in a block of this model"
        raise ConfigError(f"{flag} = {name}", reason, _there_are(_ends(linear)))
    return list(dict.fromkeys(found))


def _can_have_adapter(name: str, p: Parameter) -> bool:
    return name.endswith(_WEIGHT) and len(p.shape) == 2 and p.matrices > 0


def _named(flag: str, pattern: str, names: Iterable[str], fits: Callable[[re.Pattern[str], str], bool]) -> set[str]:
    expression, names = _expression(flag, pattern), list(names)
    found = {name for name in names if fits(expression, name)}
    if not found:
        what = "linear layer" if flag == TARGETS else "module"
        names = names if flag == TARGETS else [name.rpartition(".")[0] or name for name in names]
        ends = _ends(names)
        cure = nearest(pattern, [*ends, *names]) + _there_are(ends)
        raise ConfigError(f"{flag} = {pattern}", f"names no {what} of this model", cure)
    return found


def _ends(names: Iterable[str]) -> list[str]:
    """Return the names inside blocks, each once, and others whole."""
    return list(dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", name) for name in names))


def _there_are(ends: Sequence[str]) -> str:
    return f"There are: {', '.join(ends[:16])}{', ...' if len(ends) > 16 else ''}"


def _expression(flag: str, pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a pattern; it is matched from any part of a module's name to the name's end."""
    first, *others = (_chunk(chunk, f"{flag} = {pattern}") for chunk in pattern.removeprefix(_PREFIX).split("{*}"))
    if not others:
        return re.compile(first)
    *middle, last = others
    # Each chunk is taken where it comes first, for good, as fnmatch does: else {*} many times would take for ever.
    found = [f"(?=(?P<at{number}>.*?{chunk}))(?P=at{number})" for number, chunk in enumerate(filter(None, middle))]
    return re.compile("".join([first, *found, f".*{last}"]))


def _chunk(text: str, where: str) -> str:
    """Return the regular expression for a part of a pattern without {*}."""
    parts = re.split(r"\{([^{}]*)\}", text)
    return "".join(re.escape(part) if number % 2 == 0 else _numbers(part, where) for number, part in enumerate(parts))


def _numbers(inner: str, where: str) -> str:
    return f"(?:{'|'.join(map(str, numbers_in(inner, where, MOST_LAYERS)))})"


def names(pattern: str, layer: str) -> bool:
    """Return whether a pattern of the adapted layers names ``layer``; raises ConfigError for one that is none."""
    return _named_by(_expression(TARGETS, pattern), layer)


def _named_by(expression: re.Pattern[str], name: str) -> bool:
    """Return whether ``name``, or its end from one of its parts on, matches the pattern."""
    starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
    return any(expression.fullmatch(name, start) for start in starts)


def _lies_in(expression: re.Pattern[str], name: str) -> bool:
    """Return whether the pattern matches the parameter ``name`` or a module that contains it.

    The last part of a name alone, "weight", would be parameters all over the network.
    """
    ends = [match.start() for match in re.finditer(r"\.", name)]
    is_last = "." in name and expression.fullmatch(name.rpartition(".")[2])
    return any(_named_by(expression, name[:end]) for end in ends) or (not is_last and _named_by(expression, name))
