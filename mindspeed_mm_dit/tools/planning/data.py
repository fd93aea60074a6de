"""An overview of a data set: sizes, buckets and classes, and the first images of each class as they enter a step."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.data import DataConfig, load_data_config
from mindspeed_mm_dit.configs.files import is_folder
from mindspeed_mm_dit.configs.limits import MAX_INT64, check_between
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.configs.run import check_output_file
from mindspeed_mm_dit.configs.source import Size, SourceParam, format_sizes
from mindspeed_mm_dit.data.buckets import check_filled, fraction_after_crop
from mindspeed_mm_dit.data.cache import Cache
from mindspeed_mm_dit.data.check_images import ImageCheck, check_image_files, enlargements
from mindspeed_mm_dit.data.mixed import missing_skip_settings, rows_by_source, source_sections
from mindspeed_mm_dit.data.order import order_of, split_rows
from mindspeed_mm_dit.data.shards import ShardRows
from mindspeed_mm_dit.data.sources import Rows, SourceRequest, source_of
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.data import check_sizes, with_budget
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.pictures import PICTURES, draw_grid
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.training.data_set import log_copies_among, log_empty_classes, log_notes

SOME = 1_000
"""Number of images in shards whose sizes are read."""
UNEVEN_RATIO = 10
"""A class with this many times the images of another gets a warning."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the images of a data set, from their headers."""

    shorter: np.ndarray
    """(N,) int64: shorter side of each image in pixels, ascending."""
    num_grey: int
    """Images without colour."""
    part_cut: float
    """Median fraction of an image that a centre square crop removes."""

    @classmethod
    def of(cls, looks: Sequence[ImageCheck]) -> Sizes:
        """Collect the sizes of readable images."""
        shorter, longer = np.sort(np.array([(look.height, look.width) for look in looks]).reshape(-1, 2)).T
        return cls(np.sort(shorter), sum(look.is_grey for look in looks), float(np.median(1 - shorter / longer)))

    @property
    def median(self) -> int:
        """Median of the shorter side."""
        return int(self.shorter[len(self.shorter) // 2])

    def enlarged(self, image_size: int) -> int:
        """Return how many images are smaller than ``image_size``."""
        return int((self.shorter < image_size).sum())


def sizes_of(rows: Rows, size: int | Size) -> Sizes:
    """Return the image sizes from the headers; in shards only of SOME images, unless all of these are grey."""
    if isinstance(rows.paths, ShardRows) and len(rows) > SOME:
        some = _sizes_of_each(rows.subset(np.linspace(0, len(rows) - 1, SOME).astype(int)), size)
        if some.num_grey < len(some.shorter):
            return some
    return _sizes_of_each(rows, size)


def _sizes_of_each(rows: Rows, size: int | Size) -> Sizes:
    return Sizes.of([look for look in check_headers(rows, size) if look.problem is None])


def check_headers(rows: Rows, size: int | Size) -> list[ImageCheck]:
    """Look at the header of each image."""
    paths: Any = rows.paths
    if not isinstance(paths, ShardRows):
        return check_image_files([Path(path) for path in paths], size, decode=False)
    return check_image_files([partial(paths.content, number) for number in range(len(rows))], size, decode=False)


def bucket_table(train: Rows, valid: Rows, param: SourceParam) -> list[str]:
    """Return a table of the buckets: samples, samples left out of an epoch, cropped fraction, enlarged samples."""
    shapes, sizes = (
        np.concatenate(pair) for pair in zip(_shapes_and_sizes(train, param), _shapes_and_sizes(valid, param))
    )
    uncropped, times = fraction_after_crop(sizes, shapes), enlargements(sizes, shapes)
    held_out = np.arange(len(sizes)) >= len(train)
    group = 1 if train.shapes is None else param.bucket_group
    lines = [f"{'bucket':>16}  to train on  left out  held out  cut off: mean   most  enlarged, at most"]
    for shape in np.unique(shapes, axis=0):
        in_bucket = (shapes == shape).all(1)
        count, most = int((in_bucket & ~held_out).sum()), times[in_bucket].max()
        mean_cut, most_cut = 1 - uncropped[in_bucket].mean(), 1 - uncropped[in_bucket].min()
        samples = int(in_bucket[: len(train)][train.entries].sum())
        lines.append(
            f"{format_sizes([shape]):>16}  {count:>11,}  {samples % group:>8,}  "
            f"{int((in_bucket & held_out).sum()):>8,}  {mean_cut:>13.1%}  {most_cut:>5.1%}  "
            f"{int((times[in_bucket] > 1).sum()):>8,}" + (f", {most:.1f} times" if most > 1 else "")
        )
    rectangles, square = sizes[:, -2:], (sizes[:, -2:].min(1) / sizes[:, -2:].max(1)).mean()
    area, noun = fraction_after_crop(rectangles, shapes[:, -2:]).mean(), "image" if sizes.shape[1] == 2 else "frame"
    frames = f"; {shapes[:, 0].sum() / sizes[:, 0].sum():.1%} of the frames are" if noun == "frame" else ""
    return [*lines, f"{area:.1%} of each {noun}'s area is kept; a square would keep {square:.1%}{frames}"]


def _shapes_and_sizes(rows: Rows, param: SourceParam) -> tuple[np.ndarray, np.ndarray]:
    """Return the target shape and the original size of each sample."""
    assert rows.sizes is not None
    return np.broadcast_to(param.sample_size, rows.sizes.shape) if rows.shapes is None else rows.shapes, rows.sizes


def note_of_enlarged(rows: Rows, param: SourceParam) -> str | None:
    """Return a warning about samples smaller than their bucket, or None."""
    shapes, sizes = _shapes_and_sizes(rows, param)
    times = enlargements(sizes, shapes)
    if times.max() <= 1:
        return None
    largest = rows.paths[int(times.argmax())]
    return (
        f"warning: {int((times > 1).sum()):,} of {len(rows):,} {param.noun}s are enlarged to their bucket, {largest} "
        f"{times.max():.1f} times: a smaller budget or smaller shapes would avoid this"
    )


def counts_of(rows: Rows) -> np.ndarray:
    """Return the number of images of each class, (classes,) int64."""
    return np.bincount(rows.labels, minlength=len(rows.classes))


def note_of_uneven(rows: Rows, noun: str = "image") -> str | None:
    """Return a warning about classes with very different numbers of images, or None."""
    counts = counts_of(rows)
    few, many = int(np.where(counts > 0, counts, counts.max()).argmin()), int(counts.argmax())
    if counts[many] < UNEVEN_RATIO * counts[few]:
        return None
    return (
        f"warning: {rows.classes[many]} has {counts[many]:,} {noun}s and {rows.classes[few]} {counts[few]:,}: a class "
        f"is drawn as often as it has {noun}s"
    )


def first_samples(
    data: DataConfig, train: Rows, channels: int, seed: int, per_class: int, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first images that a run with ``seed`` trains on, after augmentation.

    They are scaled, cropped and mirrored as in the first epoch. Returns pixels (n, H, W, channels) uint8 and their
    sample indices (n,) int64. With labels: at most ``per_class`` of each of the first ``num_classes`` non-empty
    classes, ordered by label. Without: 2 * ``per_class``.
    """
    param = data.dataset_param
    order = order_of(train, param, seed, data.dataloader_param.shuffle)
    sample_indices = np.arange(len(order), dtype=np.int64)
    images = order.images(sample_indices)
    chosen = sample_indices[: 2 * per_class]
    if "label" in train.items:
        labels = train.labels[images]
        classes = np.unique(labels)[:num_classes]
        chosen = np.concatenate([sample_indices[labels == label][:per_class] for label in classes])
    reader = source_of(param).visuals(train, param, channels)
    augmentations = reader.views_at(seed, chosen)
    samples = [reader.read(images[chosen[[n]]], augmentations[[n]]) for n in range(len(chosen))]
    pixels = [on_grey_canvas(read.arrays["pixels"][0], *param.frame) for read in samples]
    return rearrange(pixels, "n c h w -> n h w c"), np.array([int(read.rows[0]) for read in samples])


def on_grey_canvas(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Center pixels (C, h, w) on a grey canvas (C, height, width) that is large enough for all shapes."""
    top, left = (height - pixels.shape[1]) // 2, (width - pixels.shape[2]) // 2
    around = ((0, 0), (top, height - pixels.shape[1] - top), (left, width - pixels.shape[2] - left))
    return np.pad(pixels, around, constant_values=128)


DESCRIPTION = """\
Look at your data before you train: show what a run would see of its images or videos. That is their classes, sizes and
buckets, and the files that are left out or doubtful. No framework is needed.

  mm-dit data my_config --output sheet.png
  mm-dit data data.json --model model.json

For images, --output draws the first of each class that a run takes, or the first with their captions, scaled, cut and
mirrored as in its first epoch. The exit code is 1 if a run would stop at a file that cannot be used."""

PER_CLASS, MAX_CLASSES = 10, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="folder with data.json, or a data.json")
    add("--model", metavar="JSON", help="model.json (default: the one next to data.json, if it exists)")
    add("--seed", type=int, default=1234, help="--seed of the run (default 1234, as in training)")
    add("--output", metavar="FILE", help="contact sheet to draw, .png or .jpg")


def run(args: argparse.Namespace) -> int:
    """Read the data as a run would, and print what there is."""
    path = Path(args.config, "data.json") if is_folder(Path(args.config)) else Path(args.config)
    check_between("--seed", args.seed, 0, MAX_INT64)
    data = load_data_config(path, "CONFIG")
    param: Any = data.dataset_param.without_bad()
    model = _model(args, path, data)
    param = with_budget(model, param) if model else param
    conditions = model.predictor.conditions if model else None
    items, label = (conditions.items, conditions.label) if conditions else (param.items, None)
    _check_output(args.output, param, items)
    from_cache = param.cache is not None and not (is_folder(Path(param.data_folder)) or param.source)
    if from_cache:  # (the files are gone or not needed, but a cache knows less than they do)
        rows = Cache(param.cache, param.cache_key).rows(param.data_folder)
    else:
        request = SourceRequest(
            items, label and label.num_classes, frame_rate=model.predictor.frame_rate if model else None
        )
        rows = source_of(param).open(param.without_cache(), request)
    train, valid = (rows.subset(part) for part in split_rows(rows, param, args.seed))
    if "label" in rows.items:
        _print_classes(train, valid)
    else:
        echo(f"{len(train):,} {param.noun}s to train on, {len(valid):,} held out")
    if rows.sizes is not None:
        _print_buckets(train, valid, param)
    elif not from_cache:
        _print_sizes_of_each(rows, train, valid, param)
    needed = missing_skip_settings(rows, data.dataset_param)
    _log_doubtful(rows, param.noun, label and label.num_classes, skips=not needed)
    if "caption" in items and not from_cache:
        echo(
            "note: captions are not measured here; a run checks whether each fits the text encoder: --dry-run",
            file=sys.stderr,
        )
    if args.output:
        _draw(args, dataclasses.replace(data, dataset_param=param), train, model.ae.channels if model else 3)
    if needed:
        echo(f"a run would stop there: repair or remove them, or set {' and '.join(needed)} to true")
        return 1
    return 0


def _check_output(output: str | None, param: SourceParam, items: tuple[str, ...]) -> None:
    if output is None:
        return
    if Path(output).suffix.lower() not in PICTURES:
        raise ConfigError(f"--output = {output} must end in one of {', '.join(PICTURES)}.")
    if not {"label", "caption"} & set(items) or len(param.sample_size) != 2:
        raise ConfigError(
            f"--output = {output} draws images with labels or captions, and these are {param.noun}s with "
            f"{' and '.join(items)}. Leave it out."
        )
    check_output_file("--output", output)


def _model(args: argparse.Namespace, path: Path, data: DataConfig) -> ModelConfig | None:
    """Return the model, checked against data.json; None if there is none."""
    default_path = path.parent / "model.json"
    if args.model is None and not default_path.is_file():
        return None
    model = load_model_config(args.model or default_path)
    check_sizes(model, data.dataset_param)
    data.dataset_param.check_items(model.predictor.conditions.items)
    return model


def _print_classes(train: Rows, valid: Rows) -> None:
    counts = zip(train.classes, counts_of(train).tolist(), counts_of(valid).tolist())
    rows = [(label, *row) for label, row in enumerate(counts) if any(row[1:]) or row[0] != str(label)]
    width = max(4, *(len(name) for _, name, _, _ in rows))
    echo(f"label  {'name':<{width}}  {'to train on':>11}  {'held out':>8}")
    for label, name, count, held_out in rows:
        echo(f"{label:>5}  {name:<{width}}  {count:>11,}  {held_out:>8,}")
    echo(f"{'':>5}  {'all':<{width}}  {len(train):>11,}  {len(valid):>8,}")


def _print_sizes_of_each(rows: Rows, train: Rows, valid: Rows, param: SourceParam) -> None:
    """Print the sizes in each source of a mix, or in the one data set; with buckets, as a table."""
    sources = source_sections(param)
    for (where, source), part, of_train, of_valid in zip(
        sources, rows_by_source(rows), rows_by_source(train), rows_by_source(valid)
    ):
        if len(sources) > 1:
            echo(where)
        if part.sizes is None:
            _print_sizes(part, source.sample_size[0])
            check_filled(of_train, source.bucket_group)
        else:
            _print_buckets(of_train, of_valid, source)


def _print_sizes(rows: Rows, image_size: int) -> None:
    sizes = sizes_of(rows, image_size)
    num = len(sizes.shorter)
    echo(
        f"shorter side {sizes.shorter[0]:,} to {sizes.shorter[-1]:,} pixels, middle {sizes.median:,}; "
        f"image_size {image_size} enlarges {sizes.enlarged(image_size):,} of {num:,}, and its square cuts "
        f"{sizes.part_cut:.0%} off the middle image; {num - sizes.num_grey:,} in colour, {sizes.num_grey:,} grey"
    )


def _print_buckets(train: Rows, valid: Rows, param: SourceParam) -> None:
    echo("\n".join(bucket_table(train, valid, param)))
    if note := note_of_enlarged(train, param):
        echo(note, file=sys.stderr)
    if train.shapes is not None:
        for part in rows_by_source(train):
            check_filled(part, param.bucket_group)


def _log_doubtful(rows: Rows, noun: str, num_classes: int | None, skips: bool) -> None:
    sys.stdout.flush()
    log_notes(rows, noun, skips)
    if "label" not in rows.items:
        return
    if uneven := note_of_uneven(rows, noun):
        echo(uneven, file=sys.stderr)
    if rows.cached is None and noun == "image":
        log_copies_among(rows)
    if num_classes:
        log_empty_classes(np.unique(rows.labels), rows.classes, num_classes, noun)


def _draw(args: argparse.Namespace, data: DataConfig, train: Rows, channels: int) -> None:
    if train.cached is not None:
        echo(f"{args.output}: not drawn, the cache {data.dataset_param.cache} holds no images")
        return
    pixels, rows = first_samples(data, train, channels, args.seed, PER_CLASS, MAX_CLASSES)
    values = {"label": train.labels[rows].tolist()} if "label" in train.items else {}
    if "caption" in train.items:
        values = {"caption": [train.captions[row][0] for row in rows.tolist()]}
    titles = SampleConditions(values).titles(train.classes)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    draw_grid(pixels, titles).save(args.output)
    echo(f"{args.output}: {len(pixels)} images as a run with --seed {args.seed} first takes them")
