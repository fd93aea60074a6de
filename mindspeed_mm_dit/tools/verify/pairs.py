"""Which parameter and which module of one program is which of another."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.predictor import Shape
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.tools.verify.table import MODULES, Computed, relative_error

Names = Mapping[str, "str | Sequence[str] | None"]
"""Parameter or module of mine -> theirs; several of theirs are stacked in mine. None: a name of either program that has
no counterpart. ``*`` is any part of a name, the same on both sides."""
Shapes = Mapping[str, Shape]
BY_PARAMETER = ("gradient/", "step/", "average/", "start/step/", "start/average/", "moved/")
"""Prefixes of names that end in the name of a parameter."""
MAX_LISTED = 12
"""Pairs that an error lists."""


class Pair(NamedTuple):
    """A parameter of mine, and those of theirs that are stacked in it."""

    mine: str
    theirs: tuple[str, ...]

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the values of mine from those of theirs; None if one is missing."""
        parts = [arrays[name] for name in self.theirs if name in arrays]
        return None if len(parts) < len(self.theirs) else parts[0] if len(parts) == 1 else np.concatenate(parts)


def counterparts(name: str, names: Names) -> tuple[str, ...] | None:
    """Return the names of theirs for a parameter or module of mine; None: left out."""
    for rule, value in sorted(names.items(), key=lambda item: -len(item[0])):
        if match := _pattern(rule).fullmatch(name):
            *parts, rest = match.groups()
            listed = [value] if isinstance(value, str) else value
            filled = None if listed is None else [_filled(each, parts) for each in listed]
            return None if filled is None else tuple(f"{each}.{rest or ''}".strip(".") for each in filled)
    return (name,)


def _pattern(rule: str) -> re.Pattern[str]:
    """Return the pattern of a rule's names; its groups are the parts that ``*`` stands for, and what follows."""
    begin = re.escape(rule).replace(r"\*", "([^.]+)")
    return re.compile(rf"{begin}(?:\.(.+))?" if rule else "(.+)?")


def _filled(name: str, parts: Iterable[str]) -> str:
    for part in parts:
        name = name.replace("*", part, 1)
    return name


def parameters_paired(mine: Shapes, theirs: Shapes, names: Names) -> list[Pair]:
    """Pair the parameters; raises ConfigError with all that do not fit, or with a name that matches nothing."""
    for rule, value in names.items():
        parts = [value] if isinstance(value, str) else [""] if value is None else value
        are_names = isinstance(parts, (list, tuple)) and parts and all(isinstance(part, str) for part in parts)
        if not isinstance(rule, str) or not are_names:
            raise ConfigError(
                f"names has {rule!r} = {shorten_repr(value)}, which must be a name, a list of names, or null."
            )
    alone = [_pattern(rule) for rule, value in names.items() if value is None]
    for rule, value in names.items():
        sides, suffix = ([*mine, *theirs], " or theirs") if value is None else (mine, "")
        if not any(map(_pattern(rule).fullmatch, sides)):
            raise ConfigError(f"names has {rule!r}, which is no parameter of mine{suffix}. {nearest(rule, sides)}")
    partners = {name: counterparts(name, names) for name in mine}
    pairs = [Pair(name, others) for name, others in partners.items() if others is not None]
    wrong = [line for pair in pairs if (line := _pairing_error(pair, mine, theirs))]
    known = {name for pair in pairs for name in pair.theirs}
    known |= {name for name in theirs if any(rule.fullmatch(name) for rule in alone)}
    wrong += [f"nothing of mine is theirs {name} {theirs[name]}" for name in theirs if name not in known]
    if wrong:
        more = [f"and {len(wrong) - MAX_LISTED} more"] if len(wrong) > MAX_LISTED else []
        lines = "\n      ".join(["", *wrong[:MAX_LISTED], *more])
        raise ConfigError(
            f"{len(wrong)} parameters have no partner. Build both alike, with as many blocks, and say which is which: "
            'names={"blocks.*.attn.qkv": ("layers.*.q", "layers.*.k", "layers.*.v")}, with None for one that the other '
            f"side lacks. The parameters are:{lines}"
        )
    return pairs


def _pairing_error(pair: Pair, mine: Shapes, theirs: Shapes) -> str:
    for name in pair.theirs:
        if name not in theirs:
            return f"mine {pair.mine} {mine[pair.mine]}: theirs has no {name}"
    shapes = [theirs[name] for name in pair.theirs]
    stacked = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(shapes) > 1 and all(shapes) else shapes[0]
    return (
        "" if stacked == mine[pair.mine] else f"mine {pair.mine} {mine[pair.mine]}: theirs {pair.theirs[0]} {stacked}"
    )


def modules_paired(mine: Collection[str], theirs: Collection[str], pairs: Sequence[Pair], names: Names) -> dict:
    """Return module of mine -> theirs: by ``names``, or because both have the same parameters, or by their parents."""
    of_mine = _owners(mine, {pair.mine: pair.theirs for pair in pairs})
    of_theirs: dict[frozenset[str], list[str]] = {}
    for module, owned in _owners(theirs, {name: (name,) for pair in pairs for name in pair.theirs}).items():
        of_theirs.setdefault(owned, []).append(module)
    paired = {"": ""}
    for module in sorted(mine, key=lambda name: name.count(".")):
        named, alike = counterparts(module, names) or (), of_theirs.get(of_mine.get(module, frozenset()), [])
        parent, _, leaf = module.rpartition(".")
        child = f"{paired[parent]}.{leaf}".strip(".") if parent in paired else ""
        options = [*(named if len(named) == 1 else ()), *alike, child]
        used = set(paired.values())
        if module and (free := [name for name in options if name in theirs and name and name not in used]):
            paired[module] = free[0]
    return paired


def _owners(modules: Collection[str], known: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    """Return the parameters of each module that has any, by names that both programs share."""
    owners: dict[str, set[str]] = {}
    for name, shared in known.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            owners.setdefault(".".join(parts[:depth]), set()).update(shared)
    return {module: frozenset(owned) for module, owned in owners.items() if module in modules}


def values_paired(mine: Computed, theirs: Computed, modules: Mapping[str, str]) -> dict[str, str]:
    """Return name of a watched value of mine -> theirs, in their order: of the same module and shape, the closest one.

    Programs pass a module's tensors in different order and by different keywords. Values of another shape are skipped,
    but not a gradient that never reached or left a module of mine.
    """
    by_module: dict[str, list[str]] = {}
    for name in theirs:
        kind, _, rest = name.partition("/")
        by_module.setdefault(f"{kind}/{_module(rest)}", []).append(name)
    paired = {}
    for name, values in mine.items():
        kind, _, rest = name.partition("/")
        module = _module(rest)
        if kind in MODULES and module in modules:
            candidates = by_module.get(f"{kind}/{modules[module]}", [])
            if alike := [each for each in candidates if theirs[each].shape == values.shape]:
                paired[name] = min(alike, key=lambda each: relative_error(values, theirs[each]))
    for module, other in modules.items():
        gradients = [(f"{kind}/{module}", f"{kind}/{other}") for kind in ("given", "back")]
        paired |= {name: there for name, there in gradients if name not in mine and there in theirs}
    order = {name: index for index, name in enumerate(theirs)}
    return dict(sorted(paired.items(), key=lambda item: order[item[1]]))


def _module(rest: str) -> str:
    return rest.partition("/")[0].partition("#")[0]


class Pairing:
    """Which values of two programs are the same quantity; ``mine`` and ``theirs``: what both computed."""

    def __init__(self, mine: Computed, theirs: Computed, pairs: Sequence[Pair], names: Names) -> None:
        self.modules = modules_paired(_module_names(mine), _module_names(theirs), pairs, names)
        self._pairs, self._watched = pairs, values_paired(mine, theirs, self.modules)
        whole = ("loss/", "gradient norm/", *(() if "" in names.values() else ("output//",)))
        self._whole = [name for name in mine if name in theirs and f"{name}/".startswith(whole)]

    def named(self, values: Computed) -> dict[str, np.ndarray]:
        """Return values of theirs by the names of mine; a module's by its number or keyword there."""
        renamed = {mine: values[theirs] for mine, theirs in self._watched.items() if theirs in values}
        renamed |= {name: values[name] for name in self._whole if name in values}
        for kind in BY_PARAMETER:
            by_parameter = {name[len(kind) :]: array for name, array in values.items() if name.startswith(kind)}
            joined = {f"{kind}{pair.mine}": pair.join(by_parameter) for pair in self._pairs} if by_parameter else {}
            renamed |= {name: array for name, array in joined.items() if array is not None}
        return renamed


def _module_names(computed: Computed) -> list[str]:
    return [name[7:] for name in computed if name.startswith("output/") and "#" not in name]
