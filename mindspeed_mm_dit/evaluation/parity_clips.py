"""The quantities of text to video's data side, recomputed beside reference values of MindSpeed-MM's classes.

A check takes the arrays of a reference file and the parts that the published numbers were computed with, and yields
(name, ours, theirs) for every quantity of its group: ``vae/``, ``umt5/`` and ``prep/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.data.frames import covering_size_of_mindspeed_mm, fit_frames, resize_levels
from mindspeed_mm_dit.framework import ops

Given = Mapping[str, np.ndarray]

LEVEL = 1
"""``prep/<video>/resized`` may differ by one level of 255: Pillow and PyTorch round weights differently."""


class Compared(NamedTuple):
    """A quantity, as it is here and as it is there."""

    name: str
    ours: np.ndarray
    theirs: np.ndarray


def vae(given: Given, autoencoder: Any) -> Iterator[Compared]:
    """Compare an ``AutoencoderKLWan`` on ``vae/video``: posterior, normalised latents, and the mean decoded."""
    with ops.no_grad():
        mean, std = autoencoder.moments(ops.tensor(given["vae/video"]))
        latents = autoencoder.normalised(mean)
        yield Compared("vae/mean", ops.numpy(mean), given["vae/mean"])
        yield Compared("vae/logvar", ops.numpy(2 * ops.log(std)), given["vae/logvar"])
        yield Compared("vae/mm_latents", ops.numpy(latents), given["vae/mm_latents"])
        yield Compared("vae/decoded", ops.numpy(autoencoder.decode(latents)), given["vae/decoded"])


def umt5(given: Given, network: Any) -> Iterator[Compared]:
    """Compare a ``UMT5`` on ``umt5/ids`` and ``umt5/mask``, padded positions included."""
    states = ops.numpy(network(ops.tensor(given["umt5/ids"]), ops.tensor(given["umt5/mask"])))
    yield Compared("umt5/last_hidden_state", states, given["umt5/last_hidden_state"])
    yield Compared("umt5/mm_embeds", states[:, None], given["umt5/mm_embeds"])


def prep(given: Given) -> Iterator[Compared]:
    """Compare how frames become pixels: ``resized`` from ``frames`` in levels, and ``output`` from ``resized``.

    The latter is what the network gets, images in [-1, 1].
    """
    for video in sorted({name.split("/")[1] for name in given if name.startswith("prep/")}):
        frames, resized = (given[f"prep/{video}/{name}"].transpose(0, 2, 3, 1) for name in ("frames", "resized"))
        target = (int(given[f"prep/{video}/size"][0]), int(given[f"prep/{video}/size"][1]))
        own = resize_levels(frames, covering_size_of_mindspeed_mm((frames.shape[1], frames.shape[2]), target))
        yield Compared(f"prep/{video}/resized", own.transpose(0, 3, 1, 2), given[f"prep/{video}/resized"])
        images = fit_frames(resized, target, "mindspeed_mm") / np.float32(127.5) - 1
        yield Compared(f"prep/{video}/output", images, given[f"prep/{video}/output"])
