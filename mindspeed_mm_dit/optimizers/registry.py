"""The optimizers by their names for ``--optimizer``. To add one: a file, a record, ``register_optimizer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mindspeed_mm_dit.errors import CheckpointError, ConfigError, nearest
from mindspeed_mm_dit.optimizers.adam import ADAM
from mindspeed_mm_dit.optimizers.contract import Chosen, Optimizer
from mindspeed_mm_dit.optimizers.muon import MUON

DEFAULT = "adam"
OPTIMIZERS: dict[str, Optimizer] = {DEFAULT: ADAM, "muon": MUON}

ADAMW = Chosen(DEFAULT, ADAM.config(), ADAM)
"""That of a run that says nothing of it."""


def register_optimizer(name: str, optimizer: Optimizer) -> None:
    """Add an optimizer; ``--optimizer`` may then choose it.

    Raises ConfigError when another one holds that name.
    """
    if OPTIMIZERS.get(name, optimizer) is not optimizer:
        raise ConfigError(f"optimizer {name!r}", "is registered already", "choose another name")
    OPTIMIZERS[name] = optimizer


def settings() -> dict[str, tuple[dataclasses.Field[Any], list[str]]]:
    """Return the settings of all optimizers by name, each with those that have it."""
    found: dict[str, tuple[dataclasses.Field[Any], list[str]]] = {}
    for owner, record in OPTIMIZERS.items():
        for field in dataclasses.fields(record.config):
            found.setdefault(field.name, (field, []))[1].append(owner)
    return found


def chosen_by(name: str, given: Mapping[str, Any]) -> Chosen:
    """Return the optimizer ``name`` with its settings, as flags have ``given`` them.

    Raises:
        ConfigError: there is none of that name, or a setting cannot be.
    """
    record = _find(name)
    return Chosen(name, record.config(**{setting: given[setting] for setting in _names(record)}), record)


def check_flags(name: str, given: Mapping[str, Any]) -> None:
    """Do what :func:`chosen_by` does, and raise ConfigError for a setting that means nothing to the chosen one."""
    chosen_by(name, given)
    for setting, (field, owners) in settings().items():
        if name not in owners and (value := given[setting]) != field.default:
            reason, cure = f"means nothing to --optimizer {name}", f"leave it out, or use {' or '.join(owners)}"
            raise ConfigError(f"{_flag(setting)} = {value}", reason, cure)


def kept_facts(chosen: Chosen) -> dict[str, Any]:
    """Return what run.json keeps of an optimizer, value by flag."""
    own = {_flag(name): getattr(chosen.config, name) for name in _names(chosen.optimizer)}
    return {"--optimizer": chosen.name, **own}


def chosen_in(settings: Any, path: object) -> Chosen:
    """Return the optimizer that the settings in the run.json of ``path`` name (what :func:`kept_facts` made, or another
    program); AdamW where they name none.

    Raises:
        CheckpointError: it belongs to a package that is not installed.
    """
    facts = settings if isinstance(settings, dict) else {}
    name = facts.get("--optimizer", DEFAULT)
    if name not in OPTIMIZERS:
        raise CheckpointError(str(path), f"was trained by an optimizer {name!r}", "install the package that brings it")
    record = OPTIMIZERS[name]
    return Chosen(name, record.config(**{n: facts[_flag(n)] for n in _names(record) if _flag(n) in facts}), record)


def _names(record: Optimizer) -> list[str]:
    return [field.name for field in dataclasses.fields(record.config)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _find(name: str) -> Optimizer:
    if name not in OPTIMIZERS:
        cure = f"{nearest(name, OPTIMIZERS)}Known here: {', '.join(OPTIMIZERS)}"
        raise ConfigError(f"--optimizer = {name!r}", "unknown optimizer", cure)
    return OPTIMIZERS[name]
