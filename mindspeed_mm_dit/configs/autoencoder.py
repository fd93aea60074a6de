"""Settings of autoencoders: sizes, scale and files. Each kind has a config class for section ``ae`` of model.json.

"Raw" latents are the encoder's output; "scaled" latents are what the diffusion model learns.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from mindspeed_mm_dit.configs.files import (
    UnusableFile,
    digest_of_files,
    how_to_fetch,
    read_safetensors_header,
    weight_file_in,
)
from mindspeed_mm_dit.configs.foreign_code import check_names_no_code
from mindspeed_mm_dit.configs.limits import check_between, check_path, short_repr
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import CheckpointError, ConfigError

Shape = tuple[int, ...]
Facts = TypeVar("Facts")
ConfigValue = int | float | tuple[float, ...]
"""A setting read from config.json."""
WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
"""Names of diffusers' weight files."""
SCALE = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
"""Settings that turn raw latents into scaled ones; each kind of autoencoder has some of them."""
_SETTINGS = {"height": "max_height", "width": "max_width"}


@dataclass(frozen=True)
class LatentScale:
    """How raw latents become scaled latents: (raw - shift) * scale / std.

    Each is one number, or one per channel.
    """

    shift: float | tuple[float, ...] = 0.0
    """Subtracted from raw latents."""
    scale: float | tuple[float, ...] = 1.0
    """Multiplied in next."""
    std: float | tuple[float, ...] = 1.0
    """Divided by last. Published code divides too; multiplying by 1 / std would round differently."""


class AutoencoderConfig(ABC):
    """Base of the config classes of section ``ae``: frozen dataclasses with a field ``model_id``."""

    model_id: str
    """Kind of autoencoder."""
    channels: int = 3
    """Channels of an image or a frame: 1 (grey) or 3 (RGB)."""
    latent_channels: int
    """Channels C of a latent."""
    downsample_factor: int
    """Height of an image over height of its latent."""
    pixel_axes: ClassVar[tuple[int, ...]] = (2,)
    """Number of axes after the channels of what it encodes: (2,) images, (3,) videos, (2, 3) both."""
    frameworks: ClassVar[tuple[str, ...]] = ("pytorch", "mindspore")
    """Frameworks that can run it."""
    is_cacheable: ClassVar[bool] = True
    """Whether its latents are worth caching on disk."""
    diffusers_class: ClassVar[str] = ""
    """Its class in diffusers (``_class_name`` of config.json); empty if it has none."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which it runs."""

    @property
    @abstractmethod
    def samples_posterior(self) -> bool:
        """Whether training samples latents from the posterior, so that each sample needs noise for it."""

    @abstractmethod
    def latent_shape(self, size: Shape) -> Shape:
        """Return (C, ...) of the latents of an image of (H, W) pixels or a video of (F, H, W).

        Raises ConfigError for a size that is not a multiple of its factor.
        """

    @abstractmethod
    def sample_size(self, latent: Shape) -> Shape:
        """Return the size (H, W) or (F, H, W), in pixels, that latents (C, ...) decode to."""

    def scale(self) -> LatentScale:
        """Return how raw latents are scaled; raises ConfigError if the autoencoder's files are damaged."""
        return LatentScale()

    def digest(self) -> str:
        """Return the SHA-256 of its files, or "" if it has none; raises DataError if they are missing."""
        return ""

    @abstractmethod
    def identity(self) -> str:
        """Return everything that decides its output, as text: its files, precision, tiles."""

    def check_files(self) -> None:  # noqa: B027 (an autoencoder without files has nothing to check)
        """Raise a UserError if its files are missing, damaged or contradict model.json; reads no weights."""

    def weight_bytes(self) -> int:
        """Return approximately how many bytes its weights take in memory."""
        return 0

    def workspace_bytes(self, size: Shape) -> int:
        """Return approximately how many temporary bytes it takes to encode one image or video of ``size`` pixels."""
        return 0

    @classmethod
    def spelled_out(cls, section: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return section ``ae`` with missing settings filled in from files; raises ConfigError if they contradict."""
        return dict(section)


class PretrainedAutoencoderConfig(AutoencoderConfig):
    """Base of the autoencoders that diffusers saves: weights, and a config.json with some settings of the section."""

    from_pretrained: str
    looked_up: ClassVar[tuple[str, ...]]
    """Settings that model.json may leave out if config.json has them."""
    weight_name: ClassVar[str]
    """Name of a weight that every file of this kind contains, possibly with a prefix."""
    example: ClassVar[str]
    """An example on the Hugging Face hub."""

    @property
    def such_as(self) -> str:
        """The example, for a message; the number of channels instead if model.json has another one."""
        is_usual = self.latent_channels == type(self).latent_channels
        return f" such as {self.example}" if is_usual else f" with {self.latent_channels} latent channels"

    @classmethod
    @abstractmethod
    def settings_from_config(cls, path: Path, where: str) -> Mapping[str, ConfigValue]:
        """Return the settings found in the config.json ``path``; raises ConfigError if it is of another class."""

    @classmethod
    def spelled_out(cls, section: Mapping[str, Any], where: str = "ae") -> dict[str, Any]:
        """Return the section with missing settings filled in from the autoencoder's config.json.

        A setting of ``looked_up`` that is absent or null takes the file's value, else its default.
        Raises ConfigError if a key of the section contradicts the file.
        """
        settings = {key: value for key, value in section.items() if value is not None or key not in cls.looked_up}
        path = settings.get("from_pretrained")
        if not isinstance(path, str):
            return settings  # (the section's class reports it)
        check_path(f"{where}.from_pretrained", path)
        if not config_file(path).is_file():
            return settings
        for key, expected in cls.settings_from_config(config_file(path), where).items():
            if not _agree(settings.setdefault(key, expected), expected):
                raise ConfigError(
                    f"{where}.{key} = {short_repr(settings[key])}",
                    f"contradicts the autoencoder, whose {config_file(path)} makes it {expected}",
                    f'write "{key}": {expected}, or leave the key out',
                )
        return settings

    def digest(self) -> str:
        return digest_of_files(self.from_pretrained)

    def identity(self) -> str:
        """Return the digest of its files and its precision."""
        return f"{self.digest()}, {self.dtype}"

    def check_files(self) -> None:
        """Raise CheckpointError if weights are missing or truncated, ConfigError if config.json contradicts."""
        self.weight_file()

    def weight_file(self) -> Path:
        """Return the weight file of ``from_pretrained``, after checking it against model.json.

        Raises:
            CheckpointError: the path does not exist, or has no weights of this kind.
            ConfigError: config.json contradicts model.json (``spelled_out``), or names code.
        """
        path = Path(self.from_pretrained)
        if not path.exists():
            command = how_to_fetch(path) or f"put a diffusers {self.diffusers_class}{self.such_as} there (mm-dit get)"
            raise CheckpointError(
                f"ae.from_pretrained = {path}",
                "no such file or folder; nothing is downloaded",
                f"{command}, or correct the path",
            )
        if path.is_dir():
            check_names_no_code("ae.from_pretrained", path)
        self.spelled_out(dataclasses.asdict(self))  # type: ignore[call-overload]
        try:
            file = weight_file_in(path, WEIGHT_FILES).path if path.is_dir() else path
        except UnusableFile as problem:
            raise CheckpointError(f"ae.from_pretrained = {path}", str(problem)) from None
        if file.suffix == ".safetensors":
            self._check_weights(file)
        return file

    def _check_weights(self, file: Path) -> None:
        try:
            names = read_safetensors_header(file).tensors
        except UnusableFile as problem:
            raise CheckpointError(
                f"ae.from_pretrained = {file}", str(problem), "copy or download the file again"
            ) from None
        if not any(name.endswith(self.weight_name) for name in names):
            raise CheckpointError(
                f"ae.from_pretrained = {file}",
                f"holds no {self.diffusers_class}: it has no weight {self.weight_name}",
                f"name one{self.such_as}",
            )


def config_file(from_pretrained: str) -> Path:
    """Return the path where the autoencoder in this folder or weight file would have its config.json."""
    path = Path(from_pretrained)
    return (path if path.is_dir() else path.parent) / "config.json"


def read_facts(facts: type[Facts], path: Path, where: str, diffusers_class: str) -> Facts:
    """Return the keys of a diffusers config.json that are fields of ``facts``.

    Raises ConfigError if it cannot be read, or is of another class than ``diffusers_class``.
    """
    content = read_json(path, f"{where}.from_pretrained")
    kind = content.get("_class_name", diffusers_class)
    if kind != diffusers_class:
        raise ConfigError(
            f"{where}.from_pretrained = {path}",
            f"is of class {short_repr(kind)}, not {diffusers_class}",
            f"name the folder of an {diffusers_class}",
        )
    known = {field.name for field in dataclasses.fields(facts)}  # type: ignore[arg-type]
    return from_mapping(facts, {key: content[key] for key in content if key in known}, str(path))


def _agree(actual: Any, expected: ConfigValue) -> bool:
    if isinstance(expected, tuple):
        return isinstance(actual, (list, tuple)) and len(actual) == len(expected) and all(map(_agree, actual, expected))
    return isinstance(actual, (int, float)) and math.isclose(actual, expected)


def check_scale(scaling_factor: float, shift_factor: float) -> None:
    """Raise ConfigError for a scale or shift that is out of range."""
    if not 1e-6 <= abs(scaling_factor) <= 1e6:
        raise ConfigError(
            f"ae.scaling_factor = {scaling_factor}",
            "must have a magnitude from 1e-6 to 1e6",
            "use the value in the autoencoder's config.json; Stable Diffusion has 0.18215",
        )
    check_between("ae.shift_factor", shift_factor, -1e6, 1e6, "FLUX has 0.1159, Stable Diffusion 0")


def check_statistics(mean: Sequence[float] | None, std: Sequence[float] | None, channels: int) -> None:
    """Raise ConfigError unless ``mean`` and ``std`` have one number per channel, and those of ``std`` are positive."""
    for name, values in (("latents_mean", mean), ("latents_std", std)):
        if values is None:
            continue
        if len(values) != channels:
            raise ConfigError(f"ae.{name}", f"has {len(values)} numbers, but a latent has {channels} channels")
        if not all(map(math.isfinite, values)) or (name == "latents_std" and min(values) <= 0):
            raise ConfigError(
                f"ae.{name} = {short_repr(list(values))}",
                "must be finite numbers, and standard deviations must be positive",
            )


def divided(size: Shape, factor: int) -> Shape:
    """Return (h, w): height and width of ``size`` divided by ``factor``; raises ConfigError if it does not divide."""
    height, width = size[-2:]
    for name, side in (("height", height), ("width", width)):
        if side % factor:
            setting = "image_size" if size == (height, height) else _SETTINGS[name]
            lower = side - side % factor
            raise ConfigError(
                f"dataset_param.{setting} = {side}",
                f"is not a multiple of the autoencoder's factor: {side} % {factor} = {side % factor}",
                f"use {f'{lower} or ' if lower else ''}{lower + factor}",
            )
    return height // factor, width // factor


@dataclass(frozen=True)
class PixelConfig(AutoencoderConfig):
    """Section ``ae`` with ``model_id`` "pixel": no autoencoder; the images or videos themselves are the latents."""

    channels: int = 3
    model_id: str = "pixel"

    downsample_factor = 1
    samples_posterior = False
    pixel_axes = (2, 3)
    is_cacheable = False

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ConfigError(f"ae.channels = {self.channels}", "images are grey (1) or RGB (3)")

    @property
    def latent_channels(self) -> int:  # type: ignore[override]
        """Channels of a latent."""
        return self.channels

    def latent_shape(self, size: Shape) -> Shape:
        return self.channels, *size

    def sample_size(self, latent: Shape) -> Shape:
        return latent[1:]

    def identity(self) -> str:
        return f"{self.model_id}, {self.channels} channels"
