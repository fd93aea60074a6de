"""Settings of autoencoders: sizes, scale and files. Each kind has a config class for section ``ae`` of model.json.

"Raw" latents are the encoder's output; "scaled" latents are what the diffusion model learns.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np

from mindspeed_mm_dit.configs.files import (
    UnusableFile,
    check_names_no_code,
    digest_of_files,
    fetch_command,
    read_floats,
    read_safetensors_header,
    weight_file_in,
)
from mindspeed_mm_dit.configs.limits import Between, PathText, Positive, Section, check_path, shorten_repr
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


class AutoencoderConfig(Section, ABC):
    """Base of the config classes of section ``ae``: frozen dataclasses with a field ``model_id``."""

    section = "ae"
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

    def latent_shape(self, size: Shape) -> Shape:
        """Return (C, ...) of the latents of an image of (H, W) pixels or a video of (F, H, W).

        Raises ConfigError for a size that is not a multiple of its factor.
        """
        return self.latent_channels, *divided(size, self.downsample_factor)

    def sample_size(self, latent: Shape) -> Shape:
        """Return the size (H, W) or (F, H, W), in pixels, that latents (C, ...) decode to."""
        return tuple(side * self.downsample_factor for side in latent[1:])

    def scale(self) -> LatentScale:
        """Return how raw latents are scaled; raises ConfigError if the autoencoder's files are damaged."""
        return LatentScale()

    def digest(self) -> str:
        """Return the SHA-256 of its files, or "" if it has none; raises DataError if they are missing."""
        return ""

    @abstractmethod
    def identity(self) -> str:
        """Return everything that decides its output, as text: its files, precision, tiles."""

    def check_files(self) -> None:
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

    facts: ClassVar[type[Any]]
    """The keys of config.json that describe the latents: a dataclass with a method ``settings``."""

    @classmethod
    def settings_from_config(cls, path: Path, where: str) -> Mapping[str, ConfigValue]:
        """Return the settings found in the config.json ``path``; raises ConfigError if it is of another class."""
        settings: Mapping[str, ConfigValue] = read_facts(cls.facts, path, where, cls.diffusers_class).settings()
        return settings

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
                shown = list(expected) if isinstance(expected, tuple) else expected
                raise ConfigError(
                    f"{where}.{key} = {shorten_repr(settings[key])} contradicts the autoencoder, whose "
                    f'{config_file(path)} makes it {shown}. Write "{key}": {shown}, or leave the key out.'
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
            put = f"Put a diffusers {self.diffusers_class}{self.such_as} there (mm-dit get), or correct the path."
            raise CheckpointError(
                f"ae.from_pretrained = {path} does not exist, and nothing is downloaded. {fetch_command(path) or put}"
            )
        if path.is_dir():
            check_names_no_code("ae.from_pretrained", path)
        self.spelled_out(dataclasses.asdict(self))  # type: ignore[call-overload]
        try:
            file = weight_file_in(path, WEIGHT_FILES).path if path.is_dir() else path
        except UnusableFile as problem:
            raise CheckpointError(f"ae.from_pretrained = {path} {problem}. Copy it again.") from None
        if file.suffix == ".safetensors":
            self._check_weights(file)
        return file

    def _check_weights(self, file: Path) -> None:
        try:
            names = read_safetensors_header(file).tensors
        except UnusableFile as problem:
            raise CheckpointError(f"ae.from_pretrained = {file} {problem}. Copy or download the file again.") from None
        if not any(name.endswith(self.weight_name) for name in names):
            raise CheckpointError(
                f"ae.from_pretrained = {file} holds no {self.diffusers_class}: it has no weight {self.weight_name}. "
                f"Name one{self.such_as}."
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
            f"{where}.from_pretrained = {path} is of class {shorten_repr(kind)}, not {diffusers_class}. Name the "
            f"folder of an {diffusers_class}."
        )
    known = {field.name for field in dataclasses.fields(facts)}  # type: ignore[arg-type]
    return from_mapping(facts, {key: content[key] for key in content if key in known}, str(path))


def _agree(actual: Any, expected: ConfigValue) -> bool:
    if isinstance(expected, tuple):
        return isinstance(actual, (list, tuple)) and len(actual) == len(expected) and all(map(_agree, actual, expected))
    return isinstance(actual, (int, float)) and math.isclose(actual, expected)


def check_statistics(mean: Sequence[float] | None, std: Sequence[float] | None, channels: int) -> None:
    """Raise ConfigError unless ``mean`` and ``std`` have one number per channel, and those of ``std`` are positive."""
    for name, values in (("latents_mean", mean), ("latents_std", std)):
        if values is None:
            continue
        if len(values) != channels:
            raise ConfigError(f"ae.{name} has {len(values)} numbers, but a latent has {channels} channels.")
        if not all(map(math.isfinite, values)) or (name == "latents_std" and min(values) <= 0):
            raise ConfigError(
                f"ae.{name} = {shorten_repr(list(values))} must be finite numbers, and standard deviations must be "
                "positive."
            )


def divided(size: Shape, factor: int) -> Shape:
    """Return (h, w): height and width of ``size`` divided by ``factor``; raises ConfigError if it does not divide."""
    height, width = size[-2:]
    for name, side in (("height", height), ("width", width)):
        if side % factor:
            setting = "image_size" if size == (height, height) else _SETTINGS[name]
            lower = side - side % factor
            raise ConfigError(
                f"dataset_param.{setting} = {side} is not a multiple of the autoencoder's factor: {side} % {factor} "
                f"= {side % factor}. Use {f'{lower} or ' if lower else ''}{lower + factor}."
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
            raise self.error("channels", "must be 1 for grey images, or 3 for RGB.")

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


_Factor = Annotated[int, Between(1, 4096)]


@dataclass(frozen=True)
class TilingParam(Section):
    """Section ``tiling_param``: how large frames are split into overlapping tiles, in pixels, multiples of 8."""

    tile_sample_min_height: int = 256
    """Height of a tile, in pixels; frames up to this height are not split."""
    tile_sample_min_width: int = 256
    """Width of a tile, in pixels; frames up to this width are not split."""
    tile_sample_stride_height: int = 192
    """Pixels from the top of one tile to the top of the next; where tiles overlap they are blended. At least 1, at most
    the height of a tile."""
    tile_sample_stride_width: int = 192
    """Pixels from the left of one tile to the left of the next. At least 1, at most the width of a tile."""

    section = "tiling_param"

    def __post_init__(self) -> None:
        for side in ("height", "width"):
            tile, stride = getattr(self, f"tile_sample_min_{side}"), f"tile_sample_stride_{side}"
            if not 1 <= getattr(self, stride) <= tile:
                raise self.error(
                    stride,
                    f"must be at least 1 and at most tile_sample_min_{side} = {tile}, or tiles leave gaps. "
                    "MindSpeed-MM's examples have 192 of 256.",
                )


@dataclass(frozen=True)
class WanLatentFacts:
    """The keys of diffusers' config.json that describe the latents, with diffusers' defaults."""

    latents_mean: tuple[float, ...]
    """Mean of each channel over the autoencoder's training data."""
    latents_std: tuple[float, ...]
    """Standard deviation of each channel."""
    z_dim: int = 16
    """Channels of a latent."""
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    """Width of each level; each level after the first halves height and width."""
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    """For each level after the first, whether it halves the number of frames too."""
    patch_size: int | None = None
    """Height and width of the patches that become channels before the first level."""

    def __post_init__(self) -> None:
        if not len(self.latents_mean) == len(self.latents_std) == self.z_dim or min(self.latents_std, default=0) <= 0:
            raise ConfigError(
                f"latents_mean, latents_std must be {self.z_dim} numbers each, and the latter positive. Copy the "
                "autoencoder again."
            )

    def settings(self) -> dict[str, int | float]:
        """Return the settings of section ``ae`` in config.json. (diffusers ignores its ``scale_factor_*``.)"""
        spatial = 2 ** (len(self.dim_mult) - 1) * (self.patch_size or 1)
        temporal = 2 ** sum(self.temperal_downsample[: len(self.dim_mult) - 1])
        return {"latent_channels": self.z_dim, "spatial_factor": spatial, "temporal_factor": temporal}


@dataclass(frozen=True)
class WanVAEConfig(PretrainedAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "wan_video_vae": diffusers' AutoencoderKLWan, frozen."""

    from_pretrained: PathText
    """Local diffusers folder: config.json and weights."""
    latent_channels: _Factor = 16
    spatial_factor: _Factor = 8
    """Height of a frame divided by height of its latent."""
    temporal_factor: _Factor = 4
    """Frames per latent frame; the first latent frame encodes a single frame."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    do_sample: bool = False
    """Train on a sample of the posterior or, if false, on its mean, as Wan does."""
    enable_tiling: bool = False
    """Encode and decode large frames in tiles. This needs less memory and changes the result slightly."""
    tiling_param: dict | None = field(default=None, hash=False)
    """Keys of :class:`TilingParam`; null for its defaults."""
    norm_latents: Literal[True] = True
    """Normalise the latents; MindSpeed-MM's key, which must be true here."""
    norm_mode: Literal["channel_specified_shift_scale"] = "channel_specified_shift_scale"
    """Normalise by the mean and standard deviation of each channel, from the autoencoder's config.json."""
    model_id: Literal["wan_video_vae"] = "wan_video_vae"
    """MindSpeed-MM's name for it."""

    pixel_axes = (3,)
    frameworks = ("pytorch",)
    diffusers_class, weight_name, facts = "AutoencoderKLWan", "decoder.conv_in.weight", WanLatentFacts
    looked_up = ("latent_channels", "spatial_factor", "temporal_factor")
    example = "the vae/ of Wan-AI/Wan2.1-T2V-1.3B-Diffusers"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiling()

    @property
    def samples_posterior(self) -> bool:
        return self.do_sample

    def tiling(self) -> TilingParam:
        """Return the tiling settings; raises ConfigError for invalid ones."""
        return from_mapping(TilingParam, self.tiling_param or {}, "ae: tiling_param")

    def latent_shape(self, size: Shape) -> Shape:
        """Return the shape (C, f, h, w) of the latents of a video (F, H, W): F frames of H x W pixels.

        Raises:
            ConfigError: the autoencoder would drop frames, or height or width is not a multiple of its factor.
        """
        frames = size[0]
        if left := (frames - 1) % self.temporal_factor:
            each = self.temporal_factor
            raise ConfigError(
                f"dataset_param.num_frames = {frames} does not fit the autoencoder, which encodes one frame, then "
                f"{each} at a time, and would drop the last {left}. Use {frames - left} or {frames - left + each}."
            )
        f = (frames - 1) // self.temporal_factor + 1
        return self.latent_channels, f, *divided(size, self.spatial_factor)

    def sample_size(self, latent: Shape) -> Shape:
        _, frames, height, width = latent
        return 1 + (frames - 1) * self.temporal_factor, height * self.spatial_factor, width * self.spatial_factor

    @property
    def downsample_factor(self) -> int:  # type: ignore[override]
        """Height of a frame divided by height of its latent."""
        return self.spatial_factor

    def scale(self) -> LatentScale:
        """Return the scaling by mean and standard deviation of each channel, from the autoencoder's config.json."""
        facts = read_latent_facts(self)
        return LatentScale(shift=facts.latents_mean, std=facts.latents_std)

    def identity(self) -> str:
        """Return the digest of its files, its precision and its tiles."""
        tiles = f", tiles {tuple(dataclasses.asdict(self.tiling()).values())}" if self.enable_tiling else ""
        return f"{super().identity()}{tiles}"


@dataclass(frozen=True)
class QwenImageVAEConfig(WanVAEConfig):
    """Section ``ae`` with ``model_id`` "qwen_image_vae": diffusers' AutoencoderKLQwenImage, frozen; an image is a video
    of one frame."""

    model_id: Literal["qwen_image_vae"] = "qwen_image_vae"  # type: ignore[assignment]

    pixel_axes = (2,)
    diffusers_class = "AutoencoderKLQwenImage"
    example = "the vae/ of Qwen/Qwen-Image"

    latent_shape, sample_size = AutoencoderConfig.latent_shape, AutoencoderConfig.sample_size


def read_latent_facts(config: WanVAEConfig) -> WanLatentFacts:
    """Read the autoencoder's config.json; no weights are read.

    Raises:
        ConfigError: it is missing, belongs to another autoencoder, or contradicts model.json.
    """
    facts = read_facts(WanLatentFacts, config_file(config.from_pretrained), "ae", config.diffusers_class)
    config.spelled_out(dataclasses.asdict(config))
    return facts


_PARAMETERS = 83_653_863
"""Number of parameters of Stable Diffusion's autoencoder (8x, 4 channels)."""
_WIDTH, _LIVE = 128, 4
"""Channels of its widest feature maps, which have the image's size, and how many of them are alive at once."""


@dataclass(frozen=True)
class LatentFacts:
    """The keys of diffusers' config.json that describe the latents; null if it does not have them."""

    block_out_channels: tuple[int, ...] | None = None
    """Width of each level; each level after the first halves height and width."""
    encoder_block_out_channels: tuple[int, ...] | None = None
    """The same, for autoencoders without a posterior."""
    latent_channels: int | None = None
    """Channels of a latent."""
    scaling_factor: float | None = None
    """Latents are multiplied by this before diffusion, to have about unit variance."""
    shift_factor: float | None = None
    """Subtracted from the latents before that."""
    latents_mean: tuple[float, ...] | None = None
    """Mean of each channel, subtracted instead of ``shift_factor``."""
    latents_std: tuple[float, ...] | None = None
    """Standard deviation of each channel, which latents are divided by."""

    def settings(self) -> dict[str, ConfigValue]:
        """Return the settings of section ``ae`` that config.json has, by their names in model.json."""
        widths = self.encoder_block_out_channels or self.block_out_channels
        settings = {"downsample_factor": 2 ** (len(widths) - 1) if widths else None}
        settings |= {name: getattr(self, name) for name in ("latent_channels", *SCALE)}
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class ImageAutoencoderConfig(PretrainedAutoencoderConfig):
    """Base of the image autoencoders that have one scale and one shift."""

    from_pretrained: PathText
    """Local diffusers folder (config.json and weights), or one .safetensors/.bin/.pt/.ckpt file of it. Settings below
    that are left out are read from config.json, if it has them."""
    scaling_factor: float = 1.0
    """Latents are multiplied by this before diffusion, to have about unit variance."""
    latent_channels: Positive = 4
    downsample_factor: Positive = 8
    shift_factor: Annotated[float, Between(-1e6, 1e6, "FLUX has 0.1159, Stable Diffusion 0.")] = 0.0
    """Subtracted from the latents before they are multiplied, as in SD3 and FLUX."""
    dtype: Literal["fp32", "bf16"] = "fp32"

    facts = LatentFacts
    looked_up: ClassVar[tuple[str, ...]] = ("scaling_factor", "latent_channels", "downsample_factor", "shift_factor")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-6 <= abs(self.scaling_factor) <= 1e6:
            raise self.error(
                "scaling_factor",
                "must have a magnitude from 1e-6 to 1e6. Use the value in the autoencoder's config.json; Stable "
                "Diffusion has 0.18215.",
            )

    def scale(self) -> LatentScale:
        return LatentScale(self.shift_factor, self.scaling_factor)


@dataclass(frozen=True)
class AutoencoderKLConfig(ImageAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_kl": diffusers' AutoencoderKL, frozen.

    It has a posterior that latents are sampled from; the others are deterministic: each image has one latent.
    """

    scaling_factor: float = 0.18215
    """Latents are multiplied by this before diffusion, to have about unit variance."""
    sample_posterior: bool = True
    """Train on a sample of the posterior (as published) or, if false, on its mean."""
    latents_mean: tuple[float, ...] | None = None
    """Mean of each channel, subtracted instead of ``shift_factor``, as in VA-VAE and Playground v2.5. If left out, it
    is read from config.json."""
    latents_std: tuple[float, ...] | None = None
    """Standard deviation of each channel; latents are divided by it. If left out, it is read from config.json."""
    model_id: str = "autoencoder_kl"

    diffusers_class, weight_name = "AutoencoderKL", "decoder.conv_in.weight"
    looked_up = (*ImageAutoencoderConfig.looked_up, "latents_mean", "latents_std")
    example = "stabilityai/sd-vae-ft-ema"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_statistics(self.latents_mean, self.latents_std, self.latent_channels)
        if self.latents_mean and self.shift_factor:
            raise ConfigError("ae.latents_mean and ae.shift_factor would both be subtracted. Keep one of the two.")

    @property
    def samples_posterior(self) -> bool:
        return self.sample_posterior

    def scale(self) -> LatentScale:
        return LatentScale(self.latents_mean or self.shift_factor, self.scaling_factor, self.latents_std or 1.0)

    def weight_bytes(self) -> int:
        """Return the bytes of Stable Diffusion's autoencoder."""
        return _PARAMETERS * self._element_bytes

    def workspace_bytes(self, size: Shape) -> int:
        """Return the bytes of the widest feature maps of one image."""
        return _LIVE * _WIDTH * math.prod(size) * self._element_bytes

    @property
    def _element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4


@dataclass(frozen=True)
class DeterministicAutoencoderConfig(ImageAutoencoderConfig):
    """Base of the autoencoders without a posterior."""

    samples_posterior = False
    frameworks = ("pytorch",)

    @classmethod
    def settings_from_config(cls, path: Path, where: str) -> dict[str, ConfigValue]:
        """Return the settings in config.json, with diffusers' defaults for those it does not have."""
        settings = super().settings_from_config(path, where)
        return {name: settings.get(name, getattr(cls, name)) for name in cls.looked_up}


@dataclass(frozen=True)
class AutoencoderTinyConfig(DeterministicAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_tiny": TAESD and similar small substitutes for larger ones."""

    model_id: Literal["autoencoder_tiny"] = "autoencoder_tiny"

    diffusers_class, weight_name, example = "AutoencoderTiny", "decoder.layers.0.weight", "madebyollin/taesd"


@dataclass(frozen=True)
class AutoencoderDCConfig(DeterministicAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "autoencoder_dc": the deep-compression autoencoder (Chen et al. 2024).

    Its latents are 32 times smaller in height and width.
    """

    latent_channels: Positive = 32
    downsample_factor: Positive = 32
    model_id: Literal["autoencoder_dc"] = "autoencoder_dc"

    diffusers_class, weight_name = "AutoencoderDC", "encoder.conv_in.weight"
    example = "mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers"


@dataclass(frozen=True)
class _Flux2Facts:
    """The keys of diffusers' config.json that describe the latents, with diffusers' defaults."""

    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    """Width of each level; each level after the first halves height and width."""
    latent_channels: Positive = 32
    """Channels before latents are cut into patches."""
    batch_norm_eps: float = 1e-4
    """Added to the variance of each channel."""
    patch_size: tuple[Literal[2], Literal[2]] = (2, 2)
    """Height and width of a patch."""

    def settings(self) -> dict[str, ConfigValue]:
        """Return the settings of section ``ae`` in config.json."""
        return {"latent_channels": 4 * self.latent_channels, "downsample_factor": 2 ** len(self.block_out_channels)}


@dataclass(frozen=True)
class Flux2VAEConfig(PretrainedAutoencoderConfig):
    """Section ``ae`` with ``model_id`` "flux2_vae": diffusers' AutoencoderKLFlux2, frozen.

    Latents are patches of 2 x 2, normalised by the mean and variance of each channel, which are among its weights.
    """

    from_pretrained: PathText
    """Local diffusers folder (config.json and weights), or its .safetensors file."""
    latent_channels: Positive = 128
    """Channels of a latent: four times those of the autoencoder. If left out, read from config.json, as is the next."""
    downsample_factor: Positive = 16
    """Height of an image divided by height of its latent."""
    sample_posterior: bool = False
    """Train on a sample of the posterior or, if false, on its mean, as diffusers' script does."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the autoencoder runs."""
    model_id: Literal["flux2_vae"] = "flux2_vae"
    """Kind of autoencoder."""

    diffusers_class, weight_name, facts = "AutoencoderKLFlux2", "bn.running_mean", _Flux2Facts
    looked_up = ("latent_channels", "downsample_factor")
    example = "the vae/ of black-forest-labs/FLUX.2-dev"

    @property
    def samples_posterior(self) -> bool:
        return self.sample_posterior

    def scale(self) -> LatentScale:
        """Return the scaling by the statistics among the weights; raises CheckpointError if they are damaged."""
        file = self.weight_file()
        facts = read_facts(_Flux2Facts, config_file(self.from_pretrained), "ae", self.diffusers_class)
        try:
            mean, variance = (read_floats(file, f"bn.running_{name}") for name in ("mean", "var"))
        except UnusableFile as problem:
            raise CheckpointError(f"ae.from_pretrained = {file} {problem}. Copy or download the file again.") from None
        std = np.sqrt(variance + np.float32(facts.batch_norm_eps))
        check_statistics(mean.tolist(), std.tolist(), self.latent_channels)
        return LatentScale(shift=tuple(mean.tolist()), std=tuple(std.tolist()))
