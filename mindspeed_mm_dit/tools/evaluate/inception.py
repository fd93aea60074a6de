"""The Inception network of published FIDs (from TensorFlow 1), as ported to PyTorch by torch-fidelity."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange

from mindspeed_mm_dit.configs.files import UnusableFile, check_file
from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.torch_file import check_torch_load
from mindspeed_mm_dit.tools.evaluate.image_set import INCEPTION, POOL, SPATIAL, ImageSet, sha256_of

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
        self._network = runtime.freeze(_built(build, weights, what))
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
            raise CheckpointError("--inception", f"makes features of {images.what} that are not finite")
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
            "--inception", f"needs the package {_PACKAGE}, which is not installed",
            "pip install --no-deps torch-fidelity (what it depends on is here, or not used)",
        )  # fmt: skip
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
        raise CheckpointError(what, str(problem), INCEPTION) from None
    except Exception as error:  # (a damaged file raises anything)
        raise CheckpointError(
            what, f"holds no weights that can be read without running code: {_reason(error)}", INCEPTION
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(what, "is no dict of tensors, and so no Inception", INCEPTION)
    return weights


def _reason(error: Exception) -> str:
    """Return PyTorch's reason, without its advice to load the file with ``weights_only=False``."""
    message = str(error)
    if isinstance(error, LookupError):
        return "it is no file of PyTorch"
    if "weights_only" in message:
        return "it is damaged, no file of PyTorch, or holds more than numbers"
    return (message or type(error).__name__).splitlines()[0][:200]


def _built(build: type, weights: dict[str, torch.Tensor], what: str) -> Any:
    """Return the network with ``weights``. Its constructor unpickles a file, so it gets one with only these."""
    head = weights.get("fc.weight")
    if head is not None and tuple(head.shape) == (1000, POOL):
        raise CheckpointError(
            what, "is torchvision's Inception, of 1,000 classes: published scores use the features of another network",
            INCEPTION,
        )  # fmt: skip
    held = io.BytesIO()
    torch.save(weights, held)
    held.seek(0)
    try:
        return build(_PACKAGE, ["2048"], feature_extractor_weights_path=held)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(what, f"is no Inception of TensorFlow: {lines[0][:200]}", INCEPTION) from None
