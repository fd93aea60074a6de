"""Settings of ``words``, the text encoder that needs no weights (``models/words_encoder.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig


@dataclass(frozen=True)
class WordsConfig(TextEncoderConfig):
    """Words as random vectors. They encode which words a caption has and the word before each, but no meaning."""

    width: int = 256
    """Width D of a state and of the pooled vector, 8 to 4096."""
    max_length: int = 32
    """Tokens L of every caption: its words, and one for the end; shorter captions are padded. 2 to 32768."""
    truncate: bool = False
    """Cut longer captions; if false, a longer caption is an error."""
    zero_padding: Literal[True] = True
    """The states of the padding are zero."""
    dtype: Literal["fp32"] = "fp32"
    model_id: Literal["words"] = "words"

    frameworks = ("pytorch", "mindspore")

    def __post_init__(self) -> None:
        check_between("text_encoder.width", self.width, 8, 4096)
        check_between("text_encoder.max_length", self.max_length, 2, 32_768)

    def states_width(self) -> int:
        return self.width

    def pooled_width(self) -> int:
        """Return the width of a state: pooling does not change it."""
        return self.width

    def identity(self) -> str:
        return f"words of width {self.width}"
