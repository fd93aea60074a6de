"""The data of a run.

Opened once, checked against model.json, split by the seed only, and described in its log.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.run import MultiModalArguments
from mindspeed_mm_dit.configs.source import Shape
from mindspeed_mm_dit.data.buckets import check_filled, count_shapes
from mindspeed_mm_dit.data.captions import varied
from mindspeed_mm_dit.data.check_images import find_copies
from mindspeed_mm_dit.data.conditions import initial_images
from mindspeed_mm_dit.data.images import DECODE_CHECK_LIMIT
from mindspeed_mm_dit.data.mixed import mixed_lines, rows_by_source
from mindspeed_mm_dit.data.order import split_rows
from mindspeed_mm_dit.data.samples import Draw, SampleReader
from mindspeed_mm_dit.data.sources import PROBLEMS_SHOWN, Rows
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm_dit.models.data import open_data, with_size
from mindspeed_mm_dit.models.words_encoder import known_words_of
from mindspeed_mm_dit.planning import train_flop
from mindspeed_mm_dit.terminal import logger

CAPTIONS_SHOWN, CAPTIONS_SAVED = 8, 3
"""Most captions that a report samples, and that a checkpoint stores."""
CLASSES_SHOWN = 10
"""Most classes that a report samples."""
SHAPES_SHOWN = 6
"""Most buckets that are sampled."""


class Sample(NamedTuple):
    """One sample of a training step."""

    sample_index: int
    """Its index in the run, over all ranks."""
    path: str
    """File of its image."""
    label: str
    """Name of its class."""
    was_dropped: bool
    """Whether it was trained on without its label."""


class DataSet:
    """The samples of a run, some of them held out. The checks before a run open it, and hand it on as ``mm.data_set``.

    Raises:
        UserError: the files do not fit model.json, or hold samples that cannot be used.
    """

    def __init__(self, mm: MultiModalArguments, seed: int) -> None:
        self._opened = open_data(mm.model, mm.data.dataset_param, classes=mm.saved_classes)
        self._shuffle, self._seed = mm.data.dataloader_param.shuffle, seed
        self._model, self._param, rows = mm.model, mm.data.dataset_param, self._opened.rows
        train, valid = split_rows(rows, self._param, seed)
        self._train, self._valid, self._held_out = rows.subset(train), rows.subset(valid), self._opened
        if mm.valid_data is not None:
            self._held_out = open_data(mm.model, mm.valid_data.dataset_param, classes=mm.saved_classes)
            self._valid = self._held_out.rows
            _check_valid_data(mm, self._train, self._valid)
        self.num_train, self.num_valid = len(self._train), len(self._valid)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch to train on: images with their repeats."""
        return sum(len(part.entries) for part in rows_by_source(self._train))

    @property
    def noun(self) -> str:
        """What a sample is called: image, clip or sample."""
        return self._param.noun

    def check(self, global_batch_size: int, micro_batch_size: int | None = None) -> None:
        """Raise DataError if a batch is larger than the data set, or does not fit the buckets."""
        order = self._opened.order(self._train, self._seed, self._shuffle)
        if micro_batch_size:
            order.check(micro_batch_size)
            self._held_out.order(self._valid, self._seed, self._shuffle, held_out=True).check(micro_batch_size)
        if self._train.shapes is not None:
            for part in rows_by_source(self._train):
                check_filled(part, self._param.bucket_group)
        if self.epoch_samples < global_batch_size:
            raise DataError(
                f"{self._param.where} holds {self.epoch_samples} training {self.noun}s, fewer than --global-batch-size "
                f"= {global_batch_size}. Use a smaller batch or more {self.noun}s."
            )

    def samples(self, draw: Draw, held_out: bool = False) -> SampleReader:
        """Return the training samples, or the held-out ones, by sample index.

        draw: the random numbers that the objective needs for a sample.
        """
        opened, rows = (self._held_out, self._valid) if held_out else (self._opened, self._train)
        return opened.samples(rows, self._seed, self._shuffle, draw, held_out)

    def micro_batches(
        self, start: int, size: int, rank: int, ranks: int, num_microbatches: int
    ) -> Iterator[np.ndarray]:
        """Yield the sample indices of one rank's training micro-batches, ``num_microbatches`` of them per step."""
        order = self._opened.order(self._train, self._seed, self._shuffle)
        return order.micro_batches(start, size, rank, ranks, num_microbatches)

    def flop_per_sample(self) -> float:
        """Return the FLOP of a training step for one sample; the mean if samples have several shapes."""
        return float(self._per_sample(train_flop).mean())

    def tokens(self) -> np.ndarray:
        """Return the number of tokens of each training sample, (N,)."""
        return self._per_sample(lambda predictor: predictor.num_tokens)

    def _per_sample(self, fact: Callable[[PredictorConfig], float]) -> np.ndarray:
        """Return ``fact`` of the predictor at the shape of each training sample, (N,)."""
        if self._train.shapes is None:
            return np.full(self.num_train, fact(self._model.predictor))
        shapes, which = np.unique(self._train.shapes, axis=0, return_inverse=True)
        each = np.array([fact(with_size(self._model, tuple(shape)).predictor) for shape in shapes.tolist()])
        return each[which.reshape(-1)]

    def facts(self) -> dict[str, Any]:
        """Return the facts of the data that every checkpoint stores, as fields of MultiModalArguments."""
        captions = self._opened.example_captions() if "caption" in self._model.predictor.conditions.items else []
        saved = tuple(filter(None, captions[:CAPTIONS_SAVED]))
        words = known_words_of(self._model, itertools.chain.from_iterable(self._train.captions)) if saved else ()
        facts = {"classes": self._train.classes, "captions": saved, "words": tuple(words)}
        return {**facts, "data_digest": self._train.digest}

    def examples(self, prompts: Sequence[str] = ()) -> dict[str, list[Any]]:
        """Return, by item, some conditions to sample: the first classes; ``prompts``, or varied captions.

        For a network that takes the first frame of a clip: those of a few clips, held-out ones if there are any.
        """
        conditions, rows = self._model.predictor.conditions, self._opened.rows
        if conditions.needs_frames:
            return self._clip_examples(conditions)
        defaults: dict[str, list[Any]] = {}
        if conditions.label:
            defaults["label"] = list(range(min(CLASSES_SHOWN, conditions.label.num_classes)))
        if "caption" in conditions.items:
            defaults["caption"] = list(prompts) or varied(self._opened.example_captions(), CAPTIONS_SHOWN)
        examples = {item: defaults.get(item) or list(rows.items[item][:CLASSES_SHOWN]) for item in conditions.items}
        most = max(map(len, examples.values()), default=1)
        return {item: [values[n % len(values)] for n in range(most)] for item, values in examples.items()}

    def _clip_examples(self, conditions: Conditions) -> dict[str, list[Any]]:
        """Return conditions and first frames of some clips of one shape, no two with the same caption."""
        opened, rows = (self._held_out, self._valid) if self.num_valid else (self._opened, self._train)
        candidates, visuals = np.arange(len(rows)), opened.visuals(rows)
        if rows.shapes is not None:
            candidates = np.flatnonzero((rows.shapes == self.sampled_shapes()[0]).all(1))
        values = {item: rows.items[item] for item in conditions.items}
        if "caption" in values:
            known = opened.cache is None or opened.cache.knows_captions
            values["caption"] = [captions[0] if known else "" for captions in rows.captions]
        firsts = {str([column[row] for column in values.values()]): row for row in reversed(candidates.tolist())}
        chosen = np.array(sorted(firsts.values())[:CAPTIONS_SHOWN])
        views = visuals.views_at(self._seed, chosen)
        read = [visuals.read(chosen[n : n + 1], views[n : n + 1]).arrays for n in range(len(chosen))]
        frames = [initial_images(arrays, conditions.frames.with_last) for arrays in read]  # type: ignore[union-attr]
        return {item: [column[row] for row in chosen] for item, column in values.items()} | {"image": frames}

    def shapes(self) -> list[Shape]:
        """Return the shapes of training samples, the most frequent first; empty without buckets."""
        counts = [] if self._train.shapes is None else count_shapes(self._train.shapes)
        return [shape for shape, _ in sorted(counts, key=lambda shape_and_count: -shape_and_count[1])]

    def sampled_shapes(self) -> list[Shape]:
        """Return the shapes in which a run generates samples: the most frequent; one for clips with a first frame."""
        shapes = self.shapes()
        if self._model.predictor.conditions.needs_frames:
            return sorted(shapes, key=lambda shape: shape[0] == 1)[:1]
        return shapes[:SHAPES_SHOWN]

    def named(self, sample_indices: np.ndarray) -> list[Sample]:
        """Return the training samples at ``sample_indices`` (B,), with their conditions in words."""
        samples = self.samples(lambda *_: {})
        paths = [self._train.paths[row] for row in samples.order.images(sample_indices).tolist()]
        words = samples.words(sample_indices)
        return [
            Sample(
                sample_index,
                path,
                ", ".join({word: None for word, _ in conditions}),
                any(drop for _, drop in conditions),
            )
            for sample_index, path, *conditions in zip(sample_indices.tolist(), paths, *words)
        ]

    def echo(self) -> None:
        """Print the size and classes of the data set, skipped samples, and likely mistakes."""
        label, rows = self._model.predictor.conditions.label, self._opened.rows
        if label is not None:
            log_classes(self._train, self._valid, label.num_classes, self.noun)
        if self._train.shapes is not None:
            logger.info("\n".join(mixed_lines(self._train, self._param)))
        if "caption" in self._model.predictor.conditions.items:
            self._echo_captions(rows)
        log_notes(rows, self.noun)
        if label is not None and self._opened.cache is None:
            log_copies_among(rows)

    def _echo_captions(self, rows: Rows) -> None:
        several = sum(len(captions) > 1 for captions in rows.captions)
        source = f"the cache in {self._param.cache}" if self._param.cache else self._param.where.partition(" = ")[2]
        held_out = f", {self.num_valid:,} held out" if self.num_valid else ""
        captions = f"; {several:,} have several captions" if several else ""
        frames, (height, width) = self._param.sample_size[:-2], self._param.sample_size[-2:]
        size = f"{frames[0]} frames of {height} x {width}" if frames else f"{height} x {width}"
        size = size if rows.shapes is None else f"{len(np.unique(rows.shapes, axis=0))} shapes"
        logger.info(f"{self.num_train:,} {self.noun}s to train on{held_out}, {size}, from {source}{captions}")


def _check_valid_data(mm: MultiModalArguments, train: Rows, valid: Rows) -> None:
    """Raise ConfigError if the validation data does not match the training data."""
    assert mm.valid_data is not None
    ours, theirs = mm.data.dataset_param, mm.valid_data.dataset_param
    if ours.valid_fraction:
        raise ConfigError(
            f"--mm-valid-data and dataset_param.valid_fraction = {ours.valid_fraction} of --mm-data both choose the "
            "validation data. Use one of the two."
        )
    if (ours.cache is None) != (theirs.cache is None):
        raise ConfigError(
            "One of --mm-data and --mm-valid-data is a cache, and the other is not. Cache both, or neither."
        )
    if valid.classes != train.classes:
        raise ConfigError(
            f"--mm-valid-data has the classes {', '.join(valid.classes[:10])} in {theirs.where}. Use exactly the "
            "classes of --mm-data."
        )


COPIES_SHOWN = 3


def log_notes(rows: Rows, noun: str = "image", skips: bool = True) -> None:
    """Print the notes from reading the rows; ``skips``: whether a run skips the bad ones."""
    for note in rows.notes:
        logger.warning(note)
    if rows.skipped:
        listed = rows.problems[:PROBLEMS_SHOWN]
        more = [f"and {rows.skipped - len(listed)} more"] if listed and rows.skipped > len(listed) else []
        named = ":" + "".join(f"\n    {line}" for line in (*listed, *more)) if listed else ""
        without = " and are skipped" if skips else ""
        logger.warning(f"warning: {rows.skipped} {noun}(s) cannot be used{without}{named}")


def log_copies_among(rows: Rows) -> None:
    """Warn of identical images, in data sets small enough that every file is read before a run."""
    if len(rows) <= DECODE_CHECK_LIMIT:
        log_copies(rows.paths, rows.labels, rows.classes)


def log_copies(paths: Sequence[str], labels: np.ndarray, classes: Sequence[str]) -> None:
    """Warn of images that are identical byte for byte: if two have different labels, one label is wrong."""
    copies = find_copies(paths)
    same = [labels[copy.image] == labels[copy.earlier] for copy in copies]
    for kind, words, duplicates in (
        ("warning", "another image with another label", [copy for copy, is_same in zip(copies, same) if not is_same]),
        ("note", "another image with its label", [copy for copy, is_same in zip(copies, same) if is_same]),
    ):
        if duplicates:
            line = f"{kind}: {_count(len(duplicates), 'image is', 'images are')} byte for byte {words}:"
            for copy in duplicates[:COPIES_SHOWN]:
                here, there = (f"{paths[image]} ({_named(labels[image], classes)})" for image in copy)
                line += f"\n    {here} and {there}"
            logger.warning(line)


def log_classes(train: Rows, valid: Rows, num_classes: int, noun: str = "image") -> None:
    """Print the classes and sizes of the data set, and warn if classes of the model have no images."""
    labels, counts = np.unique(np.concatenate([train.labels, valid.labels]), return_counts=True)
    listed = [f"{_named(label, train.classes)} ({count})" for label, count in zip(labels.tolist(), counts.tolist())]
    if len(listed) > CLASSES_SHOWN:
        listed = [*listed[: CLASSES_SHOWN - 2], "...", listed[-1]]
    held_out = f", {len(valid)} held out" if len(valid) else ""
    line = f"{_count(len(labels), 'class', 'classes')}, {_count(len(train), noun, f'{noun}s')} to train on{held_out}: "
    logger.info(line + ", ".join(listed))
    log_empty_classes(labels, train.classes, num_classes, noun)


def log_empty_classes(labels: np.ndarray, classes: Sequence[str], num_classes: int, noun: str = "image") -> None:
    """Warn if some of ``num_classes`` are not among ``labels``, the labels of the data set (each once)."""
    if len(labels) < num_classes:
        without = num_classes - len(labels)
        empty = [_named(label, classes) for label in range(min(num_classes, len(classes))) if label not in labels]
        named = f" ({_short(empty)})" if empty else ""
        logger.warning(
            f"warning: predictor.num_classes = {num_classes}, and {_count(without, 'class has', 'classes have')} no "
            f"{noun}s{named}: the model cannot learn them"
        )


def check_classes(facts: Mapping[str, Any], classes: Sequence[str], path: Path) -> None:
    """Raise CheckpointError if a label had another name in the checkpoint ``path`` than in ``classes``.

    ``facts``: its run.json. One without names is accepted, and so are classes added or removed at the end.
    """
    before = facts.get("classes") or ()
    renamed = [label for label, (was, name) in enumerate(zip(before, classes)) if was != name]
    if renamed:
        label = renamed[0]
        raise CheckpointError(
            f"--load = {path} has {before[label]!r} as label {label}, which is {classes[label]!r} now (classes there: "
            f"{_short(before)}; now: {_short(classes)}). Restore the names of the folders or labels, or leave out "
            "--load and start over with another --save."
        )


def _named(label: int, classes: Sequence[str]) -> str:
    name = classes[label]
    return name if name == str(label) else f"{label} {name}"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _short(names: Sequence[str]) -> str:
    return ", ".join(names[:CLASSES_SHOWN]) + (", ..." if len(names) > CLASSES_SHOWN else "")
