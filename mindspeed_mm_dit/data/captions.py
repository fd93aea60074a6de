"""From captions to token ids, as the pipelines of each encoder's publishers prepare them. No framework."""

from __future__ import annotations

import html
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mindspeed_mm_dit.configs.files import how_to_fetch
from mindspeed_mm_dit.configs.foreign_code import check_names_no_code
from mindspeed_mm_dit.configs.limits import LARGEST, short_repr
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig, TransformersTextConfig
from mindspeed_mm_dit.errors import ConfigError, DataError, PlatformError

VARIED_AMONG = 1000
"""Varied captions are chosen among this many, evenly spread over all of them."""
NEEDED = "install the packages of requirements/video.txt"


class Tokens(NamedTuple):
    """Captions as an encoder reads them."""

    ids: np.ndarray
    """(B, L) int64."""
    mask: np.ndarray
    """(B, L) int64: 1 for a token, the end of the caption included, 0 for padding."""


class Tokenizer(Protocol):
    """Turns captions into tokens; safe to call from several threads."""

    @property
    def config(self) -> TextEncoderConfig:
        """Config of the text encoder that it belongs to."""

    def lengths(self, captions: Iterable[str]) -> list[int]:
        """Return the number of tokens of each caption, its end included, without truncation."""

    def __call__(self, captions: Sequence[str]) -> Tokens:
        """Return ids and mask of captions (B,), padded or truncated to ``max_length``."""


def clean_caption(caption: str) -> str:
    """Fix the encoding of a caption, unescape HTML, and collapse whitespace.

    This is the cleaning of Wan's pipelines, and MindSpeed-MM's basic_clean and whitespace_clean.
    """
    return re.sub(r"\s+", " ", html.unescape(html.unescape(fix_text(caption)))).strip()


def fix_text(caption: str) -> str:
    """Repair a caption with ftfy, which also makes typeset quotes, full-width letters and ligatures plain."""
    try:
        import ftfy
    except ImportError as error:
        raise PlatformError("captions", f"are repaired with ftfy, which cannot be used here: {error}", NEEDED) from None
    return ftfy.fix_text(caption)


def unchanged(caption: str) -> str:
    """Return a caption as it is, line breaks and double spaces included."""
    return caption


_TOKENIZER_LOCK = threading.Lock()
"""Each call sets padding and truncation, which are state of the tokenizer."""


class CaptionTokenizer:
    """The tokenizer of a transformers text encoder, from a local folder; safe to call from several threads."""

    def __init__(self, config: TransformersTextConfig) -> None:
        self.config: TransformersTextConfig = config
        self._tokenizer = _load(config)
        self._clean: Callable[[str], str] = clean_caption if config.cleans_captions else unchanged
        if type(self._tokenizer).__name__.startswith("CLIPTokenizer"):
            # The pipelines of FLUX.1 and SD3 load CLIPTokenizer, which does this by itself in transformers 4. The fast
            # tokenizer and transformers 5 do not, and would read other tokens.
            self._clean = lambda caption: fix_text(caption).lower()

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return len(self._tokenizer)

    @property
    def special_ids(self) -> dict[str, int | None]:
        """Ids of the padding and of the end of a caption, by their keys in an encoder's config.json."""
        return {"pad_token_id": self._tokenizer.pad_token_id, "eos_token_id": self._tokenizer.eos_token_id}

    def lengths(self, captions: Iterable[str]) -> list[int]:
        """Return the number of tokens of each caption, its end included, without truncation.

        The tokens of a prompt template count too, except those that are cut.
        """
        read = self._read(captions)
        return [len(ids) - self.config.cut_tokens for ids in self._tokenizer(read)["input_ids"]] if read else []

    def check_template(self) -> None:
        """Raise ConfigError unless the tokens that are cut are exactly those before a caption."""
        before = len(self._tokenizer(self.config.prompt_template.partition("{}")[0])["input_ids"])
        if self.config.cut_tokens not in (0, before):
            raise ConfigError(
                f"text_encoder.cut_tokens = {self.config.cut_tokens}",
                f"does not fit prompt_template: before the caption it has {before} tokens of this tokenizer",
                f"write {before}, or name the tokenizer that came with the encoder",
            )

    def _read(self, captions: Iterable[str]) -> list[str]:
        return [self.config.prompt(self._clean(caption)) for caption in captions]

    def __call__(self, captions: Sequence[str]) -> Tokens:
        """Read captions (B,), add the end token, pad or truncate to ``max_length``; return ids and mask.

        The empty caption is the end token alone. It replaces dropped captions and is the unconditional input of
        guidance. A language model reads it within its prompt template, whose leading tokens are cut later.
        """
        with _TOKENIZER_LOCK:
            encoded = self._tokenizer(
                self._read(captions),
                max_length=self.config.cut_tokens + self.config.max_length,
                padding="max_length",
                truncation=True,
                padding_side=self.config.padding_side,
                return_attention_mask=True,
                add_special_tokens=True,
                return_tensors="np",
            )
        return Tokens(encoded["input_ids"].astype(np.int64), encoded["attention_mask"].astype(np.int64))


def caption_problems(tokenizer: Tokenizer, captions: Sequence[str]) -> list[str]:
    """Return what is wrong with each of ``captions``, worded to follow its location; "" for a good one.

    A caption is wrong if it has no letter or digit, or is longer than ``max_length`` tokens (which is
    allowed with ``truncate``).
    """
    most = LARGEST if tokenizer.config.truncate else tokenizer.config.max_length
    problems = []
    for caption, length in zip(captions, tokenizer.lengths(captions)):
        if not any(character.isalnum() for character in html.unescape(html.unescape(caption))):
            problems.append(f"has the caption {short_repr(caption)}, which has no words")
        elif length > most:
            problems.append(
                f"has a caption of {length} tokens, and text_encoder.max_length is {most} (text_encoder.truncate cuts "
                f"longer ones): {short_repr(caption)}"
            )
        else:
            problems.append("")
    return problems


def varied(captions: Sequence[str], most: int) -> list[str]:
    """Return up to ``most`` of some distinct captions: after the first, each whose words are rarest in those before."""
    pool = [captions[n] for n in np.unique(np.linspace(0, len(captions) - 1, VARIED_AMONG).astype(int))]
    words = {caption: set(caption.lower().split() if " " in caption else caption) for caption in pool}
    chosen, used = list[str](), Counter[str]()
    while pool and len(chosen) < most:
        best = min(pool, key=lambda caption: sum(used[word] for word in words[caption]) / max(1, len(words[caption])))
        pool.remove(best)
        chosen.append(best)
        used.update(words[best])
    return chosen


def first_problems(rows: Sequence[Sequence[str]], checks: Sequence[Callable[[Sequence[str]], list[str]]]) -> list[str]:
    """Return the first problem with the captions of each of ``rows``; "" if there is none.

    checks: :func:`caption_problems` of each text encoder.
    """
    problems = [""] * len(rows)
    numbered = [(number, caption) for number, captions in enumerate(rows) for caption in captions]
    for check in checks:
        for (number, _), problem in zip(numbered, check([caption for _, caption in numbered])):
            problems[number] = problems[number] or problem
    return problems


def _load(config: TransformersTextConfig) -> Any:
    folder = config.tokenizer_folder
    if not folder.is_dir():
        raise DataError(
            f"text_encoder.tokenizer = {folder}",
            "there is no such folder; nothing is downloaded",
            how_to_fetch(folder) or "name the folder of the encoder's tokenizer",
        )
    check_names_no_code("text_encoder.tokenizer", folder)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        reason = f"is read with transformers, which cannot be used here: {error}"
        raise PlatformError(f"text_encoder.tokenizer = {folder}", reason, NEEDED) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer("a \U0010fffd")  # (only this raises if it lacks an end or unknown token)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # (a damaged file can raise anything, panics of Rust included)
        raise DataError(
            f"text_encoder.tokenizer = {folder}",
            f"is not a tokenizer that transformers can load: {error}",
            "copy the folder again",
        ) from None
