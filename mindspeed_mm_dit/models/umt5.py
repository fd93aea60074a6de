"""UMT5 (Chung et al. 2023), the text encoder of Wan: its last hidden states; it has no pooled vector."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.data.captions import CaptionTokenizer
from mindspeed_mm_dit.models.text_encoder import TextEncoderKind, check_files, own_tokenizer


def _open_tokenizer(config: UMT5Config) -> CaptionTokenizer:
    cure = "name the text_encoder/ folder of Wan, or another UMT5"
    return own_tokenizer(config, "umt5", cure, "pad_token_id", "eos_token_id")


def _build(config: UMT5Config) -> Any:
    from mindspeed_mm_dit.models.transformers_pytorch import TransformersEncoder, last_states

    return TransformersEncoder(config, "UMT5EncoderModel", last_states)


UMT5 = TextEncoderKind(UMT5Config, _open_tokenizer, _build, check_files)
