"""``mm-dit data``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.data import DataConfig, load_data_config
from mindspeed_mm_dit.configs.files import is_folder
from mindspeed_mm_dit.configs.limits import LARGEST, check_between
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.configs.run import check_output_file
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.data.buckets import check_filled
from mindspeed_mm_dit.data.cache import Cache
from mindspeed_mm_dit.data.mixed import parts_of, sections, stopping
from mindspeed_mm_dit.data.order import split_rows
from mindspeed_mm_dit.data.sources import Rows, SourceRequest, source_of
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.data import check_sizes, with_budget
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.pictures import PICTURES, draw_grid
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.planning.overview import (
    bucket_table,
    counts_of,
    first_samples,
    note_of_enlarged,
    note_of_uneven,
    sizes_of,
)
from mindspeed_mm_dit.training.data_set import log_copies_among, log_empty_classes, log_notes

DESCRIPTION = """\
Look at your data before you train: show what a run would see of its images or videos. That is their classes, sizes and
buckets, and the files that are left out or doubtful. No framework is needed.

  mm-dit data my_config --output sheet.png
  mm-dit data data.json --model model.json

For images, --output draws the first of each class that a run takes, or the first with their captions, scaled, cut and
mirrored as in its first epoch. The exit code is 1 if a run would stop at a file that cannot be used."""

PER_CLASS, MOST_CLASSES = 10, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("config", metavar="CONFIG", help="folder with data.json, or a data.json")
    parser.add_argument("--model", metavar="JSON", help="model.json (default: the one next to data.json, if it exists)")
    parser.add_argument("--seed", type=int, default=1234, help="--seed of the run (default 1234, as in training)")
    parser.add_argument("--output", metavar="FILE", help="contact sheet to draw, .png or .jpg")


def run(args: argparse.Namespace) -> int:
    """Read the data as a run would, and print what there is."""
    path = Path(args.config, "data.json") if is_folder(Path(args.config)) else Path(args.config)
    check_between("--seed", args.seed, 0, LARGEST)
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
    needed = stopping(rows, data.dataset_param)
    _log_doubtful(rows, param.noun, label and label.num_classes, skips=not needed)
    if "caption" in items and not from_cache:
        echo("note: captions are not measured here; a run checks whether each fits the text encoder: --dry-run",
              file=sys.stderr)  # fmt: skip
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
        raise ConfigError(f"--output = {output}", "is not a picture file", f"use one of {', '.join(PICTURES)}")
    if not {"label", "caption"} & set(items) or len(param.sample_size) != 2:
        have = f"these are {param.noun}s with {' and '.join(items)}"
        raise ConfigError(f"--output = {output}", f"images with labels or captions are drawn, and {have}",
                          "leave it out")  # fmt: skip
    check_output_file("--output", output)


def _model(args: argparse.Namespace, path: Path, data: DataConfig) -> ModelConfig | None:
    """Return the model, checked against data.json; None if there is none."""
    default_path = path.parent / "model.json"
    if args.model is None and not default_path.is_file():
        return None
    model = load_model_config(args.model or default_path)
    check_sizes(model, data.dataset_param)
    data.dataset_param.check_gives(model.predictor.conditions.items)
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
    sources = sections(param)
    for (where, source), part, of_train, of_valid in zip(sources, parts_of(rows), parts_of(train), parts_of(valid)):
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
        for part in parts_of(train):
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
    pixels, rows = first_samples(data, train, channels, args.seed, PER_CLASS, MOST_CLASSES)
    values = {"label": train.labels[rows].tolist()} if "label" in train.items else {}
    if "caption" in train.items:
        values = {"caption": [train.captions[row][0] for row in rows.tolist()]}
    titles = SampleConditions(values).titles(train.classes)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    draw_grid(pixels, titles).save(args.output)
    echo(f"{args.output}: {len(pixels)} images as a run with --seed {args.seed} first takes them")
