"""Low-rank adapters (LoRA): what they add to the weights of a network, and those that a command names.

Each form of files is a registry entry of kind "adapter_format" (``integrations/formats``); a run's are read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.checkpoint.state import Arrays, first_differing_setting
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, find_checkpoint, read_facts, read_newest
from mindspeed_mm_dit.configs.limits import check_path, shorten_repr
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.tuning import DOWN, UP, LoraSpec
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError, nearest
from mindspeed_mm_dit.registry import Registry

ShapeMap = Mapping[str, tuple[int, ...]]
MAX_STRENGTH = 1000.0


class LowRank(NamedTuple):
    """The adapter of one layer, whose weight W (out, in) becomes W + alpha / r B A (Hu et al. 2021, eq. 3)."""

    down: np.ndarray
    """A, (r, in)."""
    up: np.ndarray
    """B, (out, r)."""
    alpha: float

    @property
    def rank(self) -> int:
        """The rank r."""
        return int(self.down.shape[0])

    @property
    def scale(self) -> float:
        """The factor of B A: alpha / r."""
        return self.alpha / self.rank

    def change(self, strength: float = 1.0) -> np.ndarray:
        """Return what is added to the weight, (out, in) float32."""
        return np.float32(strength * self.scale) * (self.up.astype(np.float32) @ self.down.astype(np.float32))

    def with_unit_scale(self) -> LowRank:
        """Return an equal adapter with alpha = r: A and B each hold the root of the scale, and B its sign."""
        root = np.float32(abs(self.scale) ** 0.5)
        signed = root * np.float32(np.sign(self.scale))
        return self if self.scale == 1 else LowRank(self.down * root, self.up * signed, float(self.rank))


@dataclass(frozen=True)
class Adapter:
    """The adapters of some layers of a network."""

    layers: Mapping[str, LowRank]
    """By our name of the layer."""
    where: str = "The adapter"
    """The name used in errors."""
    notes: tuple[str, ...] = field(default=())
    """What was assumed when it was read, a sentence each."""

    def specs(self) -> dict[str, LoraSpec]:
        """Return rank and scale of each layer's adapter, as needed to build the network with them."""
        return {name: LoraSpec(lora.rank, lora.scale) for name, lora in self.layers.items()}

    def arrays(self) -> Arrays:
        """Return A and B of all layers by their names in a network."""
        named = {f"{name}.{DOWN}.weight": lora.down for name, lora in self.layers.items()}
        return named | {f"{name}.{UP}.weight": lora.up for name, lora in self.layers.items()}

    def merged(self, weights: Mapping[str, np.ndarray], strength: float = 1.0) -> Arrays:
        """Return ``weights`` with ``strength`` times this adapter merged in, in their own dtypes.

        Raises CheckpointError, naming the layer, if these are the weights of another network.
        """
        self.check_fits({name: array.shape for name, array in weights.items()})
        changed = dict(weights)
        for layer, lora in self.layers.items():
            weight = weights[f"{layer}.weight"]
            changed[f"{layer}.weight"] = (weight.astype(np.float32) + lora.change(strength)).astype(weight.dtype)
        return changed

    def check_fits(self, shapes: ShapeMap) -> None:
        """Raise CheckpointError, naming the layer, unless a network of ``shapes`` has every layer."""
        for layer, lora in self.layers.items():
            actual = shapes.get(f"{layer}.weight")
            expected = (lora.up.shape[0], lora.down.shape[1])
            if actual is None:
                raise CheckpointError(
                    f"{self.where} has an adapter for {layer}, which is not in this network. "
                    f"{nearest(layer, layer_names(shapes))}Name the adapters of this base."
                )
            if tuple(actual) != expected:
                raise CheckpointError(
                    f"{self.where} has an adapter for {layer} with a weight of shape {expected}, which has the shape "
                    f"{tuple(actual)} in this network. Name the adapters of this base."
                )


def layer_names(shapes: ShapeMap) -> list[str]:
    """Return the names of the linear layers, and tables, of a network."""
    return [
        name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2
    ]


def adapter_from_arrays(arrays: Mapping[str, np.ndarray], alpha: float, where: str) -> Adapter:
    """Return the adapter of arrays named as in a network (the inverse of :meth:`Adapter.arrays`)."""
    layers = [name.removesuffix(f".{DOWN}.weight") for name in arrays if name.endswith(f".{DOWN}.weight")]
    loras = {n: LowRank(arrays[f"{n}.{DOWN}.weight"], arrays[f"{n}.{UP}.weight"], alpha) for n in layers}
    return Adapter(loras, where)


# --- files of adapters ------------------------------------------------------------------------------------------------


class AdapterFormat(NamedTuple):
    """A form of files of adapters."""

    fits: Callable[[Path], bool]
    """Return whether ``read`` may take a path; formats that are read alike share both functions."""
    read: Callable[[Path, Iterable[str] | None], Adapter]
    """(path, names of the network's linear layers if they are known) -> adapter; raises CheckpointError."""
    write: Callable[[Path, Adapter, ShapeMap], tuple[str, ...]]
    """(new file or empty folder, adapter, shapes of the network's weights or {}) -> notes."""
    is_folder: bool


ADAPTER_FORMATS = Registry[AdapterFormat]("adapter_format")
"""By the name that --to takes."""


def adapter_format_of(path: Path) -> AdapterFormat | None:
    """Return the format that reads the adapters in ``path``; None if there are none."""
    readers = {known.fits: known for known in ADAPTER_FORMATS.values()}
    return next((known for known in readers.values() if known.fits(path)), None)


def is_adapter(path: Path) -> bool:
    """Return whether ``path`` holds adapters, of a run or of another program."""
    return bool(adapter_facts(path)) or adapter_format_of(path) is not None


def adapter_facts(path: Path) -> dict[str, Any]:
    """Return the entry of run.json about the adapters in a checkpoint folder; {} if it holds none."""
    facts: dict[str, Any] = read_facts(path).get(ADAPTERS, {}) if path.is_dir() else {}
    return facts


def read_adapter(path: Path, layers: Iterable[str] | None = None, use_ema: bool = True) -> Adapter:
    """Read adapters of a run (their EMA unless ``use_ema`` is false), or of any other program.

    layers: names of the network's linear layers, if it is known.
    """

    def read(path: Path) -> Adapter:
        if how := adapter_facts(path):
            return adapter_from_arrays(read_weights(path, use_ema), float(how["--lora-alpha"]), str(path))
        # (without adapters in it: the reader says what there is instead)
        known = adapter_format_of(path) or next(iter(ADAPTER_FORMATS.values()))
        return known.read(path, layers)

    return read_newest(path, "adapters", read) if path.is_dir() else read(path)


# --- adapters that a command names ------------------------------------------------------------------------------------


class ScaledLora(NamedTuple):
    """Adapters, and the factor with which they are added."""

    adapter: Adapter
    strength: float


def read_adapters(
    arguments: Sequence[str], shapes: ShapeMap, flag: str, model: ModelConfig | None = None
) -> list[ScaledLora]:
    """Read each of ``arguments``, FILE or FILE:STRENGTH, for a network of ``shapes``, that of ``model`` if it is known.

    Raises a UserError about ``flag`` if adapters cannot be read, or are those of another network or objective.
    """
    adapters = []
    for argument in arguments:
        path, strength = parse(argument, flag)
        path = find_checkpoint(path, flag)
        if model is not None:
            _check_learned(path, model, flag)
        adapter = replace(read_adapter(path, layer_names(shapes)), where=f"{flag} = {path}")
        adapter.check_fits(shapes)
        adapters.append(ScaledLora(adapter, strength))
    return adapters


def _check_learned(path: Path, model: ModelConfig, flag: str) -> None:
    """Raise ConfigError if a run trained the adapters on a model with another objective than ``model``."""
    facts = read_newest(path, flag, read_facts) if path.is_dir() else {}
    try:
        trained_with = model_config_from_mapping(facts["model"], str(path))
    except (KeyError, UserError):  # of another program, or of parts that are not here
        return
    channels = ("channels of latents", model.latent_shape[0], trained_with.latent_shape[0])
    name, here, there = first_differing_setting(model, trained_with) or channels
    if here != there:
        raise ConfigError(
            f"{flag} = {path} was trained on another model: {name} is {there!r} there and {here!r} here. Name the "
            "adapters of this base."
        )


def parse(text: str, flag: str) -> tuple[Path, float]:
    """Split FILE or FILE:STRENGTH into the file and its strength, by default 1."""
    check_path(flag, text)
    name, colon, last = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), 1.0
    try:
        strength = float(last)
    except ValueError:
        if Path(name).exists():
            raise ConfigError(
                f"{flag} = {shorten_repr(text)} has the strength {shorten_repr(last)}, which is not a number. Write "
                "FILE:0.7, for example."
            ) from None
        return Path(text), 1.0
    if not abs(strength) <= MAX_STRENGTH or not math.isfinite(strength):
        raise ConfigError(
            f"{flag} = {shorten_repr(text)} must have a strength between -{MAX_STRENGTH:g} and {MAX_STRENGTH:g}."
        )
    return Path(name), strength


def joined_adapters(adapters: Sequence[ScaledLora]) -> Adapter:
    """Return one adapter of unit scale that adds what all ``adapters`` add: ranks of a layer beside each other."""
    layers: dict[str, LowRank] = {}
    for adapter, strength in adapters:
        for name, lora in adapter.layers.items():
            down, up = lora.down.astype(np.float32), np.float32(strength * lora.scale) * lora.up.astype(np.float32)
            if name in layers:
                down, up = np.concatenate([layers[name].down, down]), np.concatenate([layers[name].up, up], 1)
            layers[name] = LowRank(down, up, float(len(down)))
    return Adapter(layers)


def merge_adapters(weights: Any, adapters: Sequence[ScaledLora]) -> Any:
    """Return ``weights`` with all ``adapters`` merged in."""
    for adapter, strength in adapters:
        weights = adapter.merged(weights, strength)
    return weights
