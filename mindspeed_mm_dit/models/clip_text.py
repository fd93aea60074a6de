"""CLIP's text model: states of its last or last but one layer, and the end token's state as the pooled vector.

As in diffusers' pipelines the padding is attended to. Attention is causal, so this changes the padding's states alone.
"""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.configs.text_encoder import CLIPTextConfig
from mindspeed_mm_dit.data.captions import CaptionTokenizer
from mindspeed_mm_dit.models.text_encoder import TextEncoderKind, check_files, own_tokenizer


def _open_tokenizer(config: CLIPTextConfig) -> CaptionTokenizer:
    cure = "name a text_encoder/ folder of Stable Diffusion 3 or FLUX, or another CLIPTextModel"
    return own_tokenizer(config, "clip_text_model", cure, positions="max_position_embeddings")


def _build(config: CLIPTextConfig) -> Any:
    from mindspeed_mm_dit.models.transformers_pytorch import TransformersEncoder

    projects, wants_last = config.has_projection, config.states == "last"

    def ask(module: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
        found = module(input_ids=ids, output_hidden_states=not wants_last)
        states = found.last_hidden_state if wants_last else found.hidden_states[-2]  # (B, L, D)
        return states, found.text_embeds if projects else found.pooler_output  # (B, P)

    name = "CLIPTextModelWithProjection" if projects else "CLIPTextModel"
    return TransformersEncoder(config, name, ask, ("text_model.embeddings.position_ids",))


CLIP_TEXT = TextEncoderKind(CLIPTextConfig, _open_tokenizer, _build, check_files)
