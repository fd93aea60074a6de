"""FID, sFID, Inception Score, precision and recall, by the Inception network of published FIDs (from TensorFlow 1)."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange

from mindspeed_mm_dit.configs.files import UnusableFile, check_file, replace_file
from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.torch_file import check_torch_load
from mindspeed_mm_dit.terminal import progress
from mindspeed_mm_dit.tools.evaluate.evaluation import Candidates, Judgement, cautions, check_size
from mindspeed_mm_dit.tools.evaluate.image_set import (
    IMAGES,
    INCEPTION,
    INCEPTION_SHA256,
    POOL,
    SCALED_AND_JPEGS,
    SPATIAL,
    STATISTICS,
    ImageSet,
    sha256_of,
)
from mindspeed_mm_dit.tools.evaluate.metrics import (
    NEIGHBOURS,
    SPLIT_IMAGES,
    Gaussian,
    fit_gaussian,
    frechet_distance,
    inception_score,
    precision_recall,
)

_SPATIAL_CHANNELS = 7
_PACKAGE = "torch_fidelity"


@dataclass(frozen=True)
class Features:
    """The Inception's features of a set of images."""

    pool: np.ndarray
    """(N, 2048) float32."""
    spatial: np.ndarray
    """(N, 2023) float32: height, width, channel."""
    logits: np.ndarray
    """(N, 1008) float32, without the bias, as ADM's evaluator has them."""


class Inception:
    """The network with weights from a file, on the device of this process, in float32."""

    def __init__(self, path: str | Path) -> None:
        """Read the weights.

        Raises:
            PlatformError: torch-fidelity is not installed.
            CheckpointError: the file does not hold weights of this network; code in it is not run.
        """
        what = f"--inception = {path}"
        build = _network_class()
        weights = _read_weights(what, path)
        self.sha256 = sha256_of(path)
        self._network = runtime.prepare_frozen(_built(build, weights, what))
        self._network.Mixed_6d.branch1x1.register_forward_hook(self._keep)
        self._spatial: Any = None

    def features(
        self, images: ImageSet, batch_size: int, on_images: Callable[[int], object] = lambda count: None
    ) -> Features:
        """Return the features of all ``images``; ``on_images`` is called with the number of images in each batch.

        Raises CheckpointError if they are not finite: the weights are damaged.
        """
        runtime.allow_tf32(False)  # not before: samples are generated as by mm-dit sample
        pool, spatial = (np.empty((images.count, width), np.float32) for width in (POOL, SPATIAL))
        done = 0
        for batch in images.batches(batch_size):
            rows = slice(done, done + len(batch))
            pool[rows], spatial[rows] = self.of_batch(batch)
            done += len(batch)
            on_images(len(batch))
        if not (np.isfinite(pool).all() and np.isfinite(spatial).all()):
            raise CheckpointError(
                f"--inception makes features of {images.what} that are not finite. Fetch its weights again."
            )
        return Features(pool, spatial, pool @ ops.numpy(self._network.fc.weight).T)

    def of_batch(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pool (B, 2048) and spatial (B, 2023) features, float32, of images (B, H, W, 3 or 1) uint8."""
        colours = np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images
        with ops.no_grad():
            (pool,) = self._network(ops.tensor(np.ascontiguousarray(rearrange(colours, "b h w c -> b c h w"))))
            spatial = ops.numpy(self._spatial[:, :_SPATIAL_CHANNELS])  # (B, 7, 17, 17)
        return ops.numpy(pool), rearrange(spatial, "b c h w -> b (h w c)")

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        self._spatial = output


def _network_class() -> type:
    """Return torch-fidelity's Inception without importing its package, which would needlessly require torchvision."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise PlatformError(
            f"--inception needs the package {_PACKAGE}, which is not installed. Run: pip install --no-deps "
            "torch-fidelity"
        )
    if _PACKAGE in sys.modules:
        return importlib.import_module(f"{_PACKAGE}.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)  # registered, and not executed
    try:
        return importlib.import_module(f"{_PACKAGE}.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]


def _read_weights(what: str, path: str | Path) -> dict[str, torch.Tensor]:
    """Read a state dict in either of PyTorch's formats: weights this old may be from before PyTorch 1.6."""
    check_path("--inception", str(path))
    try:
        check_file(path)
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_torch_load(file)
            weights = torch.load(file, map_location="cpu", weights_only=True)  # tensors and plain values, no code
    except UnusableFile as problem:
        raise CheckpointError(f"{what} {problem}. {INCEPTION}") from None
    except Exception as error:  # (a damaged file raises anything)
        raise CheckpointError(
            f"{what} holds no weights that can be read without running code: {_first_line(error)}. {INCEPTION}"
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{what} is not the Inception, as it is no dict of tensors. {INCEPTION}")
    return weights


def _first_line(error: Exception) -> str:
    """Return what PyTorch says, without its advice to load the file with ``weights_only=False``."""
    message = str(error)
    if isinstance(error, LookupError):
        return "it is no file of PyTorch"
    if "weights_only" in message:
        return "it is damaged, no file of PyTorch, or holds more than numbers"
    return (message or type(error).__name__).splitlines()[0][:200].rstrip(".")


def _built(build: type, weights: dict[str, torch.Tensor], what: str) -> Any:
    """Return the network with ``weights``. Its constructor unpickles a file, so it gets one with only these."""
    head = weights.get("fc.weight")
    if head is not None and tuple(head.shape) == (1000, POOL):
        raise CheckpointError(f"{what} is torchvision's Inception, and published scores use another. {INCEPTION}")
    held = io.BytesIO()
    torch.save(weights, held)
    held.seek(0)
    try:
        return build(_PACKAGE, ["2048"], feature_extractor_weights_path=held)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(
            f"{what} is no Inception of TensorFlow: {lines[0][:200].rstrip('.')}. {INCEPTION}"
        ) from None


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
        check_size(reference, images)
        if reference.inception_sha256 and reference.inception_sha256 != ours:
            raise ConfigError(
                f"{reference.what} has statistics by an Inception of other weights (sha256 "
                f"{reference.inception_sha256[:12]}, here {ours[:12]}). Make them again with mm-dit evaluate "
                "--statistics, or name the weights they were made with."
            )
        check_enough(images.counted_by, images.count)
        if reference.statistics is None:
            check_enough(reference.what, reference.count)

    def judge(self, samples: ImageSet) -> Judgement:
        reference = self._reference
        reference_features = self._features(reference) if reference.count else None
        scores = _scores(self._features(samples), reference, reference_features)
        what = {"what": reference.what, "images": reference.count, "statistics": sorted(reference.statistics or ())}
        features = {
            **{"network": "torch-fidelity's TF1-compatible Inception", "weights_sha256": self._network.sha256},
            **{"torch-fidelity": version("torch-fidelity"), "neighbours": NEIGHBOURS, "split": SPLIT_IMAGES},
        }
        return Judgement(asdict(scores), {}, what, features, cautions(samples, reference))

    def _features(self, images: ImageSet) -> Features:
        with progress("features", total=images.count, unit="image") as bar:
            return self._network.features(images, self._batch_size, bar.update)


def check_enough(what: str, count: int) -> None:
    """Raise ConfigError for a set too small for its images to have neighbours."""
    if count <= NEIGHBOURS:
        raise ConfigError(f"{what} gives {count} image(s), and recall needs more than {NEIGHBOURS}. Use more.")


def _scores(samples: Features, reference: ImageSet, real: Features | None) -> Scores:
    """Score ``samples``; ``real``: features of the reference's images, if it holds any."""
    statistics = reference.statistics or _statistics(real)
    overlap = precision_recall(samples.pool, real.pool) if real is not None and len(real.pool) > NEIGHBOURS else None
    return Scores(
        fid=frechet_distance(fit_gaussian(samples.pool), statistics["pool"]),
        sfid=frechet_distance(fit_gaussian(samples.spatial), statistics["spatial"])
        if "spatial" in statistics
        else None,
        inception_score=inception_score(samples.logits),
        precision=overlap.precision if overlap else None,
        recall=overlap.recall if overlap else None,
    )


def write_statistics(path: Path, images: ImageSet, features: Features, network: Inception) -> None:
    """Write the reference npz of ``images``: their statistics, and REFERENCE_IMAGES of them, evenly chosen."""
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
    return {"pool": fit_gaussian(features.pool), "spatial": fit_gaussian(features.spatial)}
