"""Section ``dataset_param`` for images and for videos with captions.

Images are files in folders, or shards (Parquet as on the Hugging Face hub, or tar); videos are listed by an annotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mindspeed_mm_dit.configs.limits import MAX_FRAMES, MAX_PIXELS, Between, PathText, Positive
from mindspeed_mm_dit.configs.source import Budget, FilesParam, format_sizes

CROP = "upright by EXIF, 16 bits scaled to 8, halve by box, scale bicubically, cut the centre"
"""What ``data/transforms.load_pixels`` does. Change this text with it, so that old caches are refused."""


ImageFiles = Literal["image_folder", "parquet", "webdataset"]
"""Kinds of data set whose samples are images with labels."""


@dataclass(frozen=True)
class DatasetParam(FilesParam):
    """Section ``dataset_param`` for images."""

    image_size: Positive | None = None
    """Height and width in pixels that images are scaled and centre-cropped to; null: use ``buckets``."""
    index: PathText | None = None
    """CSV in ``data_folder`` with columns image_path,label and paths relative to ``data_folder``, or a .jsonl with
    these keys; null: every sub-folder is a class."""
    single_class: bool = False
    """Treat all images below ``data_folder`` as one class, named after the folder."""
    source: str | None = None
    """Built-in images: "digits", "captioned_digits", "inverted_digits" (40 of them) or "digits_buckets" (on squares and
    rectangles), made from scikit-learn's digits. They are written to ``data_folder``, whose path must end in this
    name."""
    folder_repeats: bool | None = None
    """Whether the number in a folder name such as 10_dog is how often an epoch repeats each image, and dog is the
    class, as in kohya's trainers. null: if all folders have such names and are not merely numbered (1_cat, 2_dog)."""
    random_flip: bool = False
    """Mirror a training image left-right with probability 1/2."""
    valid_by_class: bool = False
    """Hold out the same fraction of each class, instead of images at random."""
    skip_bad_images: bool = False
    """Skip and count missing or undecodable images, instead of stopping."""
    latents: PathText | None = None
    """Folder that mm-dit cache-latents filled from these images; training reads it instead of decoding and encoding
    the images."""
    dataset_type: ImageFiles = "image_folder"
    """Kind of data set: image files, or a folder of shards, which are Parquet as on the Hugging Face hub or webdataset
    tar files."""
    split: str | None = None
    """For shards: read only those whose names start with this, e.g. "train"."""
    label_column: str = "label"
    """For Parquet: column of the labels."""
    captions: str | tuple[str, ...] | None = None
    """Where to find an image's captions: a column of ``index`` or of Parquet; or the ending of a file next to the image
    or in the tar, e.g. ".txt", or ".json:caption" for a key of a JSON file. With a list, an image has the captions from
    all of them."""

    noun, cache_key, built_in = "image", "dataset_param.latents", "builtin_images"
    skip_key = "dataset_param.skip_bad_images"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_captions()
        if self.single_class and self.index is not None:
            raise self.error("single_class", f"contradicts index = {self.index}, which names classes. Drop one.")
        if self.dataset_type != "image_folder" and (self.index or self.single_class or self.source):
            raise self.error(
                "dataset_type", "has shards with the class of each image. Drop index, single_class and source."
            )
        self.check_buckets(2, "image_size")

    def _check_captions(self) -> None:
        """Raise ConfigError unless each of ``captions`` names something that this kind of data set has."""
        names = self.caption_fields
        endings, parquet = [name.startswith(".") for name in names], self.dataset_type == "parquet"
        problem = ""
        if self.captions is not None and not all(names or [""]):
            problem = 'names nothing. Write a column, or an ending such as ".txt".'
        elif any(name.partition(":")[0] == ".json" and name[5:] in ("", ":") for name in names):
            problem = 'does not name a key of the JSON object. Write ".json:caption".'
        elif any("/" in name for name in names if name.startswith(".")):
            problem = 'is a path, not the ending of a file next to the image. Write ".txt" or the like.'
        elif any(endings) and not all(endings):
            problem = "mixes columns with file endings. Name only columns."
        elif any(endings) and parquet:
            problem = "is a file ending, but Parquet has columns. Name only columns."
        elif names and not any(endings) and not self.index and not parquet:
            has = "a tar has" if self.dataset_type == "webdataset" else "a folder without dataset_param.index has"
            problem = f'names a column, but {has} none. Write the ending of a file, such as ".txt".'
        if problem:
            raise self.error("captions", problem)

    @property
    def caption_fields(self) -> tuple[str, ...]:
        """``captions`` as a tuple; empty without captions."""
        return (self.captions,) if isinstance(self.captions, str) else self.captions or ()

    @property
    def items(self) -> tuple[str, ...]:
        """Labels and, with ``captions``, captions; labels are only looked up if a predictor needs them."""
        return ("label", "caption") if self.captions else ("label",)

    @property
    def sample_size(self) -> tuple[int, int]:
        """Size (H, W) of an image in pixels; with buckets, the largest shape."""
        height, width = self.largest if self.image_size is None else (self.image_size, self.image_size)
        return height, width

    @property
    def where(self) -> str:
        return f"dataset_param.data_folder = {self.data_folder}"

    @property
    def size_setting(self) -> str:
        if self.buckets is not None:
            return "dataset_param.buckets"
        return f"dataset_param.image_size = {self.image_size}"

    def pixel_cache_key(self) -> str:
        least = f" with {self.bucket_group} images or more" if isinstance(self.buckets, Budget) else ""
        return f"{format_sizes(self.sizes)}{least}, {CROP}{self.profiles_text}"


Display = Literal["shown", "mindspeed_mm"]
"""How the frames of a video become pixels: see ``ClipsParam.display``."""


@dataclass(frozen=True)
class ClipsParam(FilesParam):
    """Section ``dataset_param`` with ``dataset_type`` "clips"; keys have MindSpeed-MM's names if it has them."""

    json_path: PathText
    """The annotation: a .json with one list, or a .jsonl with one object per line. Each clip has path and cap and, if
    known, num_frames, fps and resolution."""
    num_frames: Annotated[int, Between(1, MAX_FRAMES)] | None = None
    """Frames of every clip, 1 to 100,000; null, together with height and width: use ``buckets``."""
    max_height: Annotated[int, Between(1, MAX_PIXELS)] | None = None
    """Height of every clip, in pixels, 1 to 32,768."""
    max_width: Annotated[int, Between(1, MAX_PIXELS)] | None = None
    """Width of every clip, in pixels, 1 to 32,768."""
    train_fps: Annotated[float, Between(0.01, 1000, "Write null for every frame.")] | None = None
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
    features: PathText | None = None
    """Folder that mm-dit cache-latents filled from these clips; training reads it instead of encoding clips and
    captions, and the clips themselves are not needed."""
    skip_bad_clips: bool = False
    """Skip and count clips that cannot be used, instead of stopping."""
    source: str | None = None
    """Built-in clips: "moving_digits", of one shape, or "moving_digits_buckets", of several. They are written to
    ``data_folder``, whose path must end in this name."""
    display: Display = "shown"
    """How frames become pixels: as a player shows them; or as decord, with which MindSpeed-MM reads: BT.601 if a file
    names no matrix, pixels as stored if they are not square, frames rotated but not mirrored, and chosen by index."""
    dataset_type: Literal["clips"] = "clips"
    """Kind of data set."""

    noun, cache_key, built_in = "clip", "dataset_param.features", "builtin_clips"
    skip_key = "dataset_param.skip_bad_clips"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.json_path.endswith((".json", ".jsonl")):
            raise self.error("json_path", "is neither .json nor .jsonl. Name the annotation.")
        self.check_buckets(3, "num_frames", "max_height", "max_width")
        if self.extra_images and self.clip_start != "first":
            raise self.error(
                f"{next(iter(self.extra_images)).replace('image', 'frame')}_key",
                'names one image, but with clip_start "random" a clip can begin at any frame. Set clip_start to '
                '"first", or drop the key.',
            )

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
            raise self.error("clip_start", 'cannot be cached. Set it to "first", or train without a cache.')
        rate = "all" if self.train_fps is None else f"{self.train_fps:g}"
        least = f" with {self.bucket_group} clips or more" if isinstance(self.buckets, Budget) else ""
        display = "" if self.display == "shown" else f", display {self.display}"
        sizes = " or ".join(f"{frames} of {height} x {width}" for frames, height, width in self.sizes)
        return f"{sizes}{least}, fps {rate}, crop {self.crop}{display}{self.profiles_text}"
