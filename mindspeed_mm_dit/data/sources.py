"""The kinds of data set, by ``dataset_param.dataset_type``: one record each, with how to open and read its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.data import MixedParam
from mindspeed_mm_dit.configs.images import ClipsParam, DatasetParam
from mindspeed_mm_dit.data.clips import ClipReader, clips_as_listed, open_clips, provide_clips
from mindspeed_mm_dit.data.folder import as_listed, open_folder, open_shards, shards_as_listed
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.mixed import MixedReader, joined, parts_of
from mindspeed_mm_dit.data.rows import Rows, SourceRequest, Visuals
from mindspeed_mm_dit.registry import Registry


@dataclass(frozen=True)
class Source:
    """A kind of data set."""

    config: type
    """Class of section ``dataset_param`` (``configs/source.py``)."""
    open: Callable[[Any, SourceRequest], Rows]
    """(section, request) -> the rows, every one checked; raises DataError."""
    visuals: Callable[[Rows, Any, int], Visuals]
    """(rows, section, channels of an image or a frame) -> the reader of their pixels."""
    provide: Callable[[Any], None] = lambda param: None
    """Writes the built-in data that the section names, with files that model.json may name, unless they exist."""
    as_listed: Callable[[Any, Rows], Rows] = lambda param, rows: rows
    """(section, rows of a cache) -> the rows, compared with the files if these exist; raises DataError."""


def _image_reader(rows: Rows, param: DatasetParam, channels: int) -> ImageReader:
    flip_prob = 0.5 if param.random_flip else 0.0
    return ImageReader(rows, param.sample_size, channels, param.skip_bad_images, flip_prob, param.color_profiles)


def _open_mixed(param: MixedParam, request: SourceRequest) -> Rows:
    return joined(
        param, request.items or param.items, [source_of(source).open(source, request) for source in param.sources]
    )


def _mixed_reader(rows: Rows, param: MixedParam, channels: int) -> MixedReader:
    pairs = zip(param.sources, parts_of(rows))
    readers = [source_of(source).visuals(part, source, channels) for source, part in pairs]
    return MixedReader(rows, readers, param.extra_images)


def _provide_mixed(param: MixedParam) -> None:
    for source in param.sources:
        source_of(source).provide(source)


IMAGE_FOLDER = Source(DatasetParam, open_folder, _image_reader, as_listed=as_listed)
SHARDS = Source(DatasetParam, open_shards, _image_reader, as_listed=shards_as_listed)
CLIPS = Source(ClipsParam, open_clips, ClipReader, provide_clips, clips_as_listed)
MIXED = Source(MixedParam, _open_mixed, _mixed_reader, _provide_mixed)
SOURCES = Registry[Source]("data_source")


def register_source(dataset_type: str, source: Source) -> None:
    """Add a kind of data set; raises ConfigError if another one has its name."""
    SOURCES[dataset_type] = source


def source_of(param: Any) -> Source:
    """Return the kind of a section ``dataset_param``."""
    return SOURCES[param.dataset_type]
