"""A text encoder as another package brings it: a letter is a token, its state a row of a table."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
from mindspeed_mm_dit.data.captions import Tokens
from mindspeed_mm_dit.models.text_encoder import EncodedText, TextEncoderSpec

END = 127


@dataclass(frozen=True)
class LettersConfig(TextEncoderConfig):
    """Letters of ASCII."""

    width: int = 16
    max_length: int = 24
    truncate: bool = False
    zero_padding: bool = True
    dtype: Literal["fp32"] = "fp32"
    model_id: str = "letters"

    frameworks = ("pytorch", "mindspore")

    def states_width(self) -> int:
        return self.width

    def pooled_width(self) -> int:
        return self.width

    def identity(self) -> str:
        return f"letters, {self.width}"


class LettersTokenizer:
    """A letter a token, and one for the end."""

    def __init__(self, config: LettersConfig) -> None:
        self.config = config

    def lengths(self, captions):
        return [len(caption) + 1 for caption in captions]

    def __call__(self, captions):
        longest = self.config.max_length
        letters = [[*(ord(letter) % END for letter in caption[: longest - 1]), END] for caption in captions]
        ids = np.array([some + [0] * (longest - len(some)) for some in letters], np.int64)
        counts = np.array([len(some) for some in letters])
        return Tokens(ids, (np.arange(longest) < counts[:, None]).astype(np.int64))


def build(config: LettersConfig):
    from mindspeed_mm_dit.framework import ops

    table = np.random.default_rng(0).standard_normal((END + 1, config.width)).astype(np.float32)

    def network(ids, mask):
        states = table[ops.numpy(ids)] * ops.numpy(mask)[:, :, None].astype(np.float32)
        return EncodedText(ops.tensor(states), mask, ops.tensor(states.sum(1)))

    return network


LETTERS = TextEncoderSpec(LettersConfig, LettersTokenizer, build)
