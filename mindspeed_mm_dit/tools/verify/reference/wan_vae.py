"""Files of reference values of Wan's video autoencoders: 2.2's, with patches and 48 channels, and 2.1's."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    Kind,
    ReferenceArrays,
    Tensor,
    Weights,
    evaluate,
    watched,
)
from mindspeed_mm_dit.tools.verify.reference.video import TextToVideo
from mindspeed_mm_dit.tools.verify.table import NotThere, Quantity


class WanVAE:
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        self.arrays = arrays
        folder = weights.get("--vae", weights.get("--checkpoint"))
        if folder is None:
            raise CheckpointError("--vae", "is missing: the values of the file are those of an autoencoder", FORMAT)
        if "torch" not in runtime.versions():
            raise PlatformError("--vae", "runs on PyTorch alone: mint.nn.functional.conv3d of MindSpore is for Ascend",
                                "add --ai-framework pytorch")  # fmt: skip
        self.autoencoder: Any = TextToVideo(arrays, {"--vae": folder}).autoencoder

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the posterior."""
        return evaluate(self.autoencoder.moments, self.arrays.tensor("video"))

    def normalised(self) -> Tensor:
        """Return the normalised mean."""
        return evaluate(self.autoencoder.scaled, self.moments[0])

    def decoded(self, source: str) -> Tensor:
        """Return what the mean, or the file's normalised latents, decode to."""
        scaled = self.normalised() if source == "mean" else self.arrays.tensor(source)
        return evaluate(self.autoencoder.decode, scaled)

    def mean_of_first_frame(self) -> Tensor:
        """Return the mean of the first frame alone."""
        return evaluate(self.autoencoder.moments, self.arrays.tensor("video")[:, :, :1])[0]

    def statistic(self, name: str) -> np.ndarray:
        """Return the mean or the standard deviation of each channel, from config.json."""
        scale = self.autoencoder.config.scale()
        return np.array(scale.shift if name == "mean" else scale.std)

    def patchified(self) -> np.ndarray:
        """Return the first frame with the pixels of each patch as channels: colour, then column, then row."""
        p, first = self.autoencoder.module.config.patch_size, self.arrays["video"][:, :, :1]
        B, C, _, H, W = first.shape
        cut = first.reshape(B, C, 1, H // p, p, W // p, p)  # (B, C, 1, h, row, w, column)
        return cut.transpose(0, 1, 6, 4, 2, 3, 5).reshape(B, -1, 1, H // p, W // p)

    @cached_property
    def first_chunk(self) -> dict[str, Tensor]:
        """Output of each module when it first ran, while the video was encoded and its mean decoded."""

        def run() -> None:
            mean = evaluate(self.autoencoder.moments, self.arrays.tensor("video"))[0]
            evaluate(self.autoencoder.decode, self.autoencoder.scaled(mean))

        return watched(self.autoencoder.module, run)

    def tap(self, module: str) -> Tensor:
        """Return the output of a module for the first frame."""
        if module not in self.first_chunk:
            raise NotThere("")
        return self.first_chunk[module]


WAN_VAE = Kind(
    signature="latents_normalised|mean_normalised|decoded_from_.+",
    inputs="video|latents_normalised",
    program=WanVAE,
    has_network=False,
    rows=(
        Quantity("mean|mode", lambda file: file.moments[0]),
        Quantity("logvar", lambda file: 2 * ops.log(file.moments[1])),
        Quantity("mean_normalised", WanVAE.normalised),
        Quantity("decoded_from_(mean|latents_normalised)", WanVAE.decoded),
        Quantity("mean_of_first_frame_alone", WanVAE.mean_of_first_frame),
        Quantity("latents_(mean|std)", WanVAE.statistic),
        Quantity("patchified", WanVAE.patchified),
        Quantity("tap_first_chunk/(.+)", WanVAE.tap),
    ),
)
