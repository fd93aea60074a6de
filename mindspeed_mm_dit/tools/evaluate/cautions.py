"""Cautions about scores that are easily misread."""

from __future__ import annotations

import numpy as np

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
