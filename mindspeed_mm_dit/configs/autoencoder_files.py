"""What the config.json of a diffusers autoencoder says of its latents; model.json need not say it again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.limits import check_path, shown
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import ConfigError

_LOOKED_UP = ("downsample_factor", "latent_channels", "scaling_factor")


@dataclass(frozen=True)
class LatentFacts:
    """The keys of diffusers' config.json that decide what latents are; null where it does not say."""

    block_out_channels: tuple[int, ...] | None = None
    """Width of each level; each level after the first halves height and width."""
    latent_channels: int | None = None
    """Channels of a latent."""
    scaling_factor: float | None = None
    """Latents are multiplied by this before diffusion, to have about unit variance."""
    shift_factor: float | None = None
    """Subtracted from the latents before that; only null and 0 are known here."""

    def settings(self) -> dict[str, int | float]:
        """Return the settings of the ae section of model.json that are told, by their names there."""
        factor = 2 ** (len(self.block_out_channels) - 1) if self.block_out_channels else None
        told = dict(zip(_LOOKED_UP, (factor, self.latent_channels, self.scaling_factor)))
        return {name: value for name, value in told.items() if value is not None}


def config_file(from_pretrained: str) -> Path:
    """Return where the config.json of the autoencoder in this folder or weight file stands, if it has one."""
    path = Path(from_pretrained)
    return (path if path.is_dir() else path.parent) / "config.json"


def with_latent_facts(section: Mapping[str, Any], where: str = "ae") -> dict[str, Any]:
    """Return the ae section of model.json with what the autoencoder's config.json says of factor, channels and scale.

    One of them that is absent or null takes the file's value or, where that does not tell, Stable Diffusion's.

    Raises:
        ConfigError: a key of the section contradicts the file, or its latents are shifted.
    """
    given = {key: value for key, value in section.items() if value is not None or key not in _LOOKED_UP}
    path = given.get("from_pretrained")
    if not isinstance(path, str):
        return given  # (which the section's class refuses)
    check_path(f"{where}.from_pretrained", path)
    if not config_file(path).is_file():
        return given
    facts = _read(config_file(path), where)
    if facts.shift_factor:
        raise ConfigError(
            f"{config_file(path)}: shift_factor = {facts.shift_factor}", "latents that are shifted are not supported",
            "use an autoencoder without a shift, e.g. stabilityai/sd-vae-ft-ema",
        )  # fmt: skip
    for key, told in facts.settings().items():
        if not _agree(given.setdefault(key, told), told):
            raise ConfigError(
                f"{where}.{key} = {shown(given[key])}",
                f"contradicts the autoencoder, whose {config_file(path)} makes it {told}",
                f'write "{key}": {told}, or leave the key out',
            )
    return given


def _read(path: Path, where: str) -> LatentFacts:
    content = read_json(path, f"{where}.from_pretrained")
    known = {field.name for field in dataclasses.fields(LatentFacts)}
    return from_mapping(LatentFacts, {key: content[key] for key in content if key in known}, str(path))


def _agree(given: Any, told: float) -> bool:
    return isinstance(given, (int, float)) and math.isclose(given, told)
