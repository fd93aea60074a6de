"""The encoder of UMT5 on PyTorch: transformers' module, frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.pretrained import check_complete, quiet

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class UMT5:
    """(ids, mask) -> states; holds its module outside of whatever is trained."""

    def __init__(self, config: TextEncoderConfig) -> None:
        self.config = config
        self.module = runtime.freeze(_load(config), config.dtype)

    @property
    def width(self) -> int:
        """Width D of a state."""
        return int(self.module.config.d_model)

    @property
    def vocabulary_size(self) -> int:
        """How many ids it can read."""
        return int(self.module.config.vocab_size)

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Ids and mask (B, L) int64 -> states (B, L, D) float32. What is padded is not attended to."""
        with torch.autocast(runtime.device_type(), enabled=False):  # ``dtype`` decides, also inside a bf16 step
            states = self.module(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # (B, L, D)
        return states * mask[:, :, None] if self.config.zero_padding else states


def _load(config: TextEncoderConfig) -> Any:
    what = f"text_encoder.from_pretrained = {config.from_pretrained}"
    if not Path(config.from_pretrained).is_dir():
        raise CheckpointError(what, "there is no such folder; nothing is downloaded", "name the folder of the encoder")
    try:
        from transformers import UMT5EncoderModel
        from transformers.utils import logging
    except ImportError as error:
        raise PlatformError(
            what, f"is read with transformers, which cannot be used here: {error}",
            "install the packages of requirements/video.txt",
        ) from None  # fmt: skip
    try:
        with quiet(logging):
            module, found = UMT5EncoderModel.from_pretrained(
                config.from_pretrained, local_files_only=True, dtype=_DTYPES[config.dtype], output_loading_info=True
            )
    except Exception as error:  # (whatever damaged files make of it)
        raise CheckpointError(what, f"transformers cannot load it: {error}", "copy the folder again") from error
    check_complete(what, found)
    return module
