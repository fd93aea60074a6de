"""What an autoencoder is on paper: sizes, scale and files. Each kind is a class of section ``ae`` of model.json.

Raw latents are what an encoder gives, scaled latents what a model learns.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from mindspeed_mm_dit.configs.files import UnusableFile, check_safetensors, digest_of_files
from mindspeed_mm_dit.configs.limits import check_between, check_path, shown
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import CheckpointError, ConfigError

Shape = tuple[int, ...]
Facts = TypeVar("Facts")
Told = int | float | tuple[float, ...]
"""A setting as config.json tells it."""
WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
"""What diffusers calls the weights in a folder."""
SCALE = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
"""Settings, of those kinds that have them, which decide what a model learns of raw latents."""
_SETTINGS = {"height": "max_height", "width": "max_width"}


@dataclass(frozen=True)
class LatentScale:
    """Scaled latents are (raw - shift) * scale / std; each is one number, or one for each channel."""

    shift: float | tuple[float, ...] = 0.0
    """Taken away from raw latents."""
    scale: float | tuple[float, ...] = 1.0
    """What they are multiplied by then."""
    std: float | tuple[float, ...] = 1.0
    """What they are divided by then; where this is published, to multiply by 1 / std would round otherwise."""


class AutoencoderConfig(ABC):
    """Base of the config classes of section ``ae``: frozen dataclasses with a field ``model_id``."""

    model_id: str
    channels: int = 3
    """Channels of an image or a frame: 1 (grey) or 3 (RGB)."""
    latent_channels: int
    """Channels C of a latent."""
    downsample_factor: int
    """Height of an image over height of its latent."""
    pixel_axes: ClassVar[tuple[int, ...]] = (2,)
    """How many axes, behind the channels, what it encodes has: (2,) images, (3,) videos, (2, 3) both."""
    frameworks: ClassVar[tuple[str, ...]] = ("pytorch", "mindspore")
    """Those that run it."""
    is_cacheable: ClassVar[bool] = True
    """Whether its latents are worth keeping on disk."""
    diffusers_class: ClassVar[str] = ""
    """What diffusers calls it in ``_class_name`` of config.json; empty where it has none."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which it runs."""

    @property
    @abstractmethod
    def samples_posterior(self) -> bool:
        """Whether a training sample is a draw from the posterior, and carries noise for it."""

    @abstractmethod
    def latent_shape(self, size: Shape) -> Shape:
        """Return (C, ...) of the latents of an image of (H, W) pixels or a video of (F, H, W).

        Raises ConfigError for a size that it does not take whole.
        """

    @abstractmethod
    def sample_size(self, latent: Shape) -> Shape:
        """Return (H, W), or (F, H, W), in pixels of what latents (C, ...) are decoded to."""

    def scale(self) -> LatentScale:
        """Return what makes raw latents those that a model learns; raises ConfigError where its files are damaged."""
        return LatentScale()

    def digest(self) -> str:
        """Return the SHA-256 of its files, "" where it has none; raises DataError where they are missing."""
        return ""

    @abstractmethod
    def identity(self) -> str:
        """Return what decides the numbers that it makes: its files, precision, tiles."""

    def check_files(self) -> None:  # noqa: B027 (one without files has nothing to check)
        """Raise a UserError where its files are missing, damaged or contradict model.json; no weights are read."""

    def weight_bytes(self) -> int:
        """Return the bytes of its weights in memory, about."""
        return 0

    def workspace_bytes(self, size: Shape) -> int:
        """Return the bytes that encoding one image or video of ``size`` in pixels takes for a moment, about."""
        return 0

    @classmethod
    def spelled_out(cls, section: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return section ``ae`` with what it leaves to be looked up in files; raises ConfigError if they contradict."""
        return dict(section)


class PretrainedAutoencoderConfig(AutoencoderConfig):
    """One with files as diffusers saves them: weights, and a config.json that tells some settings of the section."""

    from_pretrained: str
    looked_up: ClassVar[tuple[str, ...]]
    """Settings that may be left out of model.json where config.json tells them."""
    weight_name: ClassVar[str]
    """A weight that every file of this kind holds; a longer name may end so."""
    example: ClassVar[str]
    """One on the hub."""

    @classmethod
    @abstractmethod
    def told_by(cls, path: Path, where: str) -> Mapping[str, Told]:
        """Return the settings that the config.json ``path`` tells; raises ConfigError where it is another's."""

    @classmethod
    def spelled_out(cls, section: Mapping[str, Any], where: str = "ae") -> dict[str, Any]:
        """Return the section with what the autoencoder's config.json tells of it.

        A setting of ``looked_up`` that is absent or null takes the file's value, else its default.
        Raises ConfigError where a key of the section contradicts the file.
        """
        given = {key: value for key, value in section.items() if value is not None or key not in cls.looked_up}
        path = given.get("from_pretrained")
        if not isinstance(path, str):
            return given  # (which the section's class refuses)
        check_path(f"{where}.from_pretrained", path)
        if not config_file(path).is_file():
            return given
        for key, told in cls.told_by(config_file(path), where).items():
            if not _agree(given.setdefault(key, told), told):
                raise ConfigError(
                    f"{where}.{key} = {shown(given[key])}",
                    f"contradicts the autoencoder, whose {config_file(path)} makes it {told}",
                    f'write "{key}": {told}, or leave the key out',
                )
        return given

    def digest(self) -> str:
        return digest_of_files(self.from_pretrained)

    def identity(self) -> str:
        """Return the digest of its files and its precision."""
        return f"{self.digest()}, {self.dtype}"

    def check_files(self) -> None:
        """Raise CheckpointError where weights are missing or cut short, ConfigError where config.json contradicts."""
        self.weight_file()

    def weight_file(self) -> Path:
        """Return the weight file of ``from_pretrained``, once what model.json says of it is known to be so.

        Raises:
            CheckpointError: nothing is there, or no weights of such an autoencoder are.
            ConfigError: config.json contradicts model.json (``spelled_out``).
        """
        path = Path(self.from_pretrained)
        if not path.exists():
            raise CheckpointError(
                f"ae.from_pretrained = {path}", "no such file or folder; nothing is downloaded",
                f"put a diffusers {self.diffusers_class} there, e.g. {self.example}, or correct the path",
            )  # fmt: skip
        self.spelled_out(dataclasses.asdict(self))  # type: ignore[call-overload]
        file = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None) if path.is_dir() else path
        if file is None:
            raise CheckpointError(f"ae.from_pretrained = {path}", f"holds none of {', '.join(WEIGHT_FILES)}")
        if file.suffix == ".safetensors":
            self._check_weights(file)
        return file

    def _check_weights(self, file: Path) -> None:
        try:
            names = check_safetensors(file)
        except UnusableFile as problem:
            raise CheckpointError(f"ae.from_pretrained = {file}", str(problem), "copy or download it again") from None
        if not any(name.endswith(self.weight_name) for name in names):
            raise CheckpointError(
                f"ae.from_pretrained = {file}", f"is no {self.diffusers_class}: it has no weight {self.weight_name}",
                f"name one, e.g. {self.example}",
            )  # fmt: skip


def config_file(from_pretrained: str) -> Path:
    """Return where the config.json of the autoencoder in this folder or weight file stands, if it has one."""
    path = Path(from_pretrained)
    return (path if path.is_dir() else path.parent) / "config.json"


def read_facts(facts: type[Facts], path: Path, where: str, diffusers_class: str) -> Facts:
    """Return those keys of a diffusers config.json that ``facts`` has as fields.

    Raises ConfigError where it cannot be read, or is of another class than ``diffusers_class``.
    """
    content = read_json(path, f"{where}.from_pretrained")
    kind = content.get("_class_name", diffusers_class)
    if kind != diffusers_class:
        raise ConfigError(
            f"{where}.from_pretrained = {path}", f"is of {shown(kind)}, not of {diffusers_class}",
            "name the folder of such an autoencoder",
        )  # fmt: skip
    known = {field.name for field in dataclasses.fields(facts)}  # type: ignore[arg-type]
    return from_mapping(facts, {key: content[key] for key in content if key in known}, str(path))


def _agree(given: Any, told: Told) -> bool:
    if isinstance(told, tuple):
        return isinstance(given, (list, tuple)) and len(given) == len(told) and all(map(_agree, given, told))
    return isinstance(given, (int, float)) and math.isclose(given, told)


def check_scale(scaling_factor: float, shift_factor: float) -> None:
    """Raise ConfigError for settings of section ``ae`` that no latents are scaled and shifted by."""
    if not 1e-6 <= abs(scaling_factor) <= 1e6:
        raise ConfigError(
            f"ae.scaling_factor = {scaling_factor}",
            "must be a number other than 0, and neither tiny nor huge",
            "use the one in the autoencoder's config.json; Stable Diffusion's has 0.18215",
        )
    check_between("ae.shift_factor", shift_factor, -1e6, 1e6, "FLUX has 0.1159, Stable Diffusion 0")


def check_statistics(mean: Sequence[float] | None, std: Sequence[float] | None, channels: int) -> None:
    """Raise ConfigError unless ``mean`` and ``std`` have a number for each channel, the latter positive ones."""
    for name, values in (("latents_mean", mean), ("latents_std", std)):
        if values is None:
            continue
        if len(values) != channels:
            raise ConfigError(f"ae.{name}", f"has {len(values)} numbers, and a latent {channels} channels")
        if not all(map(math.isfinite, values)) or (name == "latents_std" and min(values) <= 0):
            raise ConfigError(f"ae.{name} = {shown(list(values))}", "must be numbers, and deviations positive ones")


def divided(size: Shape, factor: int) -> Shape:
    """Return (h, w), the last two of ``size`` in pixels divided by ``factor``; raises ConfigError if they cannot be."""
    height, width = size[-2:]
    for name, side in (("height", height), ("width", width)):
        if side % factor:
            setting = "image_size" if size == (height, height) else _SETTINGS[name]
            lower = side - side % factor
            raise ConfigError(
                f"dataset_param.{setting} = {side}",
                f"is no multiple of the autoencoder's factor: {side} % {factor} = {side % factor}",
                f"use {f'{lower} or ' if lower else ''}{lower + factor}",
            )
    return height // factor, width // factor


@dataclass(frozen=True)
class PixelConfig(AutoencoderConfig):
    """Section ``ae`` with ``model_id`` "pixel": no autoencoder, the images, or the videos, are the latents."""

    channels: int = 3
    """Channels of an image or a frame: 1 (grey) or 3 (RGB)."""
    model_id: str = "pixel"
    """Key in AE_MODEL_MAPPINGS."""

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
