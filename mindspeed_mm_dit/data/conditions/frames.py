"""The frames that a clip begins and ends with: its own while a network trains, images that a user names in samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame, ImageTokens
from mindspeed_mm_dit.data.conditions.contract import Arrays, ConditionKind, Fed
from mindspeed_mm_dit.errors import ConfigError

IMAGES = ("first_image", "last_image")
"""Names of the arrays of images, (B, 3 or 1, H, W) uint8, in a batch of samples that are asked for."""


class OwnFrames:
    """Feeds nothing: the frames are taken from the clips of the batch, where they are encoded."""

    def __init__(self, condition: FirstFrame, fed: Fed) -> None:
        if fed.cache is not None and condition.mask_channels > 1:
            raise ConfigError(
                "dataset_param.features", "keeps no latents of clips that are grey but for their given frames",
                "train from the clips themselves",
            )  # fmt: skip

    def arrays(self, rows: np.ndarray, sample_indices: np.ndarray) -> Arrays:
        """Return no arrays."""
        return {}

    def words(self, rows: np.ndarray, sample_indices: np.ndarray) -> list[tuple[str, bool]]:
        """Return what is given of each clip."""
        return [("its first frame", False)] * len(rows)


def _asked(condition: FirstFrame, values: Sequence[Any], tokenizers: Sequence[Any]) -> Arrays:
    """Return images by name, or for samples that begin with none the network's input, zeros."""
    if values[0] is None:
        return {"frames": np.repeat(condition.hollow()["frames"], len(values), 0)}
    return {name: np.stack(images) for name, images in zip(IMAGES, zip(*values))}


FRAMES = ConditionKind(
    OwnFrames,
    _asked,
    null=lambda condition, instead, tokenizers: {},
    encode=lambda condition, batch, model: (model.frames(condition, batch),),
)


def _refuse(condition: ImageTokens, *given: Any) -> Any:
    raise ConfigError(
        f"predictor.image_dim = {condition.width}", "needs CLIP's features of the first frame, which are not made here",
        "train a network without them, as Wan 2.2's are",
    )  # fmt: skip


IMAGE_TOKENS = ConditionKind(_refuse, _refuse, _refuse, _refuse)
