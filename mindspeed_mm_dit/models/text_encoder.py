"""From captions to states: a tokenizer and a frozen encoder that belong together. Never part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.data.captions import CaptionTokenizer, caption_problems
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.framework import active

Tensor = Any

SPARE_ROWS = 128
"""An encoder's table has as many rows as its tokenizer has ids, or a few more: up to the next multiple of this."""


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer and the network that reads its ids."""

    tokenizer: CaptionTokenizer
    """Captions to ids and mask."""
    network: Callable[[Tensor, Tensor], Tensor]
    """(ids (B, L), mask (B, L)) -> states (B, L, D) float32."""

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return states (B, L, D) float32 and mask (B, L) int64 of captions (B,); L is ``max_length``.

        The mask is 1 for a token and 0 for padding. The states of the padding are zero with ``zero_padding``.
        """
        from mindspeed_mm_dit.framework import ops

        tokens = self.tokenizer(captions)
        ids, mask = ops.tensor(tokens.ids), ops.tensor(tokens.mask)
        return self.network(ids, mask), mask

    def encode_null(self) -> tuple[Tensor, Tensor]:
        """Return states (1, L, D) and mask (1, L) of the null condition, the empty caption."""
        return self.encode([""])


def load_text_encoder(config: TextEncoderConfig) -> TextEncoder:
    """Load tokenizer and encoder, once it is known that they belong together.

    Raises:
        ConfigError: they do not.
        DataError, CheckpointError: one of them is missing or damaged.
        PlatformError: transformers is not installed, or the active framework is not PyTorch.
    """
    tokenizer = open_tokenizer(config)
    check_framework(config)
    from mindspeed_mm_dit.models.umt5_pytorch import UMT5

    return TextEncoder(tokenizer, UMT5(config))


def open_tokenizer(config: TextEncoderConfig) -> CaptionTokenizer:
    """Return the tokenizer; raises ConfigError unless it is the encoder's, by config.json. No weights are read."""
    path = f"{config.from_pretrained}/config.json"
    encoder = read_json(path, "text_encoder.from_pretrained")
    if encoder.get("model_type") != "umt5":
        raise ConfigError(
            f"text_encoder.from_pretrained = {path}", f"is of a {encoder.get('model_type')!r}, not of a 'umt5'",
            "name the text_encoder/ folder of Wan, or another UMT5",
        )  # fmt: skip
    tokenizer = CaptionTokenizer(config)
    rows, ids = encoder.get("vocab_size"), tokenizer.vocabulary_size
    if type(rows) is not int or not ids <= rows < ids + SPARE_ROWS:
        raise _strangers(config, f"the encoder has vocab_size = {rows}, and the tokenizer {ids} ids")
    for name, number in tokenizer.special_ids.items():
        if encoder.get(name) != number:
            raise _strangers(config, f"the encoder has {name} = {encoder.get(name)}, and the tokenizer {number}")
    return tokenizer


def check_framework(config: TextEncoderConfig | WanVAEConfig) -> None:
    """Raise PlatformError where the encoder of captions, or of clips, cannot run on the active framework."""
    from mindspeed_mm_dit.framework import runtime

    if not runtime.RUNS_TORCH_MODULES:
        raise PlatformError(
            f"model_id = {config.model_id!r}", f"runs on PyTorch alone, not on {active()}",
            "encode once with PyTorch (mm-dit cache-latents), and name the folder in dataset_param.features",
        )  # fmt: skip


def check_captions(config: TextEncoderConfig, captions: Sequence[str], flag: str) -> None:
    """Raise ConfigError, of ``flag``, for a caption that the encoder cannot read whole; no weights are read."""
    problems = caption_problems(open_tokenizer(config), captions)
    for caption, problem in zip(captions, problems):
        if problem:
            raise ConfigError(f"{flag} = {shown(caption)}", problem, "write it shorter, in words")


def _strangers(config: TextEncoderConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"text_encoder.tokenizer = {config.tokenizer_folder}",
        f"does not belong to the encoder in {config.from_pretrained}: {reason}",
        "name the tokenizer that came with the encoder",
    )
