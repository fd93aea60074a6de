"""Section ``ae`` with diffusers' AutoencoderKL, and what the autoencoder's own config.json says of its latents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm_dit.configs.autoencoder import LatentScale, PretrainedAutoencoderConfig, Shape, divided
from mindspeed_mm_dit.configs.limits import check_path, require_positive, shown
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import CheckpointError, ConfigError

_LOOKED_UP = ("downsample_factor", "latent_channels", "scaling_factor")
_WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
_PARAMETERS = 83_653_863
"""Of Stable Diffusion's autoencoder (8x, 4 channels)."""
_WIDTH, _LIVE = 128, 4
"""Its widest feature map has the image's size and so many channels; so many of them are alive at once."""


@dataclass(frozen=True)
class AutoencoderKLConfig(PretrainedAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_kl": diffusers' AutoencoderKL, frozen."""

    from_pretrained: str
    """Local diffusers folder (config.json and weights), or one .safetensors/.bin/.pt/.ckpt file of it."""
    scaling_factor: float = 0.18215
    """Latents are multiplied by this before diffusion, to have about unit variance. Like the two sizes below it may be
    left out of model.json: the autoencoder's config.json then says it (:func:`with_latent_facts`)."""
    latent_channels: int = 4
    """Channels of a latent."""
    downsample_factor: int = 8
    """Height of an image over height of its latent."""
    sample_posterior: bool = True
    """Train on a draw from the posterior (as published) or, if false, on its mean."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the autoencoder runs."""
    model_id: str = "autoencoder_kl"
    """Key in AE_MODEL_MAPPINGS."""

    diffusers_class = "AutoencoderKL"

    def __post_init__(self) -> None:
        check_path("ae.from_pretrained", self.from_pretrained)
        require_positive(self, "ae", "latent_channels", "downsample_factor")
        if not 1e-6 <= abs(self.scaling_factor) <= 1e6:
            raise ConfigError(
                f"ae.scaling_factor = {self.scaling_factor}",
                "must be a number other than 0, and neither tiny nor huge",
                "use the one in the autoencoder's config.json; Stable Diffusion's has 0.18215",
            )

    @property
    def samples_posterior(self) -> bool:
        """Whether a training sample carries posterior noise."""
        return self.sample_posterior

    def latent_shape(self, size: Shape) -> Shape:
        """Return (C, h, w) of the latents of an image of (H, W) pixels; raises ConfigError for what is no multiple."""
        return self.latent_channels, *divided(size, self.downsample_factor)

    def sample_size(self, latent: Shape) -> Shape:
        """Return (H, W) of the image that latents (C, h, w) are decoded to."""
        return tuple(side * self.downsample_factor for side in latent[1:])

    def scale(self) -> LatentScale:
        """Return the factor of the section."""
        return LatentScale(scale=self.scaling_factor)

    def check_files(self) -> None:
        """Raise CheckpointError where nothing is there, ConfigError where config.json contradicts model.json."""
        self.weight_file()

    def weight_file(self) -> Path:
        """Return the weight file of ``from_pretrained``, once what model.json says of it is known to be so.

        Raises:
            CheckpointError: nothing is there, or no weights are.
            ConfigError: config.json contradicts model.json (:func:`with_latent_facts`).
        """
        path = Path(self.from_pretrained)
        if not path.exists():
            raise CheckpointError(
                f"ae.from_pretrained = {path}", "no such file or folder; nothing is downloaded",
                "put a diffusers AutoencoderKL there, e.g. stabilityai/sd-vae-ft-ema, or correct the path",
            )  # fmt: skip
        with_latent_facts(dataclasses.asdict(self))
        if not path.is_dir():
            return path
        for name in _WEIGHT_FILES:
            if (path / name).is_file():
                return path / name
        raise CheckpointError(f"ae.from_pretrained = {path}", f"holds none of {', '.join(_WEIGHT_FILES)}")

    def weight_bytes(self) -> int:
        """Return the bytes of Stable Diffusion's."""
        return _PARAMETERS * self._element_bytes

    def workspace_bytes(self, size: Shape) -> int:
        """Return the bytes of the widest feature maps of one image."""
        return _LIVE * _WIDTH * math.prod(size) * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @classmethod
    def spelled_out(cls, section: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return :func:`with_latent_facts`."""
        return with_latent_facts(section, where)


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
