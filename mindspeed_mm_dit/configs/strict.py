"""Read a mapping into a frozen dataclass, refusing whatever the dataclass does not name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

import dacite

from mindspeed_mm_dit.errors import ConfigError, nearest

T = TypeVar("T")


def _whole_number_as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


_DACITE = dacite.Config(strict=True, type_hooks={float: _whole_number_as_float})


def from_mapping(cls: type[T], mapping: Any, where: str) -> T:
    """Build ``cls`` from ``mapping``; ``where`` names the file and section in errors.

    Raises:
        ConfigError: for an unknown key (the nearest known one is named), a missing key,
            or a value of the wrong type.
    """
    if not isinstance(mapping, dict):
        raise ConfigError(where, f"expected an object with named keys, found {type(mapping).__name__}")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise ConfigError(
                f"{where}: {key} = {mapping[key]!r}",
                "unknown key",
                f"{nearest(str(key), known)}Known keys are: {', '.join(known)}",
            )
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()}
    try:
        return dacite.from_dict(cls, frozen, _DACITE)  # type: ignore[type-var]
    except dacite.WrongTypeError as error:
        wanted = getattr(error.field_type, "__name__", str(error.field_type))
        raise ConfigError(
            f"{where}: {error.field_path} = {error.value!r}",
            f"expected {wanted}, found {type(error.value).__name__}",
        ) from None
    except dacite.MissingValueError as error:
        raise ConfigError(f"{where}: {error.field_path}", "this key is required and missing") from None


def read_json(path: str | Path, flag: str) -> dict[str, Any]:
    """Read a JSON object from ``path``; ``flag`` is the option that named the file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} = {path}", f"cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag} = {path}", f"is not JSON: line {error.lineno}: {error.msg}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} = {path}", "expected a JSON object at the top")
    return content
