"""How one network's tensors are named and cut in its authors' code and in diffusers: tables of invertible rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.state import Arrays

LEAVES = ("", ".weight", ".bias")
"""What follows a layer in the name of a tensor; nothing if a rule names the tensor itself."""
_BLOCK = re.compile(r"(\w+)\.([0-9]{1,9})\.")


class Transform(NamedTuple):
    """Splits one tensor of the authors into ``n`` of diffusers', along its first axis, and joins them again."""

    split: Callable[[np.ndarray, int], list[np.ndarray]]
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    heights: tuple[int, ...] = (1,)
    """Heights of the parts, in proportion."""


def _join_repeated(copies: Sequence[np.ndarray]) -> np.ndarray:
    if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
        raise ValueError("differs from block to block, and all blocks of the published network share it")
    return copies[0]


def stacked(*heights: int) -> Transform:
    """Return the transform of matrices on top of each other, of these heights in proportion."""
    ends, whole = np.cumsum(heights)[:-1], sum(heights)
    return Transform(lambda array, n: np.split(array, ends * (len(array) // whole)), np.concatenate, heights)


def _halves_swapped(array: np.ndarray) -> np.ndarray:
    return np.concatenate(np.array_split(array, 2)[::-1])


RENAMED = Transform(lambda array, n: [array], lambda parts: parts[0])
REPEATED = Transform(lambda array, n: [array] * n, _join_repeated)
STACKED = stacked(1, 1, 1)
SWAPPED = Transform(lambda array, n: [_halves_swapped(array)], lambda parts: _halves_swapped(parts[0]))
"""The authors compute the shift of a norm before its scale, diffusers after."""


class Rule(NamedTuple):
    """A layer, or a tensor, under the name its authors gave it, and as diffusers has it.

    ``*`` is a block's number: the same one on both sides, or every one if it is on diffusers' side alone; ``$`` is that
    of the last block, whose rules come before those of all blocks.
    """

    original: str
    diffusers: tuple[str, ...]
    transform: Transform = RENAMED


Rules = Sequence[Rule]


def numbers_in(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of the blocks in ``names``, by what is before the number."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := _BLOCK.match(name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return {prefix: sorted(numbers[prefix]) for prefix in numbers}


def block_ranges(rules: Rules, count: int) -> dict[str, Sequence[int]]:
    """Return the numbers of ``count`` blocks of each kind."""
    return {_block_prefix(rule.diffusers[0]): range(count) for rule in rules}


def expand_rules(rules: Rules, numbers: Mapping[str, Sequence[int]]) -> Iterator[Rule]:
    """Yield the rules with block numbers filled in; ``numbers`` may be by the names of either side."""
    known = dict(numbers)
    for original, theirs in {(_block_prefix(rule.original), _block_prefix(rule.diffusers[0])) for rule in rules}:
        for here, there in ((original, theirs), (theirs, original)):
            if here and here not in known and there in known:
                known[here] = known[there]
    for rule in rules:
        blocks = known.get(_block_prefix(rule.diffusers[0]), ())
        if "$" in rule.original:
            yield from (_with_block_number(rule, "$", number) for number in blocks[-1:])
        elif "*" in rule.original:
            yield from (_with_block_number(rule, "*", number) for number in blocks)
        elif "*" in rule.diffusers[0]:
            yield rule._replace(diffusers=tuple(rule.diffusers[0].replace("*", str(i)) for i in blocks))
        else:
            yield rule


def _block_prefix(name: str) -> str:
    return re.split(r"\.[*$]\.", name)[0] if "*" in name or "$" in name else ""


def _with_block_number(rule: Rule, mark: str, number: int) -> Rule:
    filled = (name.replace(mark, str(number)) for name in (rule.original, *rule.diffusers))
    return Rule(next(filled), tuple(filled), rule.transform)


def to_diffusers(arrays: Mapping[str, np.ndarray], rules: Rules) -> Arrays:
    """Rename and split the authors' tensors; those without a rule stay as they are."""
    remaining, renamed = dict(arrays), dict[str, np.ndarray]()
    for rule in expand_rules(rules, numbers_in(remaining)):
        for leaf in LEAVES:
            if (array := remaining.pop(rule.original + leaf, None)) is not None:
                count = len(rule.diffusers)
                parts = rule.transform.split(array, count) if array.ndim else [array] * count
                renamed.update(zip((name + leaf for name in rule.diffusers), parts))
    return {**renamed, **remaining}


def to_original(arrays: Mapping[str, np.ndarray], rules: Rules) -> Arrays:
    """Undo :func:`to_diffusers`; raises ValueError, with diffusers' name first, for parts that cannot be one."""
    remaining, renamed = dict(arrays), dict[str, np.ndarray]()
    for rule in expand_rules(rules, numbers_in(remaining)):
        for leaf in LEAVES:
            names = [name + leaf for name in rule.diffusers]
            if names and all(name in remaining for name in names):
                try:
                    renamed[rule.original + leaf] = rule.transform.join([remaining.pop(name) for name in names])
                except ValueError as error:
                    raise ValueError(names[0], str(error)) from None
    return {**renamed, **remaining}
