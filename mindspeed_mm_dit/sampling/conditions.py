"""The conditions of samples to generate: one value of each for every sample, from classes, prompts, vectors, images."""

from __future__ import annotations

import dataclasses
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions, FirstFrame, Vector
from mindspeed_mm_dit.configs.files import UnusableFile, error_text, lines_of, read_npy
from mindspeed_mm_dit.configs.limits import BYTES, shorten_repr
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.clip_reader import grey
from mindspeed_mm_dit.data.transforms import flatten, load_still, opacity_of, still_size
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.models.registry import open_tokenizer
from mindspeed_mm_dit.models.text_encoder import check_captions
from mindspeed_mm_dit.models.words_encoder import note_of_words
from mindspeed_mm_dit.sampling.request import SampleRequest, word_of
from mindspeed_mm_dit.terminal import logger, plain

if TYPE_CHECKING:
    from mindspeed_mm_dit.sampling.load import CheckpointDescription

MAX_IMAGES, MAX_VIDEOS = 1_000_000, 10_000
"""Most samples of one request; the usual scores take 50,000 images."""
DEFAULT_CLASSES = 10
_WORDS = {"label": "classes", "caption": "texts", "vector": "vectors", "image": "images"}
_FLAGS = {"label": "--classes", "caption": "--prompt", "vector": "--vectors", "image": "--image"}


@dataclass(frozen=True)
class SampleConditions:
    """The conditions of samples numbered from ``first_number`` on; the noise of a sample depends on its number."""

    values: Mapping[str, Sequence[Any]]
    """By item, one value per sample: "label" whole numbers, "caption" strings, "vector" (P,) each, "image" tuples of
    (3 or 1, H, W) uint8, None, or what ``initial_images`` returns."""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """What guidance leads away from, by item; by default the unconditional input."""
    first_number: int = 0

    def __post_init__(self) -> None:
        assert len(set(map(len, self.values.values()))) == 1, "every sample has every value"

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def at(self, numbers: np.ndarray) -> SampleConditions:
        """Return the conditions of the samples ``numbers`` (n,), numbered consecutively from the first."""
        values = {item: [column[number] for number in numbers.tolist()] for item, column in self.values.items()}
        return replace(self, values=values, first_number=self.first_number + int(numbers[0]))

    def repeat(self, times: int) -> SampleConditions:
        """Return the conditions of ``times`` samples of each value."""
        return self.at(np.repeat(np.arange(len(self)), times)) if times > 1 else self

    @property
    def labels(self) -> np.ndarray | None:
        """(N,) int64; None if no labels are requested."""
        return np.array(self.values["label"], np.int64) if "label" in self.values else None

    def titles(self, classes: Sequence[str] = ()) -> list[str]:
        """Return a caption of each sample; ``classes``: name of each label, if known."""
        words = []
        if "label" in self.values:
            words.append([classes[n] if n < len(classes) else str(n) for n in self.values["label"]])
        if "caption" in self.values:
            words.append(list(self.values["caption"]))
        return [plain(", ".join(parts)) for parts in zip(*words)] if words else [str(n) for n in range(len(self))]


def requested_conditions(
    request: SampleRequest, config: ModelConfig, model: CheckpointDescription, tokenizers: Sequence[Any] | None = None
) -> SampleConditions:
    """Return the conditions that are requested of a ``model``; ``config``: the model's, with the size of the samples.

    tokenizers: of the text encoders, if they are loaded. Raises ConfigError for what the model does not take.
    """
    conditions, values = config.predictor.conditions, dict[str, list[Any]]()
    for setting in dataclasses.fields(SampleRequest):
        if setting.metadata["item"] and (value := getattr(request, setting.name)) is not None:
            check_takes(setting.metadata["item"], conditions, word_of(setting), value)
    if conditions.label is not None:
        values["label"] = _labels(request.classes, model.classes, conditions.label.num_classes)
    negative = {"caption": request.negative_prompt} if request.negative_prompt else {}
    if "caption" in conditions.items:
        example = [*model.captions, "a seven moves left"][0]
        missing = f"--prompt is missing, and this model is conditioned on texts. Write one such as {example!r}."
        values["caption"] = _as_list("--prompt", request.prompts, missing)
        check_prompts(config, values["caption"], "--prompt", tokenizers)
        check_prompts(config, [*negative.values()], "--negative-prompt", tokenizers)
        if note := note_of_words(config, model.words, values["caption"]):
            logger.warning(note)
    if "vector" in conditions.items:
        vectors = request.vectors
        vectors = read_vectors(vectors) if isinstance(vectors, (str, Path)) else vectors
        missing = "--vectors is missing, and this model is conditioned on vectors. Name an .npy of shape (N, P)."
        values["vector"] = _as_list("--vectors", vectors, missing)
    if conditions.frames:
        values["image"] = requested_images(config, request.image, request.last_image)
    requested = SampleConditions(_together(values), negative)
    check_conditions(requested, config)
    return requested


def check_takes(item: str, conditions: Conditions, flag: str, value: Any) -> None:
    """Raise ConfigError about ``flag``, which sets ``item`` of a sample, unless the model is conditioned on it."""
    items = (*conditions.items, *(["image"] if conditions.frames else []))
    if item in items:
        return
    known = [setting for setting in dataclasses.fields(SampleRequest) if setting.metadata["item"] in items]
    inputs = " and ".join(_WORDS.get(name, name) for name in items)
    what = f"{flag} = {shorten_repr(value)}" if isinstance(value, (int, str)) else flag
    hint = f"Use {word_of(known[0])}." if known else "Leave it out."
    raise ConfigError(
        f"{what} cannot be used, because this model is conditioned on {inputs}, not on {_WORDS[item]}. {hint}"
    )


def _as_list(flag: str, argument: Any, missing: str = "") -> list[Any]:
    """Return an argument as a list; a single name, number or prompt becomes a list of one.

    missing: message of the ConfigError if it is None.
    """
    if argument is None:
        raise ConfigError(missing)
    value = argument.tolist() if hasattr(argument, "tolist") else argument  # (an array or tensor)
    if isinstance(value, (str, int, float)):
        return [value]
    try:
        items = None if isinstance(value, BYTES) else list(value)
    except TypeError:
        items = None
    if items is None:
        raise ConfigError(f"{flag} = {shorten_repr(argument)} is not a list.")
    if not items:
        raise ConfigError(f"{flag} is empty. Request at least one.")
    return items


def check_conditions(request: SampleConditions, config: ModelConfig) -> None:
    """Raise ConfigError for a label outside the model's classes, or a missing condition."""
    conditions: Conditions = config.predictor.conditions
    missing = [item for item in conditions.items if item not in request.values]
    if missing:
        flag = _FLAGS.get(missing[0], missing[0])
        raise ConfigError(f"{flag} is missing, and the model is conditioned on the {missing[0]}. Give it per sample.")
    if conditions.frames is not None and not isinstance(request.values.get("image", [None])[0], Mapping):
        _check_images(request, conditions.frames, config)
    _check_vectors(request, conditions)
    if conditions.label is None:
        return
    classes = conditions.label.num_classes
    for label in request.values["label"]:
        if not 0 <= label < classes:
            raise ConfigError(
                f"--classes has {label}, which is outside 0 ... {classes - 1} (predictor.num_classes = {classes})."
            )


def requested_images(config: ModelConfig, first: Any, last: Any) -> list[Any]:
    """Return the first and last frame of each sample, a tuple of (3 or 1, H, W) uint8, or None without any.

    first, last: a file, a PIL image, an array (H, W, 3 or 1) uint8, a list of these, or None. Raises ConfigError for a
    model that takes no such frame, and for anything that is not an image.
    """
    frames = config.predictor.conditions.frames
    if frames is None or (last is not None and not frames.with_last):
        flag, frame = ("--image", "first") if last is None else ("--last-image", "last")
        raise ConfigError(f"{flag} is given, but this model takes no {frame} frame. Leave it out.")
    if first is None:
        if last is not None:
            raise ConfigError("--image is required with --last-image.")
        return [None]
    sides = [
        [_pixels(image, flag, config) for image in (images if isinstance(images, (list, tuple)) else [images])]
        for flag, images in (("--image", first), ("--last-image", last))
        if images is not None
    ]
    if len({*map(len, sides)}) > 1:
        raise ConfigError(
            f"--last-image names {len(sides[1])} images, and --image {len(sides[0])}. Pass as many of each."
        )
    return list(zip(*sides))


def _pixels(image: Any, flag: str, config: ModelConfig) -> np.ndarray:
    """Return an image or an image file as (channels, H, W) uint8."""
    channels = config.ae.channels
    try:
        if isinstance(image, (str, os.PathLike)):
            _check_image_size(flag, still_size(Path(image), 1), config)  # (before a large one is decoded)
            image = load_still(Path(image), 1)
        elif not isinstance(image, np.ndarray):
            _check_image_size(flag, image.size[::-1], config)
            image = np.asarray(flatten(image.convert("RGB"), opacity_of(image)))
    except UnusableFile as problem:
        raise ConfigError(f"{flag} = {image} {problem}. Name another image.") from None
    except AttributeError:
        raise ConfigError(
            f"{flag} = {shorten_repr(image)} is not an image. Pass a file, a PIL image or an array."
        ) from None
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (channels, 3):
        raise ConfigError(
            f"{flag} has shape {shorten_repr(image.shape)} of {image.dtype}, and must have (H, W, {channels}) of uint8."
        )
    pixels = np.moveaxis(image, 2, 0)
    return pixels if len(pixels) == channels else grey(pixels[:, None])[:, 0]


def _check_images(request: SampleConditions, frames: FirstFrame, config: ModelConfig) -> None:
    """Raise ConfigError unless each sample has the required first and last frames, in the clip's size."""
    expected = 2 if frames.with_last else 1
    for images in request.values.get("image", [None]):
        if images is None and 1 in (frames.mask_channels, frames.shape[1]):
            continue
        if frames.shape[1] == 1:
            raise ConfigError("--image would be the whole of a clip of one frame. Drop it, or request more --frames.")
        if images is None or len(images) != expected:
            flag = "--image" if images is None else "--last-image"
            raise ConfigError(
                f"{flag} is needed, because the model begins{' and ends' * (expected > 1)} a clip with an image."
            )
        for flag, image in zip(("--image", "--last-image"), images):
            _check_image_size(flag, image.shape[1:], config)


def _check_image_size(flag: str, size: Sequence[int], config: ModelConfig) -> None:
    height, width = config.sample_size[-2:]
    if tuple(size) != (height, width):
        raise ConfigError(
            f"{flag} has {size[0]} x {size[1]} pixels, and a frame of the clip {height} x {width}. Crop the image, or "
            "set --size."
        )


def _check_vectors(request: SampleConditions, conditions: Conditions) -> None:
    for condition in (condition for condition in conditions if isinstance(condition, Vector)):
        try:
            vectors = np.array(request.values["vector"], np.float32)
        except (TypeError, ValueError):
            raise ConfigError("--vectors must be vectors of numbers, all of the same length.") from None
        if vectors.shape[1:] != (condition.width,) or not np.isfinite(vectors).all():
            raise ConfigError(
                f"--vectors has shape {vectors.shape}, and must hold finite vectors of shape (N, {condition.width})."
            )


# --- prompts, vectors ------------------------------------------------------------------------------------------------


def read_prompts(flag: str, file: str) -> list[str]:
    """Return the prompts in the text file that ``flag`` names, one per line; raises ConfigError if there are none."""
    try:
        lines = lines_of(Path(file).read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} = {file} cannot be read: {error_text(error)}. Name a text file.") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{flag} = {file} contains no prompt. Write one prompt per line.")
    return prompts


def check_prompts(
    config: ModelConfig, prompts: Sequence[Any], flag: str, tokenizers: Sequence[Any] | None = None
) -> None:
    """Raise ConfigError, naming ``flag``, for a prompt that a text encoder of the model cannot read completely.

    tokenizers: of the text encoders, if they are loaded.
    """
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(f"{flag} = {shorten_repr(prompt)} is not a string.")
    if tokenizers is None:
        tokenizers = [open_tokenizer(section) for section in config.text_encoders if prompts]
    for tokenizer in tokenizers:
        check_captions(tokenizer, prompts, flag)


def read_vectors(file: str | Path) -> np.ndarray:
    """Return the vectors (N, P) float32 in the .npy that --vectors names; raises ConfigError if there are none."""
    try:
        vectors = read_npy(file)
    except UnusableFile as problem:
        raise ConfigError(f"--vectors = {file} {problem}. Name an .npy file.") from None
    if vectors.ndim != 2 or vectors.dtype.kind not in "iuf" or not np.isfinite(vectors).all():
        raise ConfigError(f"--vectors = {file} has shape {vectors.shape}; it must hold finite vectors (N, P).")
    return vectors.astype(np.float32)


def _together(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the same number of values for each item: a single value is repeated for all values of another."""
    longest = max(values, key=lambda item: len(values[item]))
    most = len(values[longest])
    for item, column in values.items():
        if len(column) not in (1, most):
            raise ConfigError(
                f"{_FLAGS[item]} has {len(column)} values, and {_FLAGS[longest]} has {most}. Pass as many of each, or "
                "a single value for all."
            )
    return {item: column if len(column) == most else column * most for item, column in values.items()}


# --- classes ---------------------------------------------------------------------------------------------------------


def _labels(classes: Any, names: Sequence[str], num_classes: int) -> list[int]:
    """Return the labels of a text like that of --classes, of a list of its items, or of an array of labels."""
    if classes is None:
        return list(range(min(DEFAULT_CLASSES, num_classes)))
    requested = split_classes(classes, names) if isinstance(classes, str) else _as_list("--classes", classes)
    if hasattr(classes, "tolist") and not isinstance(requested[0], str):
        names = ()
    return labels_of([str(label) for label in requested], names, num_classes)


def split_classes(text: str, names: Sequence[str]) -> list[str]:
    """Return the classes in a list like ``cat,7-9,"salt, pepper"``; a text that is a class name is not split."""
    parts: list[str] = []
    for part in [text] if text in names else text.split(","):
        if parts and parts[-1].lstrip().startswith('"') and parts[-1].count('"') % 2:  # (still inside the quotes)
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def quote_class_name(name: str) -> str:
    """Return a class name as it is written in a list."""
    quoted = "," in name or name.startswith('"') or name != name.strip()
    return '"' + name.replace('"', '""') + '"' if quoted else name


def labels_of(requested: Sequence[str], names: Sequence[str], num_classes: int) -> list[int]:
    """Return the labels of ``requested``: each a class of ``names``, "3", or a range "7-9" below ``num_classes``.

    A name takes precedence over a number or range; in double quotes it is always a name.

    Raises ConfigError, naming the nearest class, or if a number is the name of a class with another number.
    """
    labels = {part: _labels_in_part(part, requested, names, num_classes) for part in dict.fromkeys(requested)}
    total = sum(len(labels[part]) for part in requested)
    if total > MAX_IMAGES:
        raise ConfigError(
            f"--classes lists {total:,} labels, and at most {MAX_IMAGES:,} samples are generated at once. List fewer."
        )
    return [label for part in requested for label in labels[part]]


def _labels_in_part(part: str, requested: Sequence[str], names: Sequence[str], num_classes: int) -> Sequence[int]:
    exact, text = (unicodedata.normalize("NFC", name) for name in (part, part.strip()))
    if exact in names or text in names:
        if _is_number(text):
            _check_agrees(int(text), names, num_classes)
        return [names.index(exact if exact in names else text)]
    quoted = text[1:-1].replace('""', '"') if text[:1] == text[-1:] == '"' else None
    if quoted in names:
        return [names.index(quoted)]
    first, dash, last = text.partition("-")
    if not _is_number(first) or (dash and not (_is_number(last) and int(first) <= int(last))):
        _refuse_class(requested, part, names)
    if int(last or first) >= num_classes:
        raise ConfigError(
            f"--classes has {text}, which is outside 0 ... {num_classes - 1} (predictor.num_classes = {num_classes})."
        )
    labels = range(int(first), int(last or first) + 1)
    for label in labels if names else ():
        _check_agrees(label, names, num_classes)
    return labels


def _check_agrees(number: int, names: Sequence[str], num_classes: int) -> None:
    """Raise ConfigError if ``number`` is the name of a class and the label of another."""
    label = names.index(str(number)) if str(number) in names else number
    if label != number < num_classes:
        raise ConfigError(
            f"--classes has {number}, which is the name of label {label}, and label {number} is "
            f"{names[number] if number < len(names) else number}. Write names in double quotes, such as '\"{number}\"'."
        )


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20


def _refuse_class(requested: Sequence[str], part: str, names: Sequence[str]) -> NoReturn:
    has = f" has {shorten_repr(part)}, which" if part != ",".join(requested) else ""
    problem = f"--classes = {shorten_repr(','.join(requested))}{has} is neither a label"
    if not names:
        raise ConfigError(f"{problem} nor a range. Write, for example, 0-9 or 1,5,7-9.")
    raise ConfigError(
        f"{problem} nor a range, nor the name of a class. {nearest(part.strip(), names)}Write labels, such as 0-9 or "
        f"1,5,7-9, or names of classes, such as {', '.join(names[:10])}."
    )
