"""data.json of text to video: which clips a run learns from, and how frames become pixels of one size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mindspeed_mm_dit.configs.data import DataloaderParam
from mindspeed_mm_dit.configs.limits import MOST_FRAMES, MOST_PIXELS, check_between, check_path
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class ClipsParam:
    """Section ``dataset_param`` with ``dataset_type`` "clips"; names are those of MindSpeed-MM where it has one."""

    data_folder: str
    """Folder that the paths of the annotation start at; relative paths start at the working directory."""
    json_path: str
    """The annotation: a .json with one list, or a .jsonl with an object a line; path and cap of each clip, and
    where it is known num_frames, fps and resolution."""
    num_frames: int
    """Frames of every clip."""
    max_height: int
    """Height of every clip, in pixels."""
    max_width: int
    """Width of every clip, in pixels."""
    train_fps: float | None = None
    """Frames a second of every clip, taken from the video by leaving frames out; null takes all, as they come."""
    clip_start: Literal["first", "random"] = "first"
    """Where in a longer video a clip begins: at its first frame, or at one drawn anew each time."""
    crop: Literal["exact", "mindspeed_mm"] = "exact"
    """The centre that is cut: exactly max_height x max_width; or as MindSpeed-MM cuts it, whose rounding loses a row or
    column of some shapes (479 of 480 x 832) and stretches the rest. Its pixels are no whole levels then."""
    caption_dropout_prob: float = 0.1
    """Probability that a training clip loses its caption; in [0, 1]."""
    valid_fraction: float = 0.0
    """Part of the clips held out for --eval-interval, chosen from the seed; in [0, 1)."""
    features: str | None = None
    """Folder that mm-dit cache-latents filled from these clips; neither clips nor captions are then encoded again, and
    the clips themselves need not be there."""
    skip_bad_clips: bool = False
    """Leave out clips that cannot be used, and count them, instead of stopping."""
    source: Literal["moving_digits"] | None = None
    """Built-in clips, written to ``data_folder``, a path that ends in their name."""
    dataset_type: Literal["clips"] = "clips"
    """Kind of data set."""

    def __post_init__(self) -> None:
        for name in ("data_folder", "json_path"):
            check_path(f"dataset_param.{name}", getattr(self, name))
        if not self.json_path.endswith((".json", ".jsonl")):
            raise ConfigError(
                f"dataset_param.json_path = {self.json_path}", "is neither .json nor .jsonl", "name the annotation"
            )
        check_between("dataset_param.num_frames", self.num_frames, 1, MOST_FRAMES)
        for name in ("max_height", "max_width"):
            check_between(f"dataset_param.{name}", getattr(self, name), 1, MOST_PIXELS)
        if self.train_fps is not None:
            check_between("dataset_param.train_fps", self.train_fps, 0.01, 1000, "null takes every frame")
        check_between("dataset_param.caption_dropout_prob", self.caption_dropout_prob, 0, 1)
        if self.features is not None:
            check_path("dataset_param.features", self.features)
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ConfigError(f"dataset_param.valid_fraction = {self.valid_fraction}", "must lie in [0, 1)")

    @property
    def cache(self) -> str | None:
        """Where encoded clips and captions are read from instead of their files."""
        return self.features

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of every clip, in pixels."""
        return self.max_height, self.max_width

    @property
    def pixels_shape(self) -> tuple[int, int, int, int]:
        """(3, F, H, W) of a sample."""
        return (3, self.num_frames, *self.size)


@dataclass(frozen=True)
class ClipsConfig:
    """All of a data.json of clips."""

    dataset_param: ClipsParam
    """The clips."""
    dataloader_param: DataloaderParam = field(default_factory=DataloaderParam)
    """How they are read."""
    note: str = ""
    """Free text: what the data are."""


def load_clips_config(path: str | Path, flag: str = "--mm-data") -> ClipsConfig:
    """Read the data.json that ``flag`` names; raises ConfigError naming the file, the key and the cure."""
    content = read_json(path, flag)
    for name, cls in (("dataset_param", ClipsParam), ("dataloader_param", DataloaderParam)):
        if name in content:
            content[name] = from_mapping(cls, content[name], f"{path}: {name}")
    return from_mapping(ClipsConfig, content, str(path))


def check_patches(param: ClipsParam, latent_shape: tuple[int, ...], patch: tuple[int, int, int]) -> None:
    """Raise ConfigError unless latents (C, f, h, w) of the clips can be cut into patches (pf, ph, pw)."""
    names = ("num_frames", "max_height", "max_width")
    for name, latent, size in zip(names, latent_shape[1:], patch):
        if latent % size:
            raise ConfigError(
                f"dataset_param.{name} = {getattr(param, name)}",
                f"makes latents of {latent}, which the patch does not divide: {latent} % {size} = {latent % size}",
                f"change {name}, or predictor.patch_size = {list(patch)}",
            )
