"""The groups of text to video's data side: ``vae/``, ``umt5/`` and ``prep/`` of a file of reference values."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.data.frames import covering_size_of_mindspeed_mm, fit_frames, resize_levels
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.verify.reference.video import Group, VideoReference, check_shape, check_whole

VIDEO = (None, 3, None, None, None)
"""(B, 3, F, H, W)."""


def states_of(reference: VideoReference, ids: str, mask: str) -> Any:
    """Return the states (B, L, D) of the tokens ``ids`` and ``mask`` of a file, (B, L) or (B, 1, L) each.

    Raises CheckpointError for tokens that the text encoder does not have.
    """
    given, encoder = reference.given, reference.text_encoder
    check_shape(given, mask, given[ids].shape)
    check_whole(given, ids, encoder.vocabulary_size - 1)
    check_whole(given, mask, 1)
    length = given[ids].shape[-1]
    return encoder(*(ops.tensor(given[name].astype(np.int64).reshape(-1, length)) for name in (ids, mask))).states


class AutoencoderGroup(Group):
    """``vae/``: posterior, normalised latents, and the mean decoded."""

    part = "--vae"
    inputs = re.compile("video|latents_mean|latents_std")

    def value(self, name: str) -> np.ndarray | None:
        """Return our value of ``name``."""
        autoencoder, (mean, std) = self._reference.autoencoder, self._moments
        latents = autoencoder.scaled(mean)
        known = {
            "mean": lambda: mean,
            "logvar": lambda: 2 * ops.log(std),
            "mm_latents": lambda: latents,
            "decoded": lambda: autoencoder.decode(latents),
        }
        with ops.no_grad():
            return ops.numpy(known[name]()) if name in known else None

    @cached_property
    def _moments(self) -> tuple[object, object]:
        check_shape(self._given, "vae/video", VIDEO)
        with ops.no_grad():
            return self._reference.autoencoder.moments(self._reference.input("vae/video"))


class TextGroup(Group):
    """``umt5/``: the states of a text encoder, padded positions included."""

    part = "--text-encoder"
    inputs = re.compile("ids|mask|mm_mask")

    def value(self, name: str) -> np.ndarray | None:
        """Return our value of ``name``."""
        if name not in ("last_hidden_state", "mm_embeds"):
            return None
        check_shape(self._given, "umt5/ids", (None, None))
        states = ops.numpy(states_of(self._reference, "umt5/ids", "umt5/mask"))
        return states if name == "last_hidden_state" else states[:, None]


class FramesGroup(Group):
    """``prep/VIDEO/``: ``resized`` from ``frames``, and ``output``, which the network gets, from ``resized``."""

    part = None
    inputs = re.compile("[^/]+/(frames|size)")

    def value(self, name: str) -> np.ndarray | None:
        """Return our value of ``name``."""
        video, _, kind = name.partition("/")
        if kind not in ("resized", "output"):
            return None
        target = (int(self._given[f"prep/{video}/size"][0]), int(self._given[f"prep/{video}/size"][1]))
        source = self._given[f"prep/{video}/{'frames' if kind == 'resized' else 'resized'}"].transpose(0, 2, 3, 1)
        if kind == "output":
            return np.asarray(fit_frames(source, target, "mindspeed_mm") / np.float32(127.5) - 1)
        size = covering_size_of_mindspeed_mm((source.shape[1], source.shape[2]), target)
        return resize_levels(source, size).transpose(0, 3, 1, 2)

    def tolerance(self, name: str, tolerance: float) -> float:
        """Of ``resized`` one level of 255: Pillow and PyTorch round weights differently."""
        if not name.endswith("/resized"):
            return tolerance
        levels = self._given[f"prep/{name}"].astype(np.float64)
        return float(np.sqrt(levels.size) / np.linalg.norm(levels))
