"""Section ``dataset_param`` of videos with captions: an annotation, and how frames become pixels of one size, or of
some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.buckets import Budget
from mindspeed_mm_dit.configs.limits import MOST_FRAMES, MOST_PIXELS, check_between
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class ClipsParam(SourceParam):
    """Section ``dataset_param`` with ``dataset_type`` "clips"; names are those of MindSpeed-MM where it has one."""

    data_folder: str
    """Folder that the paths of the annotation start at; relative paths start at the working directory."""
    json_path: str
    """The annotation: a .json with one list, or a .jsonl with an object a line; path and cap of each clip, and
    where it is known num_frames, fps and resolution."""
    num_frames: int | None = None
    """Frames of every clip; null, as height and width: clips are brought to one of ``buckets``."""
    max_height: int | None = None
    """Height of every clip, in pixels."""
    max_width: int | None = None
    """Width of every clip, in pixels."""
    train_fps: float | None = None
    """Frames a second of every clip, taken from the video by leaving frames out; null takes all, as they come."""
    clip_start: Literal["first", "random"] = "first"
    """Where in a longer video a clip begins: at its first frame, or at one drawn anew each time."""
    crop: Literal["exact", "mindspeed_mm"] = "exact"
    """The centre that is cut: exactly max_height x max_width; or as MindSpeed-MM cuts it, whose rounding loses a row or
    column of some shapes (479 of 480 x 832) and stretches the rest. Its pixels are no whole levels then."""
    label_key: str | None = None
    """Key of the annotation that says the class of a clip: a number, or a name of any; null: clips have no classes."""
    caption_dropout_prob: float = 0.1
    """Probability that a training clip loses its caption; in [0, 1]."""
    valid_fraction: float = 0.0
    """Part of the clips held out for --eval-interval, chosen from the seed; in [0, 1)."""
    features: str | None = None
    """Folder that mm-dit cache-latents filled from these clips; neither clips nor captions are then encoded again, and
    the clips themselves need not be there."""
    skip_bad_clips: bool = False
    """Leave out clips that cannot be used, and count them, instead of stopping."""
    source: Literal["moving_digits", "moving_digits_buckets"] | None = None
    """Built-in clips, written to ``data_folder``, a path that ends in their name: of one shape, or of several."""
    buckets: tuple[tuple[int, ...], ...] | Budget | None = None
    """Shapes [frames, height, width], of which a clip is brought to the one that keeps most of it, and none that it is
    too short for; an image goes to those of one frame. Or a budget of which shapes are made."""
    bucket_group: int = 16
    """Clips of one shape that follow each other in the order of a run; --micro-batch-size must divide it."""
    dataset_type: Literal["clips"] = "clips"
    """Kind of data set."""

    noun, cache_key = "clip", "dataset_param.features"
    skip_key = "dataset_param.skip_bad_clips"

    def __post_init__(self) -> None:
        self.check_common("data_folder", "json_path")
        if not self.json_path.endswith((".json", ".jsonl")):
            raise ConfigError(
                f"dataset_param.json_path = {self.json_path}", "is neither .json nor .jsonl", "name the annotation"
            )
        self.check_buckets(3, "num_frames", "max_height", "max_width")
        for name, most in (("num_frames", MOST_FRAMES), ("max_height", MOST_PIXELS), ("max_width", MOST_PIXELS)):
            if getattr(self, name) is not None:
                check_between(f"dataset_param.{name}", getattr(self, name), 1, most)
        if self.train_fps is not None:
            check_between("dataset_param.train_fps", self.train_fps, 0.01, 1000, "null takes every frame")

    @property
    def items(self) -> tuple[str, ...]:
        """Captions and, where ``label_key`` names them, labels; either is only looked for where it is asked for."""
        return ("caption", "label") if self.label_key else ("caption",)

    @property
    def cache(self) -> str | None:  # type: ignore[override]
        """Where encoded clips and captions are read from instead of their files."""
        return self.features

    @property
    def skip_bad(self) -> bool:  # type: ignore[override]
        """Whether clips that cannot be used are left out."""
        return self.skip_bad_clips

    @property
    def sample_size(self) -> tuple[int, ...]:
        """(F, H, W) of every clip; of buckets the largest."""
        if self.num_frames is None or self.max_height is None or self.max_width is None:
            return self.largest
        return self.num_frames, self.max_height, self.max_width

    @property
    def where(self) -> str:
        return f"dataset_param.json_path = {self.json_path}"

    @property
    def size_setting(self) -> str:
        if self.buckets is not None:
            return "dataset_param.buckets"
        return "dataset_param.num_frames, max_height, max_width = " + ", ".join(map(str, self.sample_size))

    def pixels_made_by(self) -> str:
        """Return frames, size, rate and crop; raises ConfigError for clips that begin elsewhere each time."""
        if self.clip_start != "first":
            raise ConfigError(
                f"dataset_param.clip_start = {self.clip_start!r}",
                "clips that begin elsewhere each time cannot be kept",
                'set it to "first", or train without a cache',
            )
        rate = "all" if self.train_fps is None else f"{self.train_fps:g}"
        least = f" with {self.bucket_group} clips or more" if isinstance(self.buckets, Budget) else ""
        sizes = " or ".join(f"{frames} of {height} x {width}" for frames, height, width in self.sizes)
        return f"{sizes}{least}, fps {rate}, crop {self.crop}"
