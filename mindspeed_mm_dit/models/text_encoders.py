"""The text encoders of transformers, one record each: UMT5, T5, BERT, the text half of CLIP, and language models."""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspeed_mm_dit.configs.text_encoder import (
    BertConfig,
    CLIPTextConfig,
    LanguageModelConfig,
    Mistral3Config,
    Qwen3Config,
    Qwen25VLConfig,
    T5Config,
    TransformersTextConfig,
    UMT5Config,
)
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.pretrained import are_equal_if_stored
from mindspeed_mm_dit.models.text_encoder import TextEncoderSpec, check_files, folder_tokenizer

_HEADS = ("pooler.", "cls.", "embeddings.position_ids")
"""Prefixes of BERT weights that may be unused: heads of its pre-training, and a table that newer files leave out."""


_TABLES = ("shared.weight", "encoder.embed_tokens.weight")
"""Names of T5's table of tokens, which files may hold once or twice."""


def _kind(config: type[TransformersTextConfig], build: Any, model_type: str, hint: str, *ids: str,
          positions: str = "", check: Any = check_files) -> TextEncoderSpec:  # fmt: skip
    opened = partial(folder_tokenizer, model_type=model_type, hint=hint, ids=ids, positions=positions)
    return TextEncoderSpec(config, opened, build, check)


def _build_t5(config: TransformersTextConfig, module: str = "UMT5EncoderModel", reads_padding: bool = False) -> Any:
    """Build an encoder that returns its last hidden states and no pooled vector; a decoder is left out."""
    from mindspeed_mm_dit.models.pytorch_encoders import TransformersEncoder

    return TransformersEncoder(config, module, partial(_encode_t5, reads_padding), ("decoder.", "lm_head."))


def _build_plain_t5(config: T5Config) -> Any:
    return _build_t5(config, "T5EncoderModel", bool(config.attend_padding))


def _check_t5(config: TransformersTextConfig) -> None:
    """Check the files, and that a table of tokens that they hold twice is the same both times."""
    check_files(config)
    if not are_equal_if_stored("text_encoder.from_pretrained", config.folder, _TABLES):
        raise CheckpointError(
            f"text_encoder.from_pretrained = {config.folder} contains two different tables of tokens, "
            f"{' and '.join(_TABLES)}, but the encoder has one. Use the files as they were published."
        )


def _encode_t5(reads_padding: bool, network: Any, ids: Any, mask: Any) -> tuple[Any, None]:
    return network(input_ids=ids, attention_mask=None if reads_padding else mask).last_hidden_state, None


def _build_bert(config: BertConfig) -> Any:
    """Build an encoder that returns its states and a pooled vector, pooled as in the files of sentence-transformers."""
    from mindspeed_mm_dit.models.pytorch_encoders import TransformersEncoder

    encode = partial(_encode_bert, *config.pooling())
    return TransformersEncoder(config, "BertModel", encode, _HEADS, add_pooling_layer=False)


def _encode_bert(pooling: str, normalize: bool, module: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
    from mindspeed_mm_dit.framework import ops

    states = module(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, L, D)
    full, weights = ops.to_float32(states), ops.to_float32(mask)[:, :, None]
    pooled = full[:, 0] if pooling == "cls" else (full * weights).sum(1) / weights.sum(1)  # (B, D)
    length = (pooled * pooled).sum(1)[:, None] ** 0.5
    return states, pooled / length if normalize else pooled


def _build_clip(config: CLIPTextConfig) -> Any:
    """Build an encoder that returns states of its last or second to last layer, and the end token's state as pooled.

    As in diffusers' pipelines, padding is attended to. Attention is causal, so this changes only the padding's states.
    """
    from mindspeed_mm_dit.models.pytorch_encoders import TransformersEncoder

    projects = config.has_projection
    name = "CLIPTextModelWithProjection" if projects else "CLIPTextModel"
    encode = partial(_encode_clip, projects, config.states != "penultimate")
    return TransformersEncoder(config, name, encode, ("text_model.embeddings.position_ids",))


def _encode_clip(projects: bool, uses_last: bool, module: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
    output = module(input_ids=ids, output_hidden_states=not uses_last)
    states = output.last_hidden_state if uses_last else output.hidden_states[-2]  # (B, L, D)
    return states, output.text_embeds if projects else output.pooler_output  # (B, P)


def _build_language_model(module: str, part: str, *optional: str) -> Any:
    """Return a function that builds an encoder of concatenated states of some layers, without a pooled vector."""

    def build(config: LanguageModelConfig) -> Any:
        from mindspeed_mm_dit.models.pytorch_encoders import TransformersEncoder

        return TransformersEncoder(config, module, partial(_encode_language_model, config.layers), optional, part)

    return build


def _encode_language_model(layers: tuple[int, ...], network: Any, ids: Any, mask: Any) -> tuple[Any, None]:
    from mindspeed_mm_dit.framework import ops

    states = network(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    return ops.cat([states[layer] for layer in layers], 2), None


UMT5 = _kind(UMT5Config, _build_t5, "umt5", "Name the text_encoder/ folder of Wan, or another UMT5.",
             "pad_token_id", "eos_token_id", check=_check_t5)  # fmt: skip
T5 = _kind(T5Config, _build_plain_t5, "t5", "Name a text_encoder_2/ folder of FLUX, or another T5.",
           "pad_token_id", "eos_token_id", check=_check_t5)  # fmt: skip
BERT = _kind(BertConfig, _build_bert, "bert", "Name the folder of a BERT, such as sentence-transformers' MiniLM.",
             "pad_token_id", positions="max_position_embeddings")  # fmt: skip
CLIP_TEXT = _kind(CLIPTextConfig, _build_clip, "clip_text_model",
                  "Name a text_encoder/ folder of Stable Diffusion 3 or FLUX, or another CLIPTextModel.",
                  positions="max_position_embeddings")  # fmt: skip
QWEN2_5_VL = _kind(Qwen25VLConfig, _build_language_model("Qwen2_5_VLForConditionalGeneration", "model.language_model"),
                   "qwen2_5_vl", "Name the text_encoder/ folder of Qwen-Image, or another Qwen2.5-VL.")  # fmt: skip
QWEN3 = _kind(Qwen3Config, _build_language_model("Qwen3Model", "", "lm_head."), "qwen3",
              "Name the text_encoder/ folder of Z-Image or FLUX.2-klein, or another Qwen3.")  # fmt: skip
MISTRAL3 = _kind(Mistral3Config, _build_language_model("Mistral3ForConditionalGeneration", "model.language_model"),
                 "mistral3", "Name the text_encoder/ folder of FLUX.2-dev, or another Mistral Small 3.")  # fmt: skip
