"""Section ``text_encoder`` of model.json: the frozen network that turns captions into states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm_dit.configs.limits import check_between, check_path


@dataclass(frozen=True)
class TextEncoderConfig:
    """UMT5 (Chung et al. 2023), the text encoder of Wan, through transformers."""

    from_pretrained: str
    """Local folder of the encoder as transformers saves it: config.json and weights."""
    tokenizer: str | None = None
    """Local folder of its tokenizer; null: ``from_pretrained`` itself, or ``tokenizer`` beside it, as Wan has it."""
    max_length: int = 512
    """Tokens L of every caption, its end included; shorter ones are padded."""
    truncate: bool = False
    """Cut captions that are longer, as MindSpeed-MM does, instead of refusing them."""
    zero_padding: bool = False
    """Set the states of the padding to zero, as Wan's pipeline does; MindSpeed-MM's tutorial hands them on as they
    are. The mask acts inside the encoder either way."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision in which the encoder runs."""
    hub_backend: Literal["hf"] = "hf"
    """Where the class comes from; MindSpeed-MM's key, with the one value that is known here."""
    model_id: Literal["umt5", "UMT5"] = "umt5"
    """Kind of encoder; MindSpeed-MM writes it in capitals."""

    def __post_init__(self) -> None:
        check_path("text_encoder.from_pretrained", self.from_pretrained)
        if self.tokenizer is not None:
            check_path("text_encoder.tokenizer", self.tokenizer)
        check_between("text_encoder.max_length", self.max_length, 2, 32_768, "Wan has 512")

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer."""
        own = Path(self.from_pretrained)
        if self.tokenizer is not None:
            return Path(self.tokenizer)
        return own if (own / "tokenizer_config.json").is_file() else own.parent / "tokenizer"
