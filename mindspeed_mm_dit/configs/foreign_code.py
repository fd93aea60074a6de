"""Refuses model folders whose config files name code, which transformers, diffusers or peft would fetch and run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.strict import read_any_json
from mindspeed_mm_dit.errors import ConfigError

_NAMES_CODE = (
    *("auto_map", "trust_remote_code", "custom_pipelines", "quantization_config", "base_model_name_or_path"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    *("use_kernels", "kernel_config", "allow_all_kernels"),
)
"""Keys of config files with which transformers, diffusers or peft run other code, fetch kernels, or read another model
than the folder's. CVE-2026-4372: transformers 4.56 to 5.2 run the code that ``_attn_implementation_internal`` names."""
_BUILT_IN_ATTENTION = ("eager", "sdpa")
"""Attention implementations without external kernels."""


def check_names_no_code(setting: str, folder: Path) -> None:
    """Raise ConfigError if a config file in ``folder``, which ``setting`` named, names code to run or to fetch."""
    for file in sorted(folder.glob("*config.json")):
        for key, value in _pairs(read_any_json(file, setting)):
            if key in _NAMES_CODE and value and value not in _BUILT_IN_ATTENTION:
                raise ConfigError(
                    f"{setting} = {file}: {key} = {short_repr(value)}",
                    "names code, which is never run or fetched",
                    "remove the key if the folder works without it, or name another folder",
                )


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a JSON object, and those of all objects inside it."""
    for key, inside in value.items() if isinstance(value, dict) else ():
        yield key, inside
        yield from _pairs(inside)
    for entry in value if isinstance(value, list) else ():
        yield from _pairs(entry)
