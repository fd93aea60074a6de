"""The optimizers, by their name for ``--optimizer``. To add one, write a file with an ``OptimizerSpec`` and call
``register_optimizer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mindspeed_mm_dit.errors import CheckpointError, ConfigError, flag_of, not_known
from mindspeed_mm_dit.optimizers.adam import ADAM
from mindspeed_mm_dit.optimizers.contract import ConfiguredOptimizer, OptimizerSpec
from mindspeed_mm_dit.registry import Registry

DEFAULT = "adam"
OPTIMIZERS = Registry[OptimizerSpec]("optimizer")

ADAMW = ConfiguredOptimizer(DEFAULT, ADAM.config(), ADAM)
"""The optimizer of a run that does not choose one."""


def register_optimizer(name: str, optimizer: OptimizerSpec) -> None:
    """Add an optimizer that ``--optimizer`` can choose.

    Raises ConfigError if another one has that name.
    """
    OPTIMIZERS[name] = optimizer


def settings() -> dict[str, tuple[dataclasses.Field[Any], list[str]]]:
    """Return the settings of all optimizers by name, each with the names of the optimizers that have it."""
    owners_by_setting: dict[str, tuple[dataclasses.Field[Any], list[str]]] = {}
    for owner, record in OPTIMIZERS.items():
        for field in dataclasses.fields(record.config):
            owners_by_setting.setdefault(field.name, (field, []))[1].append(owner)
    return owners_by_setting


def optimizer_from_flags(name: str, flags: Mapping[str, Any]) -> ConfiguredOptimizer:
    """Return the optimizer ``name`` with its settings from the flags ``flags``.

    Raises:
        ConfigError: there is no optimizer of that name, or a setting is invalid.
    """
    record = _find(name)
    return ConfiguredOptimizer(name, record.config(**{setting: flags[setting] for setting in _names(record)}), record)


def check_flags(name: str, flags: Mapping[str, Any]) -> None:
    """Check as :func:`optimizer_from_flags` does, and raise ConfigError for a setting that the optimizer lacks."""
    optimizer_from_flags(name, flags)
    for setting, (field, owners) in settings().items():
        if name not in owners and (value := flags[setting]) != field.default:
            raise ConfigError(
                f"{flag_of(setting)} = {value} has no effect with --optimizer {name}. Leave it out, or use "
                f"{' or '.join(owners)}."
            )


def optimizer_facts(chosen: ConfiguredOptimizer) -> dict[str, Any]:
    """Return the flags and values that run.json saves for an optimizer."""
    values = {flag_of(name): getattr(chosen.config, name) for name in _names(chosen.optimizer)}
    return {"--optimizer": chosen.name, **values}


def optimizer_from_facts(settings: Any, path: object) -> ConfiguredOptimizer:
    """Return the optimizer named by ``settings``, from the run.json of ``path``; AdamW if they name none.

    The settings come from :func:`optimizer_facts` or another program.

    Raises:
        CheckpointError: the optimizer belongs to a package that is not installed.
    """
    facts = settings if isinstance(settings, dict) else {}
    name = facts.get("--optimizer", DEFAULT)
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise CheckpointError(f"{path} was trained with the optimizer {name!r}. Install the package that provides it.")
    record = OPTIMIZERS[name]
    return ConfiguredOptimizer(
        name, record.config(**{n: facts[flag_of(n)] for n in _names(record) if flag_of(n) in facts}), record
    )


def _names(record: OptimizerSpec) -> list[str]:
    return [field.name for field in dataclasses.fields(record.config)]


def _find(name: str) -> OptimizerSpec:
    if name not in OPTIMIZERS:
        raise not_known(f"--optimizer = {name!r}", name, OPTIMIZERS)
    return OPTIMIZERS[name]
