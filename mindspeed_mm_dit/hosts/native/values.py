"""The values of a yaml, held to what the flags of the same meaning take; the engine looks at few of them."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_mm_dit.configs.arguments import check_arguments
from mindspeed_mm_dit.configs.flag_types import positive_int, unsigned_int
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.hosts.native.keys import written
from mindspeed_mm_dit.hosts.native.settings import COUNTED, FLAGS, check_schedule
from mindspeed_mm_dit.training.flags import whole_parser


def check_values(flags: Namespace, path: str, world_size: int) -> None:
    """Give ``flags``, whose values are those of the yaml ``path``, the types of the command line's.

    Raises:
        ConfigError: the flag of the same meaning would not be taken; the key is named.
    """
    actions = {action.dest: action for action in whole_parser()._actions}
    for key, flag in FLAGS.items():
        setattr(flags, flag, _taken(f"{path}: {key}", getattr(flags, flag), actions[flag]))
    for key, flag in COUNTED.items():
        kind = unsigned_int if flag == "lr_warmup_iters" else _given
        _typed(f"{path}: {key} (--{flag.replace('_', '-')})", getattr(flags, flag), kind)
    try:
        check_arguments(flags, world_size)
        check_schedule(flags)
    except ConfigError as error:
        raise ConfigError(f"{path}: {_key(error.what)} ({error.what})", error.reason, error.cure) from None


def _taken(setting: str, value: Any, action: argparse.Action) -> Any:
    """Return ``value`` as the command line would have read it."""
    if value is None and action.default is None:
        return None
    if action.nargs == 0:
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
