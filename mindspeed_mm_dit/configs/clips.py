"""Section ``dataset_param`` for videos with captions: the annotation, and the size or sizes of clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.buckets import Budget
from mindspeed_mm_dit.configs.limits import MOST_FRAMES, MOST_PIXELS, check_between
from mindspeed_mm_dit.configs.source import ColorProfiles, SourceParam
from mindspeed_mm_dit.errors import ConfigError

Display = Literal["shown", "mindspeed_mm"]
"""How the frames of a video become pixels: see ``ClipsParam.display``."""


@dataclass(frozen=True)
class ClipsParam(SourceParam):
    """Section ``dataset_param`` with ``dataset_type`` "clips"; keys have MindSpeed-MM's names if it has them."""

    data_folder: str
    """Folder that the paths in the annotation are relative to; relative paths start at the working directory."""
    json_path: str
    """The annotation: a .json with one list, or a .jsonl with one object per line. Each clip has path and cap and, if
    known, num_frames, fps and resolution."""
    num_frames: int | None = None
    """Frames of every clip, 1 to 100,000; null, together with height and width: use ``buckets``."""
    max_height: int | None = None
    """Height of every clip, in pixels, 1 to 32,768."""
    max_width: int | None = None
    """Width of every clip, in pixels, 1 to 32,768."""
    train_fps: float | None = None
    """Frames per second of every clip, 0.01 to 1000; frames of the video are dropped to reach it. null keeps every
    frame."""
    clip_start: Literal["first", "random"] = "first"
    """Where a clip starts in a longer video: at the first frame, or at a random one each time."""
    crop: Literal["exact", "mindspeed_mm"] = "exact"
    """How to centre-crop: to exactly max_height x max_width; or like MindSpeed-MM, whose rounding loses a row or column
    of some shapes (479 of 480 x 832) and stretches the rest, so that pixel values are no longer whole numbers."""
    label_key: str | None = None
    """Key of the annotation with the class of a clip, a number or a name; null: clips have no classes."""
    first_frame_key: str | None = None
    """Key of the annotation that names an image file, of the clip's size, which an image-to-video network takes as the
    first frame; null: the clip's first frame itself."""
    last_frame_key: str | None = None
    """The same for the last frame, for a network conditioned on it."""
    caption_dropout_prob: float = 0.1
    """Probability that a training clip loses its caption; in [0, 1]."""
    valid_fraction: float = 0.0
    """Fraction of the clips held out for --eval-interval, in [0, 1); the seed decides which."""
    features: str | None = None
    """Folder that mm-dit cache-latents filled from these clips; training reads it instead of encoding clips and
    captions, and the clips themselves are not needed."""
    skip_bad_clips: bool = False
    """Skip and count clips that cannot be used, instead of stopping."""
    source: str | None = None
    """Built-in clips: "moving_digits", of one shape, or "moving_digits_buckets", of several. They are written to
    ``data_folder``, whose path must end in this name."""
    buckets: tuple[tuple[int, ...], ...] | Budget | None = None
    """Shapes [frames, height, width]; each clip is scaled and cropped to the shape that keeps most of it, among those
    it is long enough for. An image goes to a shape of one frame. Or a budget from which the shapes are made."""
    bucket_group: int = 16
    """Number of clips of one shape in a row in the sample order; must be a multiple of --micro-batch-size."""
    display: Display = "shown"
    """How frames become pixels: as a player shows them; or as decord, with which MindSpeed-MM reads: BT.601 if a file
    names no matrix, pixels as stored if they are not square, frames rotated but not mirrored, and chosen by index."""
    color_profiles: ColorProfiles = "convert"
    """Convert images to sRGB by the colour profile in their file, as viewers do, or "ignore" it."""
    dataset_type: Literal["clips"] = "clips"
    """Kind of data set."""

    noun, cache_key, built_in = "clip", "dataset_param.features", "builtin_clips"
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
        if self.extra_images and self.clip_start != "first":
            what = f"dataset_param.{next(iter(self.extra_images)).replace('image', 'frame')}_key"
            raise ConfigError(what, 'names one image, but with clip_start "random" a clip can begin at any frame',
                              'set clip_start to "first", or drop the key')  # fmt: skip
        if self.train_fps is not None:
            check_between("dataset_param.train_fps", self.train_fps, 0.01, 1000, "null takes every frame")

    @property
    def items(self) -> tuple[str, ...]:
        """Captions and, with ``label_key``, labels; each is only looked up if a predictor needs it."""
        return ("caption", "label") if self.label_key else ("caption",)

    @property
    def extra_images(self) -> dict[str, str]:  # type: ignore[override]
        """Additional images of each clip, first_image and last_image, if the annotation names them."""
        keys = {"first_image": self.first_frame_key, "last_image": self.last_frame_key}
        return {name: key for name, key in keys.items() if key is not None}

    @property
    def sample_size(self) -> tuple[int, ...]:
        """Size (F, H, W) of every clip; with buckets, the largest shape."""
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

    def pixel_cache_key(self) -> str:
        """Return frames, size, rate and crop, as text; raises ConfigError for clips with a random start."""
        if self.clip_start != "first":
            raise ConfigError(
                f"dataset_param.clip_start = {self.clip_start!r}",
                "clips that start at random frames cannot be cached",
                'set it to "first", or train without a cache',
            )
        rate = "all" if self.train_fps is None else f"{self.train_fps:g}"
        least = f" with {self.bucket_group} clips or more" if isinstance(self.buckets, Budget) else ""
        display = "" if self.display == "shown" else f", display {self.display}"
        sizes = " or ".join(f"{frames} of {height} x {width}" for frames, height, width in self.sizes)
        return f"{sizes}{least}, fps {rate}, crop {self.crop}{display}{self.profiles_words}"
