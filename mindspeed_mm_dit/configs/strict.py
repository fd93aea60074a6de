"""Reads a mapping into a frozen dataclass; refuses unknown keys and values of the wrong type."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mindspeed_mm_dit.configs.limits import MAX_INT64, shorten_repr
from mindspeed_mm_dit.errors import ConfigError, UserError, nearest

T = TypeVar("T")

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_WORDS[type(None)] = "null"
"""Words for Python types in errors about config files."""

MAX_DEPTH = 64
"""Deepest nesting of a config file; the examples have a handful of levels."""
MAX_BYTES = 1 << 20
"""Most bytes of a config file; the examples have a few hundred."""


def from_mapping(cls: type[T], mapping: Any, where: str) -> T:
    """Build ``cls`` from ``mapping``; ``where`` names the file and section in errors.

    Raises:
        ConfigError: for an unknown key (suggesting the nearest known one), a missing key,
            or a value of the wrong type (listing the allowed values).
    """
    if not isinstance(mapping, dict):
        raise ConfigError(f"{where} must be an object with named keys, not a value of type {type(mapping).__name__}.")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = [field.name for field in fields]
    for key in mapping:
        if key not in known:
            raise ConfigError(
                f"{where}: {_key(key)} = {shorten_repr(mapping[key])} is an unknown key. "
                f"{nearest(str(key), known)}The known keys are {', '.join(known)}."
            )
    hints, values = get_type_hints(cls), {}
    for field in fields:
        if field.name in mapping:
            values[field.name] = _checked(mapping[field.name], hints[field.name], f"{where}: {field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: {field.name} is required and missing.")
    try:
        return cls(**values)
    except UserError as error:  # (raised by the class itself, which does not know the file)
        raise type(error)(f"{where.rpartition(': ')[0] or where}: {error}") from None


def _checked(value: Any, annotation: Any, where: str) -> Any:
    """Return ``value`` as the type ``annotation``; converts lists to tuples, and whole numbers to floats if needed."""
    kinds = _kinds(annotation)
    lists = [kind for kind in kinds if get_origin(kind) is tuple]
    if lists and isinstance(value, (list, tuple)):
        item = get_args(lists[0])[0]
        return tuple(_checked(entry, item, f"{where}[{position}]") for position, entry in enumerate(value))
    tables = [kind for kind in kinds if get_origin(kind) is dict]
    if tables and isinstance(value, dict):
        item = get_args(tables[0])[1]
        return {key: _checked(entry, item, f"{where}.{_key(key)}") for key, entry in value.items()}
    sections = [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    if sections and isinstance(value, dict):
        return from_mapping(sections[0], value, where)
    _refuse_extremes(value, where)
    if any(_fits(value, kind) for kind in kinds):
        return float(value) if float in kinds and int not in kinds and type(value) is int else value
    raise ConfigError(f"{where} = {shorten_repr(value)} must be {_words(kinds)}. {_hint(value, kinds)}")


def _refuse_extremes(value: Any, where: str) -> None:
    """Raise ConfigError for numbers and characters that are never valid and would fail much later."""
    if type(value) is int and abs(value) > MAX_INT64:
        raise ConfigError(f"{where} = {shorten_repr(value)} must have a magnitude of at most 2**63 - 1.")
    if isinstance(value, str) and ("\0" in value or any(0xD800 <= ord(letter) <= 0xDFFF for letter in value)):
        raise ConfigError(f"{where} = {shorten_repr(value)} contains a character that is not allowed in names or text.")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind in _WORDS:
        return type(value) is kind  # true is not a whole number here
    return kind is Any or (get_origin(kind) is None and isinstance(value, kind))


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def describe_type(annotation: Any) -> str:
    """Return a description of the type ``annotation`` as in errors, e.g. "a whole number or null"."""
    return _words(_kinds(annotation))


def _words(kinds: Iterable[Any]) -> str:
    """Return "'a', 'b' or null"."""
    words: list[str] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += [repr(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            words.append("a list")
        else:
            words.append(_WORDS.get(kind, "an object with named keys"))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _key(key: Any) -> str:
    """Return a key as shown in errors."""
    return key if isinstance(key, str) and len(key) < 80 else shorten_repr(key)


def _hint(value: Any, kinds: Iterable[Any]) -> str:
    """Return a sentence on how to write a string that should be another type, or an empty string."""
    if not isinstance(value, str) or len(value) > 200:
        return ""
    if any(get_origin(kind) is tuple for kind in kinds):
        return f"Write a list: {json.dumps([value])}."
    if {int, float} & set(kinds) and value.replace(".", "", 1).isdigit():
        return f"Write it without quotes: {value}."
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    return nearest(value, [choice for choice in choices if isinstance(choice, str)]) if len(choices) > 1 else ""


def _siblings(path: str | Path) -> list[str]:
    """Return the names beside a missing file."""
    try:
        return os.listdir(Path(path).parent)
    except OSError:
        return []


def read_text(path: str | Path, flag: str) -> str:
    """Read a text file; ``flag`` is the option that named it.

    Raises ConfigError unless it is a regular file of at most MAX_BYTES, in UTF-8.
    """
    what = f"{flag} = {path}"
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{what} {'is a folder' if stat.S_ISDIR(status.st_mode) else 'is not a regular file'}.")
        if status.st_size > MAX_BYTES:
            raise ConfigError(
                f"{what} has {status.st_size / 2**20:,.1f} MiB, but a config file may have at most 1 MiB."
            )
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise ConfigError(
                f"{what} does not exist. {nearest(Path(path).name, _siblings(path))}Correct the path."
            ) from None
        raise ConfigError(f"{what} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(
            f"{what} is not UTF-8: it has byte {byte:#04x} at position {error.start}. Save it as UTF-8."
        ) from None


def read_json(path: str | Path, flag: str) -> dict[str, Any]:
    """Read a JSON object from ``path``; ``flag`` is the option that named the file."""
    content = read_any_json(path, flag)
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} = {path} must hold a JSON object.")
    return content


def read_any_json(path: str | Path, flag: str) -> Any:
    """Read JSON of any type from ``path``; ``flag`` is the option that named the file."""
    what = f"{flag} = {path}"

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise ConfigError(f"{what} has the key {shorten_repr(key)} twice in one object. Drop one of them.")
        return dict(pairs)

    try:
        content = json.loads(read_text(path, flag), object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        if not error.doc.strip():
            raise ConfigError(f"{what} is empty. Write a JSON object into it.") from None
        raise ConfigError(
            f"{what} is not JSON: {error.msg} in line {error.lineno}. JSON has no comments, needs double quotes around "
            "names, and no comma after the last item of a list."
        ) from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply to be a config file.") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{what} holds a number that cannot be read: {error}.") from None
    check_depth(what, content)
    return content


def check_depth(what: str, content: Any) -> None:
    """Raise ConfigError if the ``content`` of a config file, named by ``what``, is nested deeper than MAX_DEPTH."""
    level = [content]
    for _ in range(MAX_DEPTH):
        inside = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list))]
        # Each node once: YAML aliases can repeat one very often.
        level = [*{id(value): value for values in inside for value in values}.values()]
    if level:
        raise ConfigError(f"{what} is nested too deeply to be a config file.")
