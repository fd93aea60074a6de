"""The result of an evaluation, with every setting that affects it: report.json and report.html."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_mm_dit.checkpoint.store import without_folders
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.pages import write
from mindspeed_mm_dit.tools.evaluate.image_set import ImageSet

FEW_IMAGES = 10_000
"""With fewer images, a score can hardly be compared with published ones."""


def cautions(samples: ImageSet, reference: ImageSet | None = None) -> list[str]:
    """Return notes on why the scores of ``samples`` against ``reference`` are easily misread."""
    notes = []
    if samples.count < FEW_IMAGES:
        notes.append(
            f"{samples.count:,} images: Frechet distances of few images are too large, and comparable only with those "
            "of as many; published ones are of 50,000"
        )
    counts = np.unique(samples.labels, return_counts=True)[1] if samples.labels is not None else np.zeros(0)
    if len(set(counts.tolist())) > 1:
        notes.append(
            f"unequal labels: {counts.min():,} to {counts.max():,} images of a class; balanced sets have other "
            "distances, so compare only with sets whose labels were chosen by the same rule"
        )
    for images in (samples, reference):
        notes += _of_files(images) if images else []
    if reference is None:
        return notes
    if reference.count and abs(_part_grey(samples) - _part_grey(reference)) > 0.5:
        coloured, grey = sorted((samples, reference), key=_part_grey)
        notes.append(
            f"{grey.what} is grey, and {coloured.what} is in colour: a distance between them says little more than that"
        )
    if reference.statistics is None and reference.count < FEW_IMAGES:
        notes.append(f"the reference has {reference.count:,} images: distances to it are too large")
    if reference.statistics and "spatial" not in reference.statistics:
        notes.append(
            f"{reference.what} holds mu and sigma without mu_s: nothing in it tells which Inception made them. "
            "Those of JAX evaluations are of another network and image scaling: a distance to them means nothing here"
        )
    if reference.statistics and not reference.count:
        notes.append(f"{reference.what} holds no images: precision and recall are left out")
    return notes


def _part_grey(images: ImageSet) -> float:
    return images.grey / images.count


def _of_files(images: ImageSet) -> list[str]:
    notes = []
    if images.left_out:
        notes.append(
            f"{images.what}: {images.left_out:,} image(s) beside the folders of the classes, or in hidden ones, "
            "are left out"
        )
    if images.skipped:
        words = "image(s) that cannot be read are skipped, the first is"
        notes.append(f"{images.what}: {len(images.skipped):,} {words} {images.skipped[0]}")
    if images.resized:
        notes.append(
            f"{images.what}: {images.resized:,} image(s) were scaled or cut to {images.shape[0]} x "
            f"{images.shape[1]}: the way of scaling changes FID by more than models differ"
        )
    if images.jpegs:
        notes.append(f"{images.what}: {images.jpegs:,} image(s) are JPEGs, whose compression changes FID")
    return notes


REPORT, PAGE = "report.json", "report.html"

_NAMES_AND_MEANINGS = {
    "fid": ("FID", "Distance between Inception features of samples and real images. Lower is better."),
    "sfid": ("sFID", "The same, with features that keep where things are in the image. Lower is better."),
    "inception_score": ("Inception Score", "How clear and how varied the samples look to Inception. Higher is better."),
    "precision": ("precision", "Fraction of samples that look like real images. Higher is better."),
    "recall": ("recall", "Fraction of real images that the samples reach. Higher is better."),
    "accuracy": (
        "accuracy",
        "Fraction of samples that a classifier of real images puts in the requested class. Higher is better.",
    ),
    "frechet": (
        "Frechet distance",
        "Distance between a classifier's features of samples and real images. Lower is better.",
    ),
    "variety": (
        "variety within a class",
        "Spread of the samples within a class, as a fraction of the real images' spread. 100 % is as varied.",
    ),
    "copies": ("copies", "Samples that are nearly a training image. 0 is best."),
}
_NAMES = {score: name for score, (name, _) in _NAMES_AND_MEANINGS.items()}


@dataclass(frozen=True)
class Judgement:
    """A judge's scores of a set of images, and all of the judge's settings that affect them."""

    scores: Mapping[str, float | None]
    """By name; None if the reference does not allow the score."""
    yardstick: Mapping[str, float | None]
    """The same scores for as many real images (at most all); empty if unknown."""
    reference: Mapping[str, Any]
    """What the images were compared with."""
    features: Mapping[str, Any]
    """The feature space in which they were compared."""
    notes: Sequence[str]
    """Reasons why the scores may be misread."""
    destroyed: Mapping[str, float | None] = field(default_factory=dict)
    """The best scores that real images reach with their shapes destroyed; empty if unknown."""
    tells: str = ""
    """How reliable the scores are on these images; printed first."""

    def columns(self) -> dict[str, Mapping[str, float | None]]:
        """Return the scores and their baselines, by column heading."""
        columns = {"samples": self.scores, "real images": self.yardstick, "shapes destroyed": self.destroyed}
        return {head: column for head, column in columns.items() if column}


@dataclass(frozen=True)
class Candidates:
    """Images to be scored, which need not exist yet."""

    what: str
    """The flag that names them, with its value."""
    shape: tuple[int, int, int]
    """Height, width, channels of each."""
    count: int
    counted_by: str
    """The flag that sets their number, with its value."""
    num_labels: int
    """Each label is below this; 0 where there are none."""
    classes: tuple[str, ...] = ()
    """Name of each label, if known."""


def check_size(reference: ImageSet, images: Candidates) -> None:
    """Raise ConfigError for images of another size than those of the reference, if it holds any."""
    if reference.count and reference.shape[:2] != images.shape[:2]:
        sizes = [" x ".join(map(str, shape[:2])) for shape in (reference.shape, images.shape)]
        raise ConfigError(
            f"{reference.what} has images of {sizes[0]}, and {images.what} of {sizes[1]}. Name one of the same size."
        )


class Judge(Protocol):
    """Scores images against its reference."""

    def check(self, images: Candidates) -> None:
        """Raise ConfigError unless such images can be scored."""

    def judge(self, samples: ImageSet) -> Judgement:
        """Score ``samples``."""


@dataclass(frozen=True)
class Evaluation:
    """A judgement, and all settings that determined the images."""

    images: Mapping[str, Any]
    """Where the images come from: how they were sampled, or file and hash."""
    judgement: Judgement
    reference_sha256: str
    """SHA-256 of the reference: of its file, or of all files of its folder."""
    versions: Mapping[str, str]
    computed: Mapping[str, Any]
    """Settings that change the images only by rounding: ranks, batch size, device."""

    def lines(self) -> list[str]:
        """Return the lines for the terminal: the reliability, the scores, and the notes."""
        judgement = self.judgement
        wide = max(len(_NAMES[name]) for name in judgement.scores)
        (_, scores), *comparisons = judgement.columns().items()
        rows = [f"{_NAMES[name]:<{wide}}  {format_score(name, value)}" for name, value in scores.items()]
        for index, (head, column) in enumerate(comparisons):
            words = [f"{head}: {format_score(name, column.get(name))}" for name in scores]
            rows = [f"{row:<{wide + 12 + 23 * index}}  {text}" for row, text in zip(rows, words)]
        return [judgement.tells] * bool(judgement.tells) + rows + [f"note: {note}" for note in judgement.notes]

    def write(self, folder: Path, grid_png: bytes) -> None:
        """Write report.json and report.html, with a picture of samples, into ``folder``."""
        content = without_folders(_finite(asdict(self)))
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8")
        judgement, settings = self.judgement, dict(content)
        settings |= {name: settings["judgement"][name] for name in ("reference", "features")}
        del settings["judgement"]
        columns = judgement.columns()
        write(
            folder / PAGE,
            "evaluation.html",
            title="Evaluation",
            notes=judgement.notes,
            grid=grid_png,
            tells=judgement.tells,
            heads=("", *columns),
            rows=[
                (_NAMES[name], *(format_score(name, each.get(name)) for each in columns.values()))
                for name in judgement.scores
            ],
            meanings=[_NAMES_AND_MEANINGS[name] for name in judgement.scores],
            settings=[(name, text) for name, text in _flat(settings) if text not in ("None", "{}")],
        )


def format_score(name: str, value: float | None) -> str:
    """Format a score: fractions in percent, and a dash if there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    if name in ("accuracy", "variety"):
        return f"{value:.1%}"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)
