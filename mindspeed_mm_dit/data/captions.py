"""Captions: the files they are read from, and their token ids as the pipelines of each encoder's publishers make them.

A location of captions is written ".txt" for a file's ending next to an image, or after it in a tar; ".json:caption" for
a key of a JSON object. A text file has one caption per line; a JSON value is one caption or a list. There may be
several locations, e.g. one per language; an image gets the captions of all.
"""

from __future__ import annotations

import html
import json
import os
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mindspeed_mm_dit.configs.files import (
    UnusableFile,
    check_file,
    check_names_no_code,
    error_text,
    fetch_command,
    lines_of,
    read_bytes,
)
from mindspeed_mm_dit.configs.limits import MAX_INT64, shorten_repr
from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig, TransformersTextConfig
from mindspeed_mm_dit.data.sources import map_in_threads
from mindspeed_mm_dit.errors import ConfigError, DataError, PlatformError

VARIED_AMONG = 1000
"""Varied captions are chosen among this many, evenly spread over all of them."""
NEEDED = "Install the packages of requirements/video.txt."

MAX_CAPTION_BYTES = 1 << 20
"""Largest size of a file of captions."""
SAVE_AS_UTF_8 = "(save it as UTF-8)"
"""The end of each problem with a caption in another encoding."""


CaptionCheck = Callable[[Sequence[str]], list[str]]
"""Captions -> what is wrong with each, "" for a good one: :func:`caption_problems` of a text encoder."""


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
        raise PlatformError(f"Captions are repaired with ftfy, which cannot be used here: {error}. {NEEDED}") from None
    return ftfy.fix_text(caption)


_TOKENIZER_LOCK = threading.Lock()
"""Each call sets padding and truncation, which are state of the tokenizer."""


class CaptionTokenizer:
    """The tokenizer of a transformers text encoder, from a local folder; safe to call from several threads."""

    def __init__(self, config: TransformersTextConfig) -> None:
        self.config: TransformersTextConfig = config
        self._tokenizer = _load(config)
        self._clean: Callable[[str], str] = clean_caption if config.cleans_captions else str
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
                f"text_encoder.cut_tokens = {self.config.cut_tokens} does not fit prompt_template, which has {before} "
                f"tokens of this tokenizer before the caption. Write {before}, or name the tokenizer that came with "
                "the encoder."
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
    most = MAX_INT64 if tokenizer.config.truncate else tokenizer.config.max_length
    problems = []
    for caption, length in zip(captions, tokenizer.lengths(captions)):
        if not any(character.isalnum() for character in html.unescape(html.unescape(caption))):
            problems.append(f"has the caption {shorten_repr(caption)}, which has no words")
        elif length > most:
            problems.append(
                f"has a caption of {length} tokens, and text_encoder.max_length is {most} (text_encoder.truncate cuts "
                f"longer ones): {shorten_repr(caption)}"
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


def first_problems(rows: Sequence[Sequence[str]], checks: Sequence[CaptionCheck]) -> list[str]:
    """Return the first problem with the captions of each of ``rows``; "" if there is none."""
    problems = [""] * len(rows)
    numbered = [(number, caption) for number, captions in enumerate(rows) for caption in captions]
    for check in checks:
        for (number, _), problem in zip(numbered, check([caption for _, caption in numbered])):
            problems[number] = problems[number] or problem
    return problems


def _load(config: TransformersTextConfig) -> Any:
    folder = config.tokenizer_folder
    if not folder.is_dir():
        hint = fetch_command(folder) or "Name the folder of the encoder's tokenizer."
        raise DataError(f"text_encoder.tokenizer = {folder} is not a folder, and nothing is downloaded. {hint}")
    check_names_no_code("text_encoder.tokenizer", folder)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise PlatformError(
            f"text_encoder.tokenizer = {folder} is read with transformers, which cannot be used here: "
            f"{error_text(error)}. {NEEDED}"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer("a \U0010fffd")  # (only this raises if it lacks an end or unknown token)
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # (a damaged file can raise anything, panics of Rust included)
        raise DataError(
            f"text_encoder.tokenizer = {folder} is not a tokenizer that transformers can load: "
            f"{str(error).rstrip('.')}. Copy the folder again."
        ) from None


# --- files of captions ------------------------------------------------------------------------------------------------


class ImageCaptions(NamedTuple):
    """The captions of one image."""

    captions: tuple[str, ...] = ()
    problem: str = ""
    """Why the image cannot be used, worded to follow its name; "" for a good one."""

    @property
    def other_encoding(self) -> bool:
        """Whether there is a caption, but not in UTF-8."""
        return self.problem.endswith(SAVE_AS_UTF_8)


def merge_captions(parts: Sequence[ImageCaptions], locations: Sequence[str]) -> ImageCaptions:
    """Join the captions of one image: ``parts`` has those of the ``locations`` that exist."""
    problem = next((part.problem for part in parts if part.problem), "")
    captions = tuple(caption for part in parts for caption in part.captions)
    return ImageCaptions(
        captions, problem or ("" if captions else f"has no caption: there is no {' or '.join(locations)}")
    )


def checked(captions: Sequence[ImageCaptions], checks: Sequence[CaptionCheck]) -> list[ImageCaptions]:
    """Return ``captions`` with the problems that the text encoders' ``checks`` report."""
    problems = first_problems([image.captions for image in captions], checks)
    return [image if image.problem else image._replace(problem=problem) for image, problem in zip(captions, problems)]


def file_endings(locations: Sequence[str]) -> set[str]:
    """Return the endings of the files that ``locations`` name."""
    return {location.partition(":")[0] for location in locations if location.startswith(".")}


def read_sidecar_captions(images: Sequence[Path], locations: Sequence[str]) -> list[ImageCaptions]:
    """Return the captions of each of ``images`` from the files next to it, named like the image but for the ending.

    If there is no such file, one is used whose name is written with other Unicode characters that look the same, whose
    ending has capital letters, or whose name has the image's ending too (x.png.txt).
    """
    folders = {folder: _NamesIn(folder) for folder in {image.parent for image in images}}
    read = lambda image: _sidecar_captions(image, locations, folders[image.parent])  # noqa: E731
    return list(map_in_threads(read, images, "reading captions", "image"))


_normal = partial(unicodedata.normalize, "NFC")


class _NamesIn:
    """The names in a folder, looked up also by other spellings."""

    def __init__(self, folder: Path) -> None:
        try:
            self._exact = set(os.listdir(folder))
        except OSError:  # (each image is checked by itself)
            self._exact = set()
        self._alike: dict[str, list[str]] = {}
        for name in sorted(self._exact):
            self._alike.setdefault(_normal(name).casefold(), []).append(name)

    def matching(self, stem: str, ending: str) -> list[str]:
        """Return the name that is ``stem`` and ``ending``, or those like it; letters of the stem keep their case."""
        if stem + ending in self._exact:
            return [stem + ending]
        alike = self._alike.get(_normal(stem + ending).casefold(), [])
        return [name for name in alike if _normal(name).startswith(_normal(stem))]


def _sidecar_captions(image: Path, locations: Sequence[str], names: _NamesIn) -> ImageCaptions:
    parts = []
    for location in locations:
        ending = location.partition(":")[0]
        matches = names.matching(image.stem, ending) or names.matching(image.name, ending)
        if len(matches) > 1:
            parts.append(ImageCaptions(problem=f"has captions in {' and in '.join(matches)}: keep one"))
        elif matches and image.with_name(matches[0]).is_file():
            parts.append(_read_sidecar(image.with_name(matches[0]), location))
    return merge_captions(parts, [image.stem + location for location in locations])


def _read_sidecar(path: Path, location: str) -> ImageCaptions:
    try:
        check_size(check_file(path))
        return parse_caption_file(path.name, read_bytes(path), location)
    except UnusableFile as problem:
        return ImageCaptions(problem=f"has a caption in {path.name}, which {problem}")


def check_size(size: int) -> None:
    """Raise UnusableFile if a file of ``size`` bytes is too large to hold captions."""
    if size > MAX_CAPTION_BYTES:
        raise UnusableFile(f"has {size:,} bytes, too many for captions")


def parse_caption_file(name: str, content: bytes, location: str) -> ImageCaptions:
    """Return the captions in a file called ``name``; ``location``: its ending and, for JSON, the key."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        where = f"{name}, line {line}, byte {content[error.start]:#04x}"
        return ImageCaptions(problem=f"has a caption that is not UTF-8: {where} {SAVE_AS_UTF_8}")
    key = location.partition(":")[2]
    captions = _in_json(text, key) if key else [line.strip() for line in lines_of(text)]
    if captions is None:
        return ImageCaptions(problem=f"has no caption: {name} is not a JSON object with texts in {key!r}")
    captions = [caption for caption in captions if caption.strip()]
    if any("\0" in caption for caption in captions):
        return ImageCaptions(problem=f"has a caption that is not text: {name} holds a NUL byte {SAVE_AS_UTF_8}")
    return ImageCaptions(tuple(captions), "" if captions else f"has no caption: {name} is empty")


def _in_json(text: str, key: str) -> list[str] | None:
    """Return the captions of a JSON object: [] if it lacks the key, None if it is not such an object."""
    try:
        content: Any = json.loads(text)
        texts = as_text_list(content.get(key, []))
        "".join(texts or ()).encode()  # (JSON can contain half a surrogate pair)
    except (ValueError, AttributeError, RecursionError):
        return None
    return texts


def as_text_list(value: Any) -> list[str] | None:
    """Return a text or a list of texts as a list, [] for None, and None for anything else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return values if all(isinstance(item, str) for item in values) else None


def parse_captions(value: Any, where: str) -> ImageCaptions:
    """Return the captions in ``value``, the field ``where`` of a table."""
    texts = as_text_list(value)
    if texts is None:
        return ImageCaptions(problem=f"has a {where} that is not text: {shorten_repr(value)}")
    return ImageCaptions(tuple(text for text in texts if text.strip()))
