"""A tokenizer with a small vocabulary, and a small UMT5 with random weights: the text encoder of the built-in clips.

Both are folders in transformers' format. A frozen random network tells captions apart well enough to learn from, and
needs no download. Weights are generated with NumPy, so they are the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mindspeed_mm_dit.data.draws import philox

WIDTH, HEADS, HEAD_WIDTH, HIDDEN, LAYERS, BUCKETS = 64, 4, 16, 128, 2, 32
SIZE_OF_STATES = 4.0
"""Root mean square of the states: cross-attention starts with small weights and learns faster from larger states."""
SPECIAL = ("<pad>", "</s>", "<unk>")
"""Tokens 0, 1 and 2: padding, the end of a caption, and every unknown word."""


def write_tokenizer(folder: Path, captions: Sequence[str]) -> None:
    """Make a tokenizer whose tokens are the words of ``captions``, and save it in ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    pad, end, unknown = SPECIAL
    tokenizer = Tokenizer(models.WordLevel(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 1)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": end, "unk_token": unknown}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def write_text_encoder(folder: Path, tokenizer: Path) -> None:
    """Save a UMT5 encoder for the vocabulary in the folder ``tokenizer``; its size determines the weights."""
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    config = {
        "architectures": ["UMT5EncoderModel"], "model_type": "umt5", "vocab_size": len(vocabulary),
        "d_model": WIDTH, "num_heads": HEADS, "d_kv": HEAD_WIDTH, "d_ff": HIDDEN, "num_layers": LAYERS,
        "relative_attention_num_buckets": BUCKETS, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0,
        "is_encoder_decoder": True, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        "dtype": "float32",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(_weights(len(vocabulary)), folder / "model.safetensors", {"format": "pt"})


def _weights(vocabulary_size: int) -> dict[str, np.ndarray]:
    """Return the weights by transformers' names: all norms but the last are 1, the rest normal, preserving variance."""
    inner = HEADS * HEAD_WIDTH
    spread: dict[str, tuple[tuple[int, ...], float]] = {"shared.weight": ((vocabulary_size, WIDTH), 1.0)}
    for layer in range(LAYERS):
        attention = f"encoder.block.{layer}.layer.0.SelfAttention"
        feed = f"encoder.block.{layer}.layer.1.DenseReluDense"
        spread[f"{attention}.q.weight"] = (inner, WIDTH), (WIDTH * HEAD_WIDTH) ** -0.5  # (scores are not divided)
        spread |= {f"{attention}.{name}.weight": ((inner, WIDTH), WIDTH**-0.5) for name in "kv"}
        spread[f"{attention}.o.weight"] = (WIDTH, inner), inner**-0.5
        spread[f"{attention}.relative_attention_bias.weight"] = (BUCKETS, HEADS), 1.0
        spread |= {f"{feed}.{name}.weight": ((HIDDEN, WIDTH), WIDTH**-0.5) for name in ("wi_0", "wi_1")}
        spread[f"{feed}.wo.weight"] = (WIDTH, HIDDEN), HIDDEN**-0.5
    norms = [f"encoder.block.{layer}.layer.{half}.layer_norm.weight" for layer in range(LAYERS) for half in (0, 1)]
    weights = {
        name: philox((0, 1), (0, 0, number, 0)).standard_normal(shape, np.float32) * np.float32(std)
        for number, (name, (shape, std)) in enumerate(spread.items())
    }
    weights |= {name: np.ones(WIDTH, np.float32) for name in norms}
    return weights | {"encoder.final_layer_norm.weight": np.full(WIDTH, SIZE_OF_STATES, np.float32)}
