"""A data.json of MindSpeed-MM in our words: what its ``dataset_type`` "t2v" and its dataloader modes mean here.

Its keys are read by classes of their own, with its defaults (v26.1.0). What cannot be kept where samples are drawn by
their index is refused by name, with the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm_dit.configs.files import UnusableFile, read_bytes
from mindspeed_mm_dit.configs.limits import MOST_FRAMES, MOST_PIXELS, check_between
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError

WAN_PATCH = 16
"""Pixels of Wan's patches, in which its shapes are counted here, whatever ``hw_stride``: 8 of the autoencoder, by 2."""
SAMPLERS = ("stateful_distributed_sampler", "BaseRandomBatchSampler", "SequentialSampler", "LengthGroupedSampler")
REFUSED_MODES = {
    "variable": "its VariableVideoBatchSampler leaves samples out by chance, and batches of each shape have a size of "
    "their own",
}
REFUSED_SAMPLERS = {
    "BucketBatchSampler": "it sorts the tokens of its vision-language models",
    "LuminaMetaLenDistSampler": "it sorts the tokens of its Lumina",
    "AESampler": "it is for training autoencoders",
}

ONLY_OF_PROCESSOR = {
    "frame_interval": (1, "frames are left out down to train_fps alone: auto_interval"),
    "speed_factor": (1, "videos are not sped up here"),
    "use_aesthetic": (False, "captions get no scores here"),
}
"""Settings with the one value that is kept here, and why."""
ONLY_OF_LOADER = {
    "drop_last": (True, "every batch here is a whole one"),
    "group_frame": (False, "its micro-batches of several sizes are padded"),
    "group_resolution": (False, "its micro-batches of several sizes are padded"),
    "data_sharding": (False, "the number of ranks would change what is learned"),
    "initial_global_step_for_sampler": (0, "a checkpoint knows where it stopped"),
}


def _check_only(section: Any, where: str, only: Mapping[str, tuple[object, str]]) -> None:
    for name, (value, why) in only.items():
        found = getattr(section, name)
        if found != value:
            raise ConfigError(f"{where}.{name} = {json.dumps(found)}", why, f"write {json.dumps(value)}")


@dataclass(frozen=True)
class Files:
    """``dataset_param.basic_parameters``."""

    data_path: str
    """The annotation; or with "combine" a text file with the line FOLDER,ANNOTATION."""
    data_folder: str = ""
    """Folder that the paths of the annotation start at."""
    data_storage_mode: Literal["standard", "combine"] = "standard"
    """Which of the two."""

    def places(self) -> tuple[str, str]:
        """Return folder and annotation; raises ConfigError where there are not these two."""
        if self.data_storage_mode == "standard":
            return self.data_folder or ".", self.data_path
        what = f"dataset_param.basic_parameters.data_path = {self.data_path}"
        try:
            lines = [line for line in read_bytes(Path(self.data_path)).decode().splitlines() if line.strip()]
        except (UnusableFile, UnicodeDecodeError) as problem:
            raise ConfigError(what, str(problem), "correct the path") from None
        if len(lines) != 1 or lines[0].count(",") != 1:
            raise ConfigError(what, f"has {len(lines)} lines; it must have one, FOLDER,ANNOTATION",
                              "join the annotations")  # fmt: skip
        folder, _, annotation = lines[0].partition(",")
        return folder.strip(), annotation.strip()


@dataclass(frozen=True)
class Processor:
    """``dataset_param.preprocess_parameters`` of the processor that its Wan examples name."""

    video_processor_type: Literal["OpensoraplanVideoProcessor"]
    """Others prepare videos otherwise."""
    video_reader_type: str = "DecordVideo"
    """PyAV reads them here."""
    image_reader_type: str = "Image"
    """Pillow reads them here."""
    num_frames: int = 16
    """Frames of a clip, at most."""
    min_num_frames: int = 29
    """And at least; clips that give fewer are left out."""
    frame_interval: int = 1
    """Frames between two of a clip."""
    auto_interval: bool = True
    """Whether frames are left out down to ``train_fps``."""
    train_fps: float = 24
    """Frames a second of a clip."""
    speed_factor: float = 1.0
    """Above 1 videos would be sped up."""
    drop_short_ratio: float = 1.0
    """Part of the clips shorter than ``num_frames`` that is left out; of the others every shorter length is taken."""
    max_height: int = 480
    """With ``force_resolution``: of every clip, in pixels."""
    max_width: int = 640
    """The same."""
    max_hxw: int | None = None
    """Pixels of a frame, at most."""
    min_hxw: int | None = None
    """Videos with smaller frames are enlarged here, and warned of."""
    hw_stride: int = 32
    """Heights and widths are multiples of it."""
    hw_aspect_thr: float = 1.5
    """Longer side over shorter side, at most; longer clips are cut here."""
    force_resolution: bool = True
    """Whether all clips have one height and width."""
    truncate_t_by_sp: bool = True
    """Of ranks that share a clip, which are checked here."""
    vae_scale_factor: tuple[int, ...] = (4, 8, 8)
    """Of the autoencoder: frames, height and width."""
    cfg: float = 0.1
    """Part of the captions that is dropped."""
    use_aesthetic: bool = False
    """Scores in captions."""
    train_pipeline: Any = None
    """Scaled by the shorter side and cut to the centre, as here."""

    def __post_init__(self) -> None:
        where = "dataset_param.preprocess_parameters"
        _check_only(self, where, ONLY_OF_PROCESSOR)
        if self.drop_short_ratio not in (0, 1):
            raise ConfigError(f"{where}.drop_short_ratio = {self.drop_short_ratio:g}", "leaves clips out by chance",
                              "set it to 0 or 1")  # fmt: skip
        for name, most in (
            ("num_frames", MOST_FRAMES),
            ("min_num_frames", self.num_frames),
            ("hw_stride", MOST_PIXELS),
        ):
            check_between(f"{where}.{name}", getattr(self, name), 1, most)
        if not self.vae_scale_factor or self.vae_scale_factor[0] < 1:
            raise ConfigError(
                f"{where}.vae_scale_factor = {self.vae_scale_factor}", "must be positive", "write [4, 8, 8]"
            )
        if not self.force_resolution and self.max_hxw is None:
            raise ConfigError(f"{where}.max_hxw", "is missing, and force_resolution = false asks for it")

    def shapes(self) -> dict[str, Any]:
        """Return the keys of ``dataset_param`` that say frames, heights and widths."""
        if self.force_resolution:
            if not self.drop_short_ratio:
                what = "dataset_param.preprocess_parameters.force_resolution = true"
                why = "and drop_short_ratio = 0: clips of several lengths and one size"
                raise ConfigError(what, why, "name dataset_param.buckets")
            return {"num_frames": self._frames()[-1], "max_height": self.max_height, "max_width": self.max_width}
        budget = {
            "frames": self._frames(), "area": self.max_hxw, "multiple_of": math.lcm(self.hw_stride, WAN_PATCH),
            "max_aspect_ratio": self.hw_aspect_thr or 1.5,
        }  # fmt: skip
        return {"buckets": budget}

    def _frames(self) -> list[int]:
        """Return every number of frames that a clip may have, an image's one among them."""
        step = self.vae_scale_factor[0]
        longest = (self.num_frames - 1) // step * step + 1
        shortest = longest if self.drop_short_ratio else -(-(self.min_num_frames - 1) // step) * step + 1
        return sorted({1, *range(shortest, longest + 1, step)})

    def in_our_words(self) -> dict[str, Any]:
        """Return the other keys of ``dataset_param``."""
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
    """Where they are."""
    preprocess_parameters: Processor
    """What is made of them."""
    use_text_processer: Literal[True] = True
    """Captions are read."""
    enable_text_preprocessing: bool = True
    """They are always cleaned here, by the two methods that its Wan examples name."""
    text_preprocess_methods: Any = None
    """The same."""
    tokenizer_config: Any = None
    """Of model.json here, section text_encoder."""


@dataclass(frozen=True)
class Loader:
    """``dataloader_param`` with ``dataloader_mode``."""

    dataloader_mode: str
    """Who gives samples to ranks: "sampler" and "base" are one here."""
    sampler_type: str = "stateful_distributed_sampler"
    """In which order; all that is kept of it are ``shuffle``, and micro-batches of one shape."""
    shuffle: bool = False
    """Reshuffle every epoch."""
    drop_last: bool = True
    """Leave out the last batch of an epoch, which is smaller."""
    group_data: bool = False
    """Micro-batches of one shape, as buckets always have them."""
    group_frame: bool = False
    """Micro-batches of about as many frames."""
    group_resolution: bool = False
    """Of about as large frames."""
    data_sharding: bool = False
    """Each rank has a part of the samples of its own."""
    initial_global_step_for_sampler: int = 0
    """Where to go on."""
    pin_memory: bool = False
    """Moves nothing but time, as the following do."""
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    enable_preload: bool = False
    prefetch_batches: int = 4
    """Our own key."""

    def __post_init__(self) -> None:
        _check_only(self, "dataloader_param", ONLY_OF_LOADER)
        if self.dataloader_mode not in ("sampler", "base"):
            why = REFUSED_MODES.get(self.dataloader_mode, "is none of its modes")
            raise ConfigError(f"dataloader_param.dataloader_mode = {self.dataloader_mode!r}", why,
                              "use sampler, and dataset_param.buckets for several shapes")  # fmt: skip
        if self.dataloader_mode == "sampler" and self.sampler_type not in SAMPLERS:
            why = REFUSED_SAMPLERS.get(self.sampler_type, "is none of its samplers")
            raise ConfigError(f"dataloader_param.sampler_type = {self.sampler_type!r}", why,
                              f"use one of {', '.join(SAMPLERS)}")  # fmt: skip


def in_our_words(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a data.json with its sections in our words; ours stay as they are. Raises ConfigError."""
    found, samples, loader = dict(content), content.get("dataset_param"), content.get("dataloader_param")
    if isinstance(samples, dict) and samples.get("dataset_type") == "feature":
        raise ConfigError(f"{where}: dataset_param.dataset_type = 'feature'", "its features are pickles of its own "
                          "extraction, which are not read here", 'write the "t2v" that they were made of; '
                          "mm-dit cache-latents keeps its latents and texts")  # fmt: skip
    if isinstance(samples, dict) and samples.get("dataset_type") == "t2v":
        found["dataset_param"] = _clips(samples, where)
    if isinstance(loader, dict) and "dataloader_mode" in loader:
        own = from_mapping(Loader, loader, f"{where}: dataloader_param")
        found["dataloader_param"] = {"shuffle": own.shuffle, "prefetch_batches": own.prefetch_batches}
    return found


OURS = ("features", "bucket_group", "clip_start", "valid_fraction", "skip_bad_clips", "crop", "buckets")
"""Our own keys, which may stand beside its."""


def _clips(section: Mapping[str, Any], where: str) -> dict[str, Any]:
    theirs = {name: value for name, value in section.items() if name not in OURS}
    for name, cls in (("basic_parameters", Files), ("preprocess_parameters", Processor)):
        if name in theirs:
            theirs[name] = from_mapping(cls, theirs[name], f"{where}: dataset_param.{name}")
    clips = from_mapping(Clips, theirs, f"{where}: dataset_param")
    folder, annotation = clips.basic_parameters.places()
    ours = {name: section[name] for name in OURS if name in section}
    paths = {"dataset_type": "clips", "data_folder": folder, "json_path": annotation}
    shapes = {} if "buckets" in ours else clips.preprocess_parameters.shapes()
    return {**paths, **shapes, **clips.preprocess_parameters.in_our_words(), **ours}
