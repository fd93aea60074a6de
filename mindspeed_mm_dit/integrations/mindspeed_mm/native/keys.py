"""Find errors in the engine's yaml before the engine reads it, because it silently accepts any key.

Values must be valid for the flag of the same meaning; the engine checks few of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.flag_types import positive_int, unsigned_int
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.configs.yaml_file import read_yaml
from mindspeed_mm_dit.errors import ConfigError, flag_of, nearest
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import (
    COLLATOR_ID,
    COUNTED,
    DATA_ID,
    FLAGS,
    MODEL_ID,
    OURS,
    PLUGIN,
    REQUIRED,
    check_schedule,
    get,
)
from mindspeed_mm_dit.training.flags import full_parser

SHARDS = "parallel.fully_shard_parallel_size"
NOT_DECLARED = ("features.recompute", "inference")
"""Keys that the engine reads but does not declare."""
OPEN = ("parallel.tp_plan", "parallel.ep_plan", "data.dataset_param.attr", "inference", "training.quantization_plan")
"""Sections that are not checked: a DiT has no use for them."""
_IDS = {
    "model.model_id": MODEL_ID,
    "data.dataset_param.dataset_type": DATA_ID,
    "data.dataloader_param.collate_param.collator_id": COLLATOR_ID,
    "training.plugin": PLUGIN,
}
"""Key -> the name under which we are registered with the engine; the last one is an entry of a list."""


def check_keys(path: str) -> None:
    """Raise ConfigError for an unknown key, a missing required key, or a wrong number of ranks."""
    from mindspeed_mm.fsdp.params.argument import Arguments

    content = read_yaml(path, "CONFIG")
    if not isinstance(content, dict):
        raise ConfigError(path, "expected sections: parallel, model, data, features, training, tools")
    _check_section(content, Arguments, "", path)
    for key in REQUIRED:
        if not isinstance(get(content, key), str):
            raise ConfigError(
                f"{path}: {key}", "is required and missing", "name the JSON file, as --mm-model and --mm-data do"
            )
    for key, expected in _IDS.items():
        if (actual := get(content, key)) != expected and not (isinstance(actual, list) and expected in actual):
            raise ConfigError(f"{path}: {key} = {written(actual)}", "is not ours", f"write {expected}")
    _check_ranks(get(content, SHARDS), runtime.world_size(), path)


def _check_section(content: dict[str, Any], section: Any, prefix: str, path: str) -> None:
    known = {name: field.annotation for name, field in section.model_fields.items()}
    ours = [key.removeprefix(prefix) for key in (*OURS, *NOT_DECLARED) if key.startswith(prefix)]
    for name, value in content.items():
        key = f"{prefix}{name}"
        if name not in known and name not in ours:
            raise ConfigError(
                f"{path}: {key} = {short_repr(value)}", "unknown key", nearest(str(name), [*known, *ours])
            )
        kind = known.get(name)
        if not hasattr(kind, "model_fields") or key in OPEN:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} = {written(value)}", "is a section, and has keys", f"write {name}: {{}}")
        _check_section(value, kind, f"{key}.", path)


def _check_ranks(size: Any, ranks: int, path: str) -> None:
    """Raise ConfigError unless ``ranks`` can be divided into copies of the weights on ``size`` ranks each."""
    if size is None or size == "auto":
        return
    what, cure = f"{path}: {SHARDS} = {short_repr(size)}", "write auto, or a divisor of the number of ranks"
    if not str(size).isdecimal() or not int(size):
        raise ConfigError(what, "is no number of ranks", cure)
    if ranks % int(size):
        equation = f"shards({size}) * copies({ranks // int(size)}) != WORLD_SIZE({ranks})"
        raise ConfigError(what, f"does not divide the ranks: {equation}", f"{cure} (torchrun --nproc_per_node)")


def refused(path: str, error: BaseException) -> ConfigError:
    """Return our error for the engine's ``error`` about a yaml with valid keys: a value that it does not accept."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        reason = f"MindSpeed-MM's native engine does not take it: {error}"
        of_a_word = str(error).startswith("Command-line")  # (training.lr=1e-4 after the yaml)
        return ConfigError("command line", reason, f"write it into {path}") if of_a_word else ConfigError(path, reason)
    problem = error.errors()[0]
    key, value, message = _key(problem["loc"]), problem["input"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return ConfigError(f"{path}: {key}", "is required and missing", "mm-dit plan --write-native prints all")
    setting = key if isinstance(value, dict) else f"{key} = {written(value)}"  # (a section: its values do not agree)
    cure = "leave the key out" if value is None else ""
    return ConfigError(f"{path}: {setting}", f"MindSpeed-MM's native engine does not take it: {message}", cure)


def _key(parts: Sequence[str | int]) -> str:
    """Return a key as it is in the yaml: if a key may have several types, pydantic adds the type after it."""
    kinds = {"str", "int", "float", "bool"}
    return ".".join(str(part) for part in parts if part not in kinds)


def written(value: Any) -> str:
    """Return a value as it is written in a yaml."""
    return {"None": "null", "True": "true", "False": "false"}.get(text := short_repr(value), text)


def checked_values(values: Mapping[str, Any], path: str, world_size: int) -> RunConfig:
    """Return the run whose flags have ``values``, from the yaml ``path``, converted to the types of the command line.

    Raises:
        ConfigError: the flag of the same meaning would not accept the value; the key is named.
    """
    actions = {action.dest: action for action in full_parser()._actions}
    converted = {flag: _converted(f"{path}: {key}", values[flag], actions[flag]) for key, flag in FLAGS.items()}
    for key, flag in COUNTED.items():
        kind = unsigned_int if flag == "lr_warmup_iters" else _optional_int
        _typed(f"{path}: {key} ({flag_of(flag)})", values[flag], kind)
    try:
        flags = checked(RunConfig.of({**values, **converted}), world_size)
        check_schedule(flags)
        return flags
    except ConfigError as error:
        raise ConfigError(f"{path}: {_key_of_flag(error.what)} ({error.what})", error.reason, error.cure) from None


def _converted(setting: str, value: Any, action: argparse.Action) -> Any:
    """Return ``value`` as the command line would read it."""
    if value is None and action.default in (None, ()):
        return action.default
    if action.nargs == "+":
        good = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
        wish = "is not a list of strings"
    elif action.nargs == 0:
        good, wish = isinstance(value, bool), "is not true or false"
    elif action.choices is not None:
        good, wish = value in action.choices, f"is none of {', '.join(action.choices)}"
    elif action.type is None:
        good, wish = isinstance(value, str), "is not a text"
    else:
        assert callable(action.type)
        return _typed(setting, value, action.type)
    if not good:
        raise ConfigError(f"{setting} = {written(value)}", wish)
    return value


def _typed(setting: str, value: Any, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        reason = str(error).rpartition(" is not ")[2]
        raise ConfigError(f"{setting} = {written(value)}", f"is not {reason}") from None


def _optional_int(text: str) -> Any:
    return None if text == "None" else positive_int(text)


def _key_of_flag(what: str) -> str:
    """Return the key that means the same as the flag in ``what``, e.g. "--min-lr = 2"."""
    flag = what.partition(" ")[0].removeprefix("--").replace("-", "_")
    return next((key for key, name in {**FLAGS, **COUNTED}.items() if name == flag), flag)
