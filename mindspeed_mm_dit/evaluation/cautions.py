"""What makes scores say something else than they seem to, said where it is met."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.evaluation.pictures import Pictures

FEW_IMAGES = 10_000
"""Of fewer than these a score says little beside a published one."""


def cautions(samples: Pictures, reference: Pictures | None = None) -> list[str]:
    """Return what makes scores of ``samples`` against ``reference`` say something else than they seem to."""
    found = []
    if samples.count < FEW_IMAGES:
        found.append(
            f"{samples.count:,} images: Frechet distances of few images are too large, and comparable only with those "
            "of as many; published ones are of 50,000"
        )
    counts = np.unique(samples.labels, return_counts=True)[1] if samples.labels is not None else np.zeros(0)
    if len(set(counts.tolist())) > 1:
        found.append(
            f"unequal labels: {counts.min():,} to {counts.max():,} images of a class; sets with as many of each have "
            "other distances, so compare only with those drawn by the same rule"
        )
    for pictures in (samples, reference):
        found += _of_files(pictures) if pictures else []
    if reference is None:
        return found
    if reference.count and abs(_part_grey(samples) - _part_grey(reference)) > 0.5:
        coloured, grey = sorted((samples, reference), key=_part_grey)
        found.append(
            f"{grey.what} is grey, and {coloured.what} is in colour: a distance between them says little more than that"
        )
    if reference.statistics is None and reference.count < FEW_IMAGES:
        found.append(f"the reference has {reference.count:,} images: distances to it are too large")
    if reference.statistics and "spatial" not in reference.statistics:
        found.append(
            f"{reference.what} holds mu and sigma without mu_s: nothing in it says whose Inception made them. Those of "
            "JAX evaluations are of another network and image scaling: a distance to them means nothing here"
        )
    if reference.statistics and not reference.count:
        found.append(f"{reference.what} holds no images: precision and recall are left out")
    return found


def _part_grey(pictures: Pictures) -> float:
    return pictures.grey / pictures.count


def _of_files(pictures: Pictures) -> list[str]:
    found = []
    if pictures.left_out:
        found.append(
            f"{pictures.what}: {pictures.left_out:,} picture(s) beside the folders of the classes, or in hidden ones, "
            "are left out"
        )
    if pictures.resized:
        found.append(
            f"{pictures.what}: {pictures.resized:,} picture(s) were scaled or cut to {pictures.shape[0]} x "
            f"{pictures.shape[1]}: how they are scaled moves FID by more than models differ"
        )
    if pictures.jpegs:
        found.append(f"{pictures.what}: {pictures.jpegs:,} picture(s) are JPEGs, whose compression moves FID")
    return found
