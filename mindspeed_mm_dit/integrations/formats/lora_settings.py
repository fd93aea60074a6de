"""Settings of adapters in peft's adapter_config.json or diffusers' metadata: rank and alpha of each layer.

Some settings give the matrices of a file another meaning (DoRA; PiSSA, which takes a part out of the base first). Only
settings that are understood are read; any other is refused by its name unless it is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.configs.tuning import matches
from mindspeed_mm_dit.errors import CheckpointError, ConfigError

_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
    *("peft_version", "runtime_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "corda_config", "eva_config"),
}
"""Settings that change no sample by themselves: they are about training, or qualify another one that is off."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # (the others change the base)
}
"""Settings that are not off when they are empty, with all that they may be."""
_BASE_PREFIX = re.compile(r"(base_model\.model\.|transformer\.)?")
_MAX_ALPHA, _MAX_PATTERNS, _MAX_REPEATS = 1e6, 10_000, 3


@dataclass(frozen=True)
class LoraSettings:
    """The settings of peft's LoraConfig that decide what an adapter adds."""

    r: int | None = None
    """Rank; None: as many as the matrices have."""
    lora_alpha: float | None = None
    """Alpha; None: not set."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r."""
    rank_pattern: dict = field(default_factory=dict)  # type: ignore[type-arg]
    """Ranks of layers, by regular expressions that match the end of their names."""
    alpha_pattern: dict = field(default_factory=dict)  # type: ignore[type-arg]
    """Alphas of layers, likewise."""
    target_modules: tuple[str, ...] | str | None = None
    """Layers with adapters, by the ends of their names or one regular expression; None: not set."""
    exclude_modules: tuple[str, ...] | str | None = None
    """Layers without adapters, likewise."""

    def has_alpha(self, layer: str) -> bool:
        """Return whether these settings set alpha for a layer."""
        return self._alpha(_without_prefix(layer)) is not None

    def _alpha(self, layer: str) -> float | None:
        alpha: float | None = _value_for(self.alpha_pattern, layer, self.lora_alpha)
        return alpha

    def alpha(self, layer: str, rank: int) -> float:
        """Return alpha of a layer whose matrices have ``rank``.

        Raises CheckpointError if these settings are not those of adapters with such a layer.
        """
        layer = _without_prefix(layer)
        expected = _value_for(self.rank_pattern, layer, self.r)
        if expected not in (None, rank):
            raise CheckpointError(f"r = {expected}, but the matrices of {layer} have rank {rank}.")
        if self.target_modules and not _named(self.target_modules, layer):
            raise CheckpointError(f"target_modules does not name {layer}, for which there is an adapter.")
        if self.exclude_modules and _named(self.exclude_modules, layer):
            raise CheckpointError(f"exclude_modules names {layer}, for which there is an adapter.")
        alpha = self._alpha(layer)
        return float(rank if alpha is None else alpha) * (rank**0.5 if self.use_rslora else 1.0)


def _without_prefix(layer: str) -> str:
    return layer[_BASE_PREFIX.match(layer).end() :]  # type: ignore[union-attr]


def settings_of(content: Mapping[str, Any], what: str) -> LoraSettings:
    """Return the settings that ``what`` holds; raises CheckpointError, naming the setting, for one not understood."""
    known = {setting.name for setting in fields(LoraSettings)}
    for key, value in content.items():
        off = _ONLY.get(key)
        if key in known | _WITHOUT_EFFECT or (not value if off is None else value in off):
            continue
        raise CheckpointError(
            f"{what}: {key} = {shorten_repr(value)} changes what the adapters mean, and is not supported here. Merge "
            "them with peft, or let it save them as plain LoRA."
        )
    try:
        settings = from_mapping(LoraSettings, {k: v for k, v in content.items() if k in known and v is not None}, what)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    for name, table in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        for value in table.values():
            checked_alpha(value, f"{what}: {name}")
    if settings.lora_alpha is not None:
        checked_alpha(settings.lora_alpha, f"{what}: lora_alpha")
    _check_patterns(settings, what)
    return settings


def checked_alpha(value: Any, what: str) -> float:
    """Return ``value`` as an alpha; raises CheckpointError unless it is a number that leaves weights finite."""
    if type(value) not in (int, float) or not abs(value) <= _MAX_ALPHA:
        raise CheckpointError(f"{what} = {shorten_repr(value)} must be a number of at most {_MAX_ALPHA:g}.")
    return float(value)


def _check_patterns(settings: LoraSettings, what: str) -> None:
    """Raise CheckpointError for a pattern that is no regular expression, or could take for ever to match."""
    modules = [(name, getattr(settings, name)) for name in ("target_modules", "exclude_modules")]
    patterns = [(name, pattern) for name in ("rank_pattern", "alpha_pattern") for pattern in getattr(settings, name)]
    if len(patterns) > _MAX_PATTERNS:
        raise CheckpointError(
            f"{what}: rank_pattern and alpha_pattern have {len(patterns):,} patterns, more than a network has layers."
        )
    for name, pattern in (*patterns, *(module for module in modules if isinstance(module[1], str))):
        try:
            _compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{what}: {name} has {shorten_repr(pattern)}, which is no regular expression: {error}."
            ) from None
        without_escapes = re.sub(r"\\.|\[[^]]*\]", "x", pattern)
        if len(re.findall(r"[*+{]", without_escapes)) > _MAX_REPEATS or re.search(
            r"\)[*+{]|\(\?[^:!=]", without_escapes
        ):
            raise CheckpointError(
                f"{what}: {name} has {shorten_repr(pattern)}, which could take for ever to match. Write it without "
                f"repeated groups, and with at most {_MAX_REPEATS} repeats."
            )


@lru_cache(_MAX_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})")


def _value_for(patterns: Mapping[str, Any], layer: str, common: Any) -> Any:
    """Return what peft takes for a layer: the value of the first pattern that matches the end of its name."""
    return next((value for pattern, value in patterns.items() if _compiled(pattern).fullmatch(layer)), common)


def _named(modules: tuple[str, ...] | str, layer: str) -> bool:
    if isinstance(modules, str):
        return re.fullmatch(modules, layer) is not None
    # (MindSpeed-MM writes its patterns, such as blocks.{*}.fc1)
    return any(matches(pattern, layer) for pattern in modules)
