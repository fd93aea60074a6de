"""Which parameter and which module of one program is which of another."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.parameters import Shape
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.wings.lab.table import MODULES, Computed, relative_error

Names = Mapping[str, "str | Sequence[str] | None"]
"""Parameter or module of mine -> theirs; several of theirs are stacked in mine; None: theirs has none. ``*`` is any
part of a name, the same on both sides."""
Shapes = Mapping[str, Shape]
MOST_SHOWN = 12
"""Pairs that an error lists."""


class Pair(NamedTuple):
    """A parameter of mine, and those of theirs that are stacked in it."""

    mine: str
    theirs: tuple[str, ...]

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return what theirs are in mine; None if one is not there."""
        parts = [arrays[name] for name in self.theirs if name in arrays]
        return None if len(parts) < len(self.theirs) else parts[0] if len(parts) == 1 else np.concatenate(parts)


def theirs_of(name: str, names: Names) -> tuple[str, ...] | None:
    """Return the names of theirs for a parameter or module of mine; None: left out."""
    for rule, found in sorted(names.items(), key=lambda item: -len(item[0])):
        pattern = re.escape(rule).replace(r"\*", r"([^.]+)")
        if match := re.fullmatch(rf"{pattern}(\..+)?", name):
            *parts, rest = match.groups()
            listed = [found] if isinstance(found, str) else found
            return None if listed is None else tuple(_filled(each, parts) + (rest or "") for each in listed)
    return (name,)


def _filled(name: str, parts: Iterable[str]) -> str:
    for part in parts:
        name = name.replace("*", part, 1)
    return name


def parameters_paired(mine: Shapes, theirs: Shapes, names: Names) -> list[Pair]:
    """Pair the parameters; raises ConfigError that lists all that do not fit, or a name that names nothing."""
    for rule in names:
        pattern = re.escape(rule).replace(r"\*", "[^.]+")
        if not any(re.match(rf"{pattern}(\.|$)", name) for name in mine):
            raise ConfigError(f"names: {rule!r}", "names no parameter of mine", nearest(rule, mine).strip())
    wanted = {name: theirs_of(name, names) for name in mine}
    pairs = [Pair(name, others) for name, others in wanted.items() if others is not None]
    wrong = [line for pair in pairs if (line := _misfit(pair, mine, theirs))]
    known = {name for pair in pairs for name in pair.theirs}
    wrong += [f"nothing of mine is theirs {name} {theirs[name]}" for name in theirs if name not in known]
    if wrong:
        more = [f"and {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else []
        lines = "\n      ".join(["", *wrong[:MOST_SHOWN], *more])
        raise ConfigError(
            "names", f"{len(wrong)} parameters find no partner:{lines}",
            'build both alike, with as many blocks, and say which is which: names={"blocks.*.attn.qkv": '
            '("layers.*.q", "layers.*.k", "layers.*.v")}',
        )  # fmt: skip
    return pairs


def _misfit(pair: Pair, mine: Shapes, theirs: Shapes) -> str:
    for name in pair.theirs:
        if name not in theirs:
            return f"mine {pair.mine} {mine[pair.mine]}: theirs has no {name}"
    shapes = [theirs[name] for name in pair.theirs]
    stacked = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
    return (
        "" if stacked == mine[pair.mine] else f"mine {pair.mine} {mine[pair.mine]}: theirs {pair.theirs[0]} {stacked}"
    )


def modules_paired(mine: Collection[str], theirs: Collection[str], pairs: Sequence[Pair], names: Names) -> dict:
    """Return module of mine -> theirs: by ``names``, or because both have the same parameters, or by their parents."""
    of_mine = _owners(mine, {pair.mine: pair.theirs for pair in pairs})
    of_theirs: dict[frozenset[str], list[str]] = {}
    for module, owned in _owners(theirs, {name: (name,) for pair in pairs for name in pair.theirs}).items():
        of_theirs.setdefault(owned, []).append(module)
    found = {"": ""}
    for module in sorted(mine, key=lambda name: name.count(".")):
        named, alike = theirs_of(module, names) or (), of_theirs.get(of_mine.get(module, frozenset()), [])
        parent, _, leaf = module.rpartition(".")
        child = f"{found[parent]}.{leaf}".strip(".") if parent in found else ""
        options = [*(named if len(named) == 1 else ()), *alike, child]
        taken = set(found.values())
        if module and (free := [name for name in options if name in theirs and name and name not in taken]):
            found[module] = free[0]
    return found


def _owners(modules: Collection[str], known: Mapping[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    """Return the parameters of each module that has any, by names that both programs share."""
    found: dict[str, set[str]] = {}
    for name, shared in known.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            found.setdefault(".".join(parts[:depth]), set()).update(shared)
    return {module: frozenset(owned) for module, owned in found.items() if module in modules}


def values_paired(mine: Computed, theirs: Computed, modules: Mapping[str, str]) -> dict[str, str]:
    """Return name of a watched value of mine -> theirs: of the same module and shape, the closest one.

    Programs give a module's tensors in another order, and by other keywords; what has another shape is left out.
    """
    by_module: dict[str, list[str]] = {}
    for name in theirs:
        kind, _, rest = name.partition("/")
        by_module.setdefault(f"{kind}/{_module(rest)}", []).append(name)
    found = {}
    for name, values in mine.items():
        kind, _, rest = name.partition("/")
        module = _module(rest)
        if kind in MODULES and module in modules and (module or kind in ("output", "given")):
            own = by_module.get(f"{kind}/{modules[module]}", [])
            if alike := [each for each in own if theirs[each].shape == values.shape]:
                found[name] = min(alike, key=lambda each: relative_error(values, theirs[each]))
    return found


def _module(rest: str) -> str:
    return rest.partition("/")[0].partition("#")[0]
