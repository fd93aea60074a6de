"""Translate the command line of every host to the equivalent yaml of the engine. Needs no framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.configs.tuning import SETS, Tuning
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import yaml_of
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.training.flags import ignored_flags
from mindspeed_mm_dit.training.flags import parse as parse_flags
from mindspeed_mm_dit.training.loggers import tensorboard


def parse(argv: Sequence[str], world_size: int) -> RunConfig:
    """Read the flags of a run on ``world_size`` ranks and check them against each other.

    Raises:
        ConfigError: naming the flag.
    """
    return checked(parse_flags(argv), world_size)


def without_effect(flags: RunConfig) -> list[str]:
    """Return the flags of the command line that have no effect here."""
    return ignored_flags(flags, "native", lambda kind: kind is not tensorboard.KIND)


def yaml_for(flags: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the engine's yaml for ``flags`` and the fsdp2.yaml they name, checked against ``world_size``."""
    fsdp2 = load_fsdp2_config(flags.fsdp2_config_path) if flags.use_torch_fsdp2 else None
    if fsdp2 is not None:
        fsdp2.shard_ranks(world_size)
    return yaml_of(_spelled_out(flags), fsdp2, world_size)


def _spelled_out(flags: RunConfig) -> RunConfig:
    """Return ``flags`` with patterns in place of sets of layers, which the engine does not know."""
    if not SETS.keys() & {*flags.lora_target_modules, *flags.freeze}:
        return flags
    parameters = parameters_of(load_model_config(str(flags.mm_model)))
    tuning = Tuning(flags.lora_target_modules, freeze=flags.freeze).spelled_out(parameters)
    return dataclasses.replace(flags, lora_target_modules=tuning.targets, freeze=tuning.freeze)


def yaml_of_config(folder: str | Path, world_size: int) -> str:
    """Return the engine's yaml for a folder with model.json, data.json, fsdp2.yaml and train.args."""
    folder = Path(folder)
    files = ("--mm-model", "model.json"), ("--mm-data", "data.json"), ("--fsdp2-config-path", "fsdp2.yaml")
    for _, name in files[:2]:  # (the yaml holds only their names)
        read_json(folder / name, "--write-native")
    named = [word for flag, name in files for word in (flag, str(folder / name))]
    flags = parse([*named, *read_train_args(folder / "train.args")], world_size)
    return as_text(yaml_for(flags, world_size))


def as_text(content: dict[str, Any]) -> str:
    """Return the text of a yaml file."""
    return yaml.safe_dump(content, sort_keys=False, width=110)
