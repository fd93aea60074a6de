"""FID, sFID, Inception Score, precision and recall of one set of images against a reference."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.files import replace_file
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import progress
from mindspeed_mm_dit.tools.evaluate.evaluation import Candidates, Judgement, cautions
from mindspeed_mm_dit.tools.evaluate.image_set import IMAGES, INCEPTION_SHA256, SCALED_AND_JPEGS, STATISTICS, ImageSet
from mindspeed_mm_dit.tools.evaluate.inception import Features, Inception
from mindspeed_mm_dit.tools.evaluate.metrics import (
    NEIGHBOURS,
    SPLIT_IMAGES,
    Gaussian,
    frechet_distance,
    gaussian_of,
    inception_score,
    precision_recall,
)

REFERENCE_IMAGES = 10_000
"""Number of reference images stored with the statistics, for precision and recall, as in ADM's references."""


@dataclass(frozen=True)
class Scores:
    """ADM's five scores; None if the reference does not allow one."""

    fid: float
    sfid: float | None
    inception_score: float
    precision: float | None
    recall: float | None


class InceptionJudge:
    """Gives ADM's five scores, from the Inception's features."""

    def __init__(self, reference: ImageSet, network: Inception, batch_size: int) -> None:
        self._reference, self._network, self._batch_size = reference, network, batch_size

    def check(self, images: Candidates) -> None:
        reference, ours = self._reference, self._network.sha256
        if reference.count and reference.shape[:2] != images.shape[:2]:
            raise ConfigError(
                reference.what,
                f"has images of {reference.shape[0]} x {reference.shape[1]}, and {images.what} of {images.shape[0]} x "
                f"{images.shape[1]}",
                "score against a reference of the same size",
            )
        if reference.inception_sha256 and reference.inception_sha256 != ours:
            raise ConfigError(
                reference.what,
                "has statistics by an Inception of other weights "
                f"(sha256 {reference.inception_sha256[:12]}, here {ours[:12]})",
                "make them again with mm-dit evaluate --statistics, or name the weights they were made with",
            )
        check_enough(images.counted_by, images.count)
        if reference.statistics is None:
            check_enough(reference.what, reference.count)

    def judge(self, samples: ImageSet) -> Judgement:
        reference = self._reference
        reference_features = self._features(reference) if reference.count else None
        scores = _scores(self._features(samples), reference, reference_features)
        return Judgement(
            scores=asdict(scores), yardstick={}, notes=cautions(samples, reference),
            reference={"what": reference.what, "images": reference.count,
                       "statistics": sorted(reference.statistics or ())},
            features={"network": "torch-fidelity's TF1-compatible Inception", "weights_sha256": self._network.sha256,
                      "torch-fidelity": version("torch-fidelity"), "neighbours": NEIGHBOURS, "split": SPLIT_IMAGES},
        )  # fmt: skip

    def _features(self, images: ImageSet) -> Features:
        with progress("features", total=images.count, unit="image") as bar:
            return self._network.features(images, self._batch_size, bar.update)


def check_enough(what: str, count: int) -> None:
    """Raise ConfigError for a set too small for its images to have neighbours."""
    if count <= NEIGHBOURS:
        raise ConfigError(what, f"{count} image(s): precision and recall need more than {NEIGHBOURS}", "use more")


def _scores(samples: Features, reference: ImageSet, real: Features | None) -> Scores:
    """Score ``samples``; ``real``: features of the reference's images, if it holds any."""
    statistics = reference.statistics or _statistics(real)
    overlap = precision_recall(samples.pool, real.pool) if real is not None and len(real.pool) > NEIGHBOURS else None
    return Scores(
        fid=frechet_distance(gaussian_of(samples.pool), statistics["pool"]),
        sfid=frechet_distance(gaussian_of(samples.spatial), statistics["spatial"]) if "spatial" in statistics else None,
        inception_score=inception_score(samples.logits),
        precision=overlap.precision if overlap else None,
        recall=overlap.recall if overlap else None,
    )


def write_statistics(path: Path, images: ImageSet, features: Features, network: Inception) -> None:
    """Write the reference npz of ``images``: their statistics, and KEPT_IMAGES of them, evenly chosen."""
    chosen = np.unique(np.linspace(0, images.count - 1, REFERENCE_IMAGES).round().astype(int))
    chosen_images, start = [], 0
    for batch in images.batches(64):
        chosen_images.append(batch[chosen[(chosen >= start) & (chosen < start + len(batch))] - start])
        start += len(batch)
    arrays = {IMAGES: np.concatenate(chosen_images), INCEPTION_SHA256: np.array(network.sha256)}
    arrays[SCALED_AND_JPEGS] = np.array([images.resized, images.jpegs])
    for kind, gaussian in _statistics(features).items():
        arrays |= dict(zip(STATISTICS[kind], (gaussian.mean, gaussian.covariance)))

    def write(aside: Path) -> None:
        with open(aside, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    replace_file(path, write)


def _statistics(features: Features | None) -> dict[str, Gaussian]:
    assert features is not None
    return {"pool": gaussian_of(features.pool), "spatial": gaussian_of(features.spatial)}
