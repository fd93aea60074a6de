"""The values of a yaml, held to what the flags of the same meaning take; the engine looks at few of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.flag_types import positive_int, unsigned_int
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.hosts.native.keys import written
from mindspeed_mm_dit.hosts.native.settings import COUNTED, FLAGS, check_schedule
from mindspeed_mm_dit.training.flags import whole_parser


def checked_values(values: Mapping[str, Any], path: str, world_size: int) -> RunConfig:
    """Return the run whose flags have ``values``, those of the yaml ``path``, with the types of the command line's.

    Raises:
        ConfigError: the flag of the same meaning would not be taken; the key is named.
    """
    actions = {action.dest: action for action in whole_parser()._actions}
    taken = {flag: _taken(f"{path}: {key}", values[flag], actions[flag]) for key, flag in FLAGS.items()}
    for key, flag in COUNTED.items():
        kind = unsigned_int if flag == "lr_warmup_iters" else _given
        _typed(f"{path}: {key} (--{flag.replace('_', '-')})", values[flag], kind)
    try:
        flags = checked(RunConfig.of({**values, **taken}), world_size)
        check_schedule(flags)
        return flags
    except ConfigError as error:
        raise ConfigError(f"{path}: {_key(error.what)} ({error.what})", error.reason, error.cure) from None


def _taken(setting: str, value: Any, action: argparse.Action) -> Any:
    """Return ``value`` as the command line would have read it."""
    if value is None and action.default in (None, ()):
        return action.default
    if action.nargs == "+":
        good = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
        wish = "is no list of texts"
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


def _given(text: str) -> Any:
    return None if text == "None" else positive_int(text)


def _key(what: str) -> str:
    """Return the key that means what the flag in ``what`` ("--min-lr = 2") does."""
    flag = what.partition(" ")[0].removeprefix("--").replace("-", "_")
    return next((key for key, name in {**FLAGS, **COUNTED}.items() if name == flag), flag)
