"""Teachers: frozen networks whose image features a predictor also learns (REPA). Never part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.teacher import (
    Dinov2Config,
    SiglipConfig,
    TeacherConfig,
    TransformersTeacherConfig,
    TransformersVisionConfig,
)
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.pretrained import check_weights, read_tensors

Tensor = Any


@dataclass(frozen=True)
class TeacherKind:
    """A kind of teacher, selected by ``model_id`` in section ``teacher`` of model.json."""

    config: type[TeacherConfig]
    """Frozen dataclass of the section."""
    build: Callable[[Any, int], Callable[[Tensor], Tensor]]
    """(config, tokens in a row) -> the network, (images (B, 3, H, W) in [-1, 1]) -> features (B, N, width) float32;
    imports the framework only when called."""
    check_files: Callable[[Any], None] = lambda config: None
    """(config): raise a UserError if weights are missing or cut short; called before any device work."""


def _build(config: TransformersTeacherConfig, side: int) -> Any:
    from mindspeed_mm_dit.models.transformers_pytorch import TransformersTeacher

    return TransformersTeacher(config, side)


def check_vision_files(config: TransformersVisionConfig) -> None:
    """Raise a UserError unless the weights of a vision transformer are complete, finite, and fit its config.json."""
    config.width()
    check_weights(config.setting, config.folder)
    what, patch = f"{config.setting} = {config.folder}", config.number("patch_size")
    for name, array in read_tensors(config.setting, config.folder):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CheckpointError(what, f"its weight {name} has numbers that are not finite", "copy the folder again")
        if array.ndim == 4 and array.shape[-2:] != (patch, patch):  # (the patch embedding is its only convolution)
            reason = f"config.json has patch_size = {patch}, and the weight {name} is {array.shape}"
            raise CheckpointError(what, reason, "copy the folder again")


DINOV2 = TeacherKind(Dinov2Config, _build, check_vision_files)
SIGLIP = TeacherKind(SiglipConfig, _build, check_vision_files)
