"""Groups ``vae/``, ``umt5/`` and ``prep/`` of a file of text to video: what makes latents, states and frames."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mindspeed_mm_dit.data.frames import covering_size_of_mindspeed_mm, fit_frames, resize_levels
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.verify.reference.file import Tensor, answer, check_range, check_shape
from mindspeed_mm_dit.verify.reference.video_program import TextToVideo, rows_of_group
from mindspeed_mm_dit.verify.table import Bound, Quantity

VIDEO = (None, 3, None, None, None)
"""(B, 3, F, H, W)."""
ONE_LEVEL = Bound(
    "Pillow and PyTorch round weights differently: one level of 255.",
    least=lambda levels: float(np.sqrt(levels.size) / np.linalg.norm(levels.astype(np.float64))),
)


def states_of(file: TextToVideo, ids: str, mask: str) -> Tensor:
    """Return the states (B, L, D) of the tokens ``ids`` and ``mask`` of a file, (B, L) or (B, 1, L) each.

    Raises CheckpointError for tokens that the text encoder does not have.
    """
    given, encoder = file.given, file.text_encoder
    check_shape(given, mask, given[ids].shape)
    check_range(given, ids, encoder.vocabulary_size - 1)
    check_range(given, mask, 1)
    length = given[ids].shape[-1]
    return encoder(*(ops.tensor(given[name].astype(np.int64).reshape(-1, length)) for name in (ids, mask))).states


class Autoencoder:
    """Posterior, normalised latents, and the mean decoded."""

    def __init__(self, file: TextToVideo) -> None:
        check_shape(file.given, "vae/video", VIDEO)
        self.autoencoder, self.video = file.autoencoder, file.given.tensor("vae/video")

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the posterior."""
        return answer(self.autoencoder.moments, self.video)

    def latents(self) -> Tensor:
        """Return the mean, normalised."""
        return answer(self.autoencoder.scaled, self.moments[0])

    def decoded(self) -> Tensor:
        """Return images of the mean."""
        return answer(self.autoencoder.decode, self.latents())


class Text:
    """The states of the text encoder, padded positions included."""

    def __init__(self, file: TextToVideo) -> None:
        check_shape(file.given, "umt5/ids", (None, None))
        self.states = ops.numpy(states_of(file, "umt5/ids", "umt5/mask"))


class Frames:
    """``resized`` from ``frames``, and ``output``, which the network gets, from ``resized``."""

    def __init__(self, file: TextToVideo) -> None:
        self.given = file.given

    def _of(self, video: str, kind: str) -> tuple[np.ndarray, tuple[int, int]]:
        height, width = self.given[f"prep/{video}/size"].tolist()
        return self.given[f"prep/{video}/{kind}"].transpose(0, 2, 3, 1), (height, width)

    def resized(self, video: str) -> np.ndarray:
        """Return frames that cover the wanted size, (T, C, h, w) uint8."""
        frames, target = self._of(video, "frames")
        size = covering_size_of_mindspeed_mm((frames.shape[1], frames.shape[2]), target)
        return resize_levels(frames, size).transpose(0, 3, 1, 2)

    def output(self, video: str) -> np.ndarray:
        """Return images (C, T, H, W) in [-1, 1]."""
        return fit_frames(*self._of(video, "resized"), "mindspeed_mm") / np.float32(127.5) - 1


ROWS = (
    *rows_of_group(
        "vae", Autoencoder, "--vae",
        Quantity("mean", lambda group: group.moments[0]),
        Quantity("logvar", lambda group: 2 * ops.log(group.moments[1])),
        Quantity("mm_latents", Autoencoder.latents),
        Quantity("decoded", Autoencoder.decoded),
    ),
    *rows_of_group(
        "umt5", Text, "--text-encoder",
        Quantity("last_hidden_state", lambda group: group.states),
        Quantity("mm_embeds", lambda group: group.states[:, None]),
    ),
    *rows_of_group(
        "prep", Frames, None,
        Quantity("([^/]+)/resized", Frames.resized, ONE_LEVEL),
        Quantity("([^/]+)/output", Frames.output),
    ),
)  # fmt: skip
