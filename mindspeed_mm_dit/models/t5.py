"""T5 (Raffel et al. 2020) as a text encoder: its last hidden states; it has no pooled vector."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.text_encoder import T5Config
from mindspeed_mm_dit.data.captions import CaptionTokenizer
from mindspeed_mm_dit.models.text_encoder import TextEncoderKind, check_files, own_tokenizer


def _open_tokenizer(config: T5Config) -> CaptionTokenizer:
    cure = "name a text_encoder_2/ folder of FLUX, or another T5"
    return own_tokenizer(config, "t5", cure, "pad_token_id", "eos_token_id")


def _build(config: T5Config) -> Any:
    from mindspeed_mm_dit.models.transformers_pytorch import TransformersEncoder, last_states

    return TransformersEncoder(config, "T5EncoderModel", last_states, ("decoder.", "lm_head."))


T5 = TextEncoderKind(T5Config, _open_tokenizer, _build, check_files)
