"""BERT as a text encoder: its last states, and their mean or the first, pooled as sentence-transformers' files say."""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.text_encoder import BertConfig
from mindspeed_mm_dit.data.captions import CaptionTokenizer
from mindspeed_mm_dit.models.text_encoder import TextEncoderKind, check_files, own_tokenizer

_HEADS = ("pooler.", "cls.", "embeddings.position_ids")
"""Weights of its pre-training, which states do not need, and a table that newer files leave out."""


def _open_tokenizer(config: BertConfig) -> CaptionTokenizer:
    cure = "name the folder of a BERT, such as sentence-transformers' MiniLM"
    return own_tokenizer(config, "bert", cure, "pad_token_id", positions="max_position_embeddings")


def _build(config: BertConfig) -> Any:
    from mindspeed_mm_dit.framework import ops
    from mindspeed_mm_dit.models.transformers_pytorch import TransformersEncoder

    way, to_length_one = config.pooling()

    def ask(module: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
        states = module(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, L, D)
        full, weights = ops.to_float32(states), ops.to_float32(mask)[:, :, None]
        pooled = full[:, 0] if way == "cls" else (full * weights).sum(1) / weights.sum(1)  # (B, D)
        length = (pooled * pooled).sum(1)[:, None] ** 0.5
        return states, pooled / length if to_length_one else pooled

    return TransformersEncoder(config, "BertModel", ask, _HEADS, add_pooling_layer=False)


BERT = TextEncoderKind(BertConfig, _open_tokenizer, _build, check_files)
