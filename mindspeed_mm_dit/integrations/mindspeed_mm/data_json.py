"""Translates a data.json of MindSpeed-MM: its ``dataset_type`` "t2v" and its dataloader modes.

The classes below have its keys and defaults (v26.1.0). A setting that cannot work here, because samples are addressed
by sample index, is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm_dit.configs.files import UnusableFile, lines_of, read_bytes
from mindspeed_mm_dit.configs.limits import MAX_FRAMES, MAX_PIXELS, check_between
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError

WAN_PATCH = 16
"""Side of Wan's patches in pixels: autoencoder factor 8, times 2. Shapes are always multiples of it."""
SAMPLERS = ("stateful_distributed_sampler", "BaseRandomBatchSampler", "SequentialSampler", "LengthGroupedSampler")
ONLY_OF_PROCESSOR = {
    "frame_interval": (1, "frames are dropped only to reach train_fps (auto_interval)"),
    "speed_factor": (1, "videos are not sped up here"),
    "use_aesthetic": (False, "captions get no aesthetic scores here"),
}
"""Settings that support a single value here, and why."""
ONLY_OF_LOADER = {
    "drop_last": (True, "all batches here are complete"),
    "group_frame": (False, "its micro-batches of several sizes are padded"),
    "group_resolution": (False, "its micro-batches of several sizes are padded"),
    "data_sharding": (False, "the number of ranks would change the results"),
    "initial_global_step_for_sampler": (0, "a checkpoint stores its position in the data"),
}


def _check_only(section: Any, where: str, only: Mapping[str, tuple[object, str]]) -> None:
    for name, (value, why) in only.items():
        actual = getattr(section, name)
        if actual != value:
            raise ConfigError(
                f"{where}.{name} = {json.dumps(actual)} is not supported, because {why}. Write {json.dumps(value)}."
            )


@dataclass(frozen=True)
class Files:
    """``dataset_param.basic_parameters``."""

    data_path: str
    """The annotation; with "combine", a text file with the line FOLDER,ANNOTATION."""
    data_folder: str = ""
    """Folder that the paths in the annotation are relative to."""
    data_storage_mode: Literal["standard", "combine"] = "standard"
    """What ``data_path`` is."""

    def paths(self) -> tuple[str, str]:
        """Return (folder, annotation); raises ConfigError if "combine" does not name exactly one of each."""
        if self.data_storage_mode == "standard":
            return self.data_folder or ".", self.data_path
        what = f"dataset_param.basic_parameters.data_path = {self.data_path}"
        try:
            lines = [line for line in lines_of(read_bytes(Path(self.data_path)).decode()) if line.strip()]
        except UnusableFile as problem:
            raise ConfigError(f"{what} {problem}. Correct the path.") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{what} is not a text in UTF-8. Correct the path.") from None
        if len(lines) != 1 or lines[0].count(",") != 1:
            raise ConfigError(f"{what} has {len(lines)} line(s), and must have one: FOLDER,ANNOTATION.")
        folder, _, annotation = lines[0].partition(",")
        return folder.strip(), annotation.strip()


@dataclass(frozen=True)
class Processor:
    """``dataset_param.preprocess_parameters`` for the processor in MindSpeed-MM's Wan examples."""

    video_processor_type: Literal["OpensoraplanVideoProcessor"]
    """The processor; others prepare videos differently and are refused."""
    video_reader_type: str = "DecordVideo"
    """Ignored: PyAV reads videos here."""
    image_reader_type: str = "Image"
    """Ignored: Pillow reads images here."""
    num_frames: int = 16
    """Maximum number of frames of a clip."""
    min_num_frames: int = 29
    """Minimum number of frames of a clip; shorter clips are skipped."""
    frame_interval: int = 1
    """Frames from one frame of a clip to the next; must be 1."""
    auto_interval: bool = True
    """Whether to drop frames to reach ``train_fps``."""
    train_fps: float = 24
    """Frames per second of a clip."""
    speed_factor: float = 1.0
    """Factor by which videos are sped up; must be 1."""
    drop_short_ratio: float = 1.0
    """Fraction of the clips shorter than ``num_frames`` to skip, 0 or 1; with 0 all of them are used."""
    max_height: int = 480
    """Height of every clip in pixels, with ``force_resolution``."""
    max_width: int = 640
    """Width of every clip in pixels, with ``force_resolution``."""
    max_hxw: int | None = None
    """Maximum number of pixels of a frame."""
    min_hxw: int | None = None
    """Minimum number of pixels of a frame; smaller videos are enlarged here, with a warning."""
    hw_stride: int = 32
    """Heights and widths are multiples of this."""
    hw_aspect_thr: float = 1.5
    """Largest ratio of longer to shorter side; clips beyond it are cropped here."""
    force_resolution: bool = True
    """Whether all clips have the same height and width."""
    truncate_t_by_sp: bool = True
    """Concerns ranks that share a clip; ignored, since that is checked here."""
    vae_scale_factor: tuple[int, ...] = (4, 8, 8)
    """Factors of the autoencoder: frames, height and width."""
    cfg: float = 0.1
    """Fraction of the captions that is dropped."""
    use_aesthetic: bool = False
    """Whether captions get aesthetic scores; must be false."""
    train_pipeline: Any = None
    """Ignored: frames are scaled by the shorter side and centre-cropped, as here."""

    def __post_init__(self) -> None:
        where = "dataset_param.preprocess_parameters"
        _check_only(self, where, ONLY_OF_PROCESSOR)
        if self.drop_short_ratio not in (0, 1):
            raise ConfigError(
                f"{where}.drop_short_ratio = {self.drop_short_ratio:g} would drop clips at random. Write 0 or 1."
            )
        for name, most in (
            ("num_frames", MAX_FRAMES),
            ("min_num_frames", self.num_frames),
            ("hw_stride", MAX_PIXELS),
        ):
            check_between(f"{where}.{name}", getattr(self, name), 1, most)
        if not self.vae_scale_factor or self.vae_scale_factor[0] < 1:
            raise ConfigError(f"{where}.vae_scale_factor = {self.vae_scale_factor} must be positive. Write [4, 8, 8].")
        if not self.force_resolution and self.max_hxw is None:
            raise ConfigError(f"{where}.max_hxw is missing, and required with force_resolution = false.")

    def shapes(self) -> dict[str, Any]:
        """Return our keys of ``dataset_param`` for frames, heights and widths."""
        if self.force_resolution:
            if not self.drop_short_ratio:
                raise ConfigError(
                    "dataset_param.preprocess_parameters.force_resolution = true with drop_short_ratio = 0 gives clips "
                    "of one size and several lengths. Name dataset_param.buckets instead."
                )
            return {"num_frames": self._frames()[-1], "max_height": self.max_height, "max_width": self.max_width}
        budget = {
            "frames": self._frames(), "area": self.max_hxw, "multiple_of": math.lcm(self.hw_stride, WAN_PATCH),
            "max_aspect_ratio": self.hw_aspect_thr or 1.5,
        }  # fmt: skip
        return {"buckets": budget}

    def _frames(self) -> list[int]:
        """Return every number of frames that a clip may have, including 1 for images."""
        step = self.vae_scale_factor[0]
        longest = (self.num_frames - 1) // step * step + 1
        shortest = longest if self.drop_short_ratio else -(-(self.min_num_frames - 1) // step) * step + 1
        return sorted({1, *range(shortest, longest + 1, step)})

    def other_keys(self) -> dict[str, Any]:
        """Return our other keys of ``dataset_param``."""
        return {
            "train_fps": self.train_fps if self.auto_interval else None, "clip_start": "random",
            "caption_dropout_prob": self.cfg, "skip_bad_clips": True,
        }  # fmt: skip


@dataclass(frozen=True)
class Clips:
    """``dataset_param`` with ``dataset_type`` "t2v"."""

    dataset_type: Literal["t2v"]
    """Videos with captions."""
    basic_parameters: Files
    """Where the files are."""
    preprocess_parameters: Processor
    """How clips are prepared."""
    use_text_processer: Literal[True] = True
    """Whether captions are read; must be true."""
    enable_text_preprocessing: bool = True
    """Ignored: the kind of text encoder decides. UMT5 reads captions cleaned as in MindSpeed-MM's WanPipeline."""
    text_preprocess_methods: Any = None
    """Ignored, like ``enable_text_preprocessing``."""
    tokenizer_config: Any = None
    """Ignored: section text_encoder of model.json names the tokenizer here."""


@dataclass(frozen=True)
class Loader:
    """``dataloader_param`` with ``dataloader_mode``."""

    dataloader_mode: str
    """How samples are assigned to ranks; "sampler" and "base" are the same here."""
    sampler_type: str = "stateful_distributed_sampler"
    """Sampler of MindSpeed-MM; only ``shuffle`` and micro-batches of one shape are supported."""
    shuffle: bool = False
    """Reshuffle every epoch."""
    drop_last: bool = True
    """Drop the last, smaller batch of an epoch; must be true."""
    group_data: bool = False
    """Micro-batches of one shape, as buckets always have."""
    group_frame: bool = False
    """Micro-batches with similar numbers of frames; must be false."""
    group_resolution: bool = False
    """Micro-batches with similar frame sizes; must be false."""
    data_sharding: bool = False
    """Give each rank its own part of the samples; must be false."""
    initial_global_step_for_sampler: int = 0
    """Step to continue from; must be 0."""
    pin_memory: bool = False
    """Ignored, like the next four: these only affect speed."""
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    enable_preload: bool = False
    prefetch_batches: int = 4
    """A key of this project."""

    def __post_init__(self) -> None:
        _check_only(self, "dataloader_param", ONLY_OF_LOADER)
        if self.dataloader_mode not in ("sampler", "base"):
            raise ConfigError(
                f"dataloader_param.dataloader_mode = {self.dataloader_mode!r} is not supported. Use sampler, and "
                "dataset_param.buckets for several shapes."
            )
        if self.dataloader_mode == "sampler" and self.sampler_type not in SAMPLERS:
            raise ConfigError(
                f"dataloader_param.sampler_type = {self.sampler_type!r} is not supported. Use one of "
                f"{', '.join(SAMPLERS)}."
            )


def translated(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a data.json with MindSpeed-MM's sections translated to ours. Raises ConfigError."""
    result, samples, loader = dict(content), content.get("dataset_param"), content.get("dataloader_param")
    if isinstance(samples, dict) and samples.get("dataset_type") == "feature":
        raise ConfigError(
            f"{where}: dataset_param.dataset_type = 'feature' is not supported, as its features are pickled. Write the "
            '"t2v" section that they were extracted from; mm-dit cache-latents caches latents and texts.'
        )
    if isinstance(samples, dict) and samples.get("dataset_type") == "t2v":
        result["dataset_param"] = _clips(samples, where)
    if isinstance(loader, dict) and "dataloader_mode" in loader:
        settings = from_mapping(Loader, loader, f"{where}: dataloader_param")
        result["dataloader_param"] = {"shuffle": settings.shuffle, "prefetch_batches": settings.prefetch_batches}
    return result


OURS = (
    *("features", "bucket_group", "clip_start", "valid_fraction", "skip_bad_clips", "crop", "buckets"),
    *("color_profiles", "display"),
)
"""Keys of this project that may be added to MindSpeed-MM's section."""


def _clips(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    theirs = {name: value for name, value in section.items() if name not in OURS}
    for name, cls in (("basic_parameters", Files), ("preprocess_parameters", Processor)):
        if name in theirs:
            theirs[name] = from_mapping(cls, theirs[name], f"{where}: dataset_param.{name}")
    clips = from_mapping(Clips, theirs, f"{where}: dataset_param")
    folder, annotation = clips.basic_parameters.paths()
    ours = {name: section[name] for name in OURS if name in section}
    paths = {"dataset_type": "clips", "data_folder": folder, "json_path": annotation}
    shapes = {} if "buckets" in ours else clips.preprocess_parameters.shapes()
    return {**paths, **shapes, **clips.preprocess_parameters.other_keys(), **ours}
