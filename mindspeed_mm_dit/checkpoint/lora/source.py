"""Read the adapters that a command names: a file, a folder or the checkpoints of a run, and their strength."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.checkpoint.compatibility import learned_apart
from mindspeed_mm_dit.checkpoint.lora import files
from mindspeed_mm_dit.checkpoint.lora.adapter import Adapter, adapter_from_arrays
from mindspeed_mm_dit.checkpoint.lora.names import layers_of
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, find_checkpoint, of_newest, read_facts
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.limits import check_path, short_repr
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError, UserError

Shapes = Mapping[str, tuple[int, ...]]
STRONGEST = 1000.0


class ScaledLora(NamedTuple):
    """Adapters, and the factor with which they are added."""

    adapter: Adapter
    strength: float


def read_all(arguments: Sequence[str], shapes: Shapes, flag: str, model: ModelConfig | None = None) -> list[ScaledLora]:
    """Read each of ``arguments``, FILE or FILE:STRENGTH, for a network of ``shapes``, that of ``model`` if it is known.

    Raises a UserError about ``flag`` if adapters cannot be read, or are those of another network or objective.
    """
    adapters = []
    for argument in arguments:
        path, strength = parse(argument, flag)
        path = find_checkpoint(path, flag)
        if model is not None:
            _check_learned(path, model, flag)
        adapter = named(read(path, layers_of(shapes)), f"{flag} = {path}")
        adapter.check_fits(shapes)
        adapters.append(ScaledLora(adapter, strength))
    return adapters


def _check_learned(path: Path, model: ModelConfig, flag: str) -> None:
    """Raise ConfigError if a run trained the adapters on a model with another objective than ``model``."""
    facts = of_newest(path, flag, read_facts) if path.is_dir() else {}
    try:
        trained_with = model_config_from_mapping(facts["model"], str(path))
    except (KeyError, UserError):  # of another program, or of parts that are not here
        return
    channels = ("channels of latents", model.latent_shape[0], trained_with.latent_shape[0])
    difference = learned_apart(model, trained_with) or (channels if channels[1] != channels[2] else None)
    if difference:
        reason = "was trained on another model: {0} {2!r} there, {1!r} here".format(*difference)
        raise ConfigError(f"{flag} = {path}", reason, "name the adapters of this base")


def parse(text: str, flag: str) -> tuple[Path, float]:
    """Split FILE or FILE:STRENGTH into the file and its strength, by default 1."""
    check_path(flag, text)
    name, colon, last = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), 1.0
    try:
        strength = float(last)
    except ValueError:
        return Path(text), 1.0
    if not abs(strength) <= STRONGEST or not math.isfinite(strength):
        raise ConfigError(
            f"{flag} = {short_repr(text)}", f"its strength must lie between -{STRONGEST:g} and {STRONGEST:g}"
        )
    return Path(name), strength


def is_adapter(path: Path) -> bool:
    """Return whether ``path`` holds adapters, of a run or of another program."""
    return bool(adapter_facts(path)) or files.fits(path)


def adapter_facts(path: Path) -> dict[str, Any]:
    """Return the entry of run.json about the adapters in a checkpoint folder; {} if it holds none."""
    facts: dict[str, Any] = read_facts(path).get(ADAPTERS, {}) if path.is_dir() else {}
    return facts


def read(path: Path, layers: Iterable[str] | None = None, use_ema: bool = True) -> Adapter:
    """Read adapters of a run (their EMA unless ``use_ema`` is false), or of any other program.

    layers: names of the network's linear layers, if it is known.
    """

    def read_adapter(path: Path) -> Adapter:
        if how := adapter_facts(path):
            return adapter_from_arrays(read_weights(path, use_ema), float(how["--lora-alpha"]), str(path))
        return files.read(path, layers)

    return of_newest(path, "adapters", read_adapter) if path.is_dir() else read_adapter(path)


def named(adapter: Adapter, what: str) -> Adapter:
    """Return ``adapter`` with the name ``what`` for errors."""
    return replace(adapter, where=what)


def merged(weights: Any, adapters: Sequence[ScaledLora]) -> Any:
    """Return ``weights`` with all ``adapters`` merged in."""
    for adapter, strength in adapters:
        weights = adapter.merged(weights, strength)
    return weights
