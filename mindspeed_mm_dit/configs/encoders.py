"""The two sections of model.json that a cache of clips is made with: ``ae`` and ``text_encoder``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.errors import ConfigError


class Encoders(NamedTuple):
    """What turns clips and captions into what a model of text to video learns."""

    ae: WanVAEConfig
    """Frames to latents."""
    text_encoder: TextEncoderConfig
    """Captions to states."""


def load_encoders(path: str | Path, flag: str = "--model") -> Encoders:
    """Read the sections of the model.json that ``flag`` names; its other sections are not looked at.

    Raises:
        ConfigError: one is missing, or has a key or value that is not known.
    """
    content = read_json(path, flag)
    return Encoders(
        from_mapping(WanVAEConfig, _section(content, "ae", path), f"{path}: ae"),
        from_mapping(TextEncoderConfig, _section(content, "text_encoder", path), f"{path}: text_encoder"),
    )


def _section(content: dict[str, Any], name: str, path: str | Path) -> Any:
    if name not in content:
        raise ConfigError(f"{path}: {name}", "this section is required for clips and missing")
    return content[name]
