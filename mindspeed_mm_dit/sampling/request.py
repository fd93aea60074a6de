"""A request for samples: one value of each condition per sample."""

from __future__ import annotations

import dataclasses
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions, FirstFrame, Vector
from mindspeed_mm_dit.configs.files import UnusableFile, lines_of
from mindspeed_mm_dit.configs.limits import MOST_FRAMES, MOST_PIXELS, check_between, short_repr, whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.data.clip_reader import grey
from mindspeed_mm_dit.data.transforms import flatten, load_still, opacity_of, still_size
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.models.registry import open_tokenizer
from mindspeed_mm_dit.models.text_encoder import check_captions
from mindspeed_mm_dit.sampling.pictures import memory_bytes
from mindspeed_mm_dit.terminal import plain

FLAGS = {
    "label": ("--classes", "--num-per-class"),
    "caption": ("--prompt", "--prompts", "--num-per-prompt", "--negative-prompt"),
    "vector": ("--vectors",),
    "image": ("--image", "--last-image"),
}
"""Flags of mm-dit sample, by the condition that they set."""


FORWARD_TENSORS = 5
"""Least number of float32 tensors (tokens, hidden_size) in memory during a block: its input, queries, keys, values, and
the output of attention."""
MOST_IMAGES, MOST_VIDEOS = 1_000_000, 10_000
"""Most samples of one request; the usual scores take 50,000 images."""


@dataclass(frozen=True)
class SampleRequest:
    """A request for samples, numbered from ``first_number`` on; the noise of a sample depends on its number."""

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

    def at(self, numbers: np.ndarray) -> SampleRequest:
        """Return a request for the samples ``numbers`` (n,) of this one, numbered consecutively from the first."""
        values = {item: [column[number] for number in numbers.tolist()] for item, column in self.values.items()}
        return dataclasses.replace(self, values=values, first_number=self.first_number + int(numbers[0]))

    def each(self, times: int) -> SampleRequest:
        """Return a request for ``times`` samples of each value."""
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


def check_request(request: SampleRequest, config: ModelConfig) -> None:
    """Raise ConfigError for a label outside the model's classes, or a missing condition."""
    conditions: Conditions = config.predictor.conditions
    missing = [item for item in conditions.items if item not in request.values]
    if missing:
        reason = "the model is conditioned on it"
        raise ConfigError(f"samples without a {missing[0]}", reason, f"request a {missing[0]}")
    if conditions.frames is not None and not isinstance(request.values.get("image", [None])[0], Mapping):
        _check_images(request, conditions.frames, config)
    _check_vectors(request, conditions)
    if conditions.label is None:
        return
    classes = conditions.label.num_classes
    for label in request.values["label"]:
        if not 0 <= label < classes:
            raise ConfigError(
                f"--classes: {label}", f"is outside 0 ... {classes - 1} (predictor.num_classes = {classes})"
            )


def requested_images(config: ModelConfig, first: Any, last: Any) -> list[Any]:
    """Return the first and last frame of each sample, a tuple of (3 or 1, H, W) uint8, or None without any.

    first, last: a file, a PIL image, an array (H, W, 3 or 1) uint8, a list of these, or None. Raises ConfigError for a
    model that takes no such frame, and for anything that is not an image.
    """
    frames = config.predictor.conditions.frames
    if frames is None or (last is not None and not frames.with_last):
        flag, frame = ("--image", "first") if last is None else ("--last-image", "last")
        raise ConfigError(flag, f"this model takes no {frame} frame", "leave it out")
    if first is None:
        if last is not None:
            raise ConfigError("--image", "is required with --last-image")
        return [None]
    sides = [
        [_pixels(image, flag, config) for image in (images if isinstance(images, (list, tuple)) else [images])]
        for flag, images in (("--image", first), ("--last-image", last))
        if images is not None
    ]
    if len({*map(len, sides)}) > 1:
        raise ConfigError(f"--last-image: {len(sides[1])} images", f"go with {len(sides[0])} of --image")
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
        raise ConfigError(f"{flag} = {image}", str(problem)) from None
    except AttributeError:
        cure = "pass a file, a PIL image or an array"
        raise ConfigError(f"{flag} = {short_repr(image)}", "is not an image", cure) from None
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (channels, 3):
        raise ConfigError(
            f"{flag}: {image.dtype} of shape {short_repr(image.shape)}", f"is not (H, W, {channels}) of uint8"
        )
    pixels = np.moveaxis(image, 2, 0)
    return pixels if len(pixels) == channels else grey(pixels[:, None])[:, 0]


def _check_images(request: SampleRequest, frames: FirstFrame, config: ModelConfig) -> None:
    """Raise ConfigError unless each sample has the required first and last frames, in the clip's size."""
    expected = 2 if frames.with_last else 1
    for images in request.values.get("image", [None]):
        if images is None and 1 in (frames.mask_channels, frames.shape[1]):
            continue
        if frames.shape[1] == 1:
            raise ConfigError(
                "--image", "would be the whole of a clip of one frame", "drop it, or request more --frames"
            )
        if images is None or len(images) != expected:
            flag = "--image" if images is None else "--last-image"
            raise ConfigError(
                flag, "is needed: the model begins a clip with an image" + " and ends it" * (expected > 1)
            )
        for flag, image in zip(("--image", "--last-image"), images):
            _check_image_size(flag, image.shape[1:], config)


def _check_image_size(flag: str, size: Sequence[int], config: ModelConfig) -> None:
    height, width = config.sample_size[-2:]
    if tuple(size) != (height, width):
        raise ConfigError(
            flag, f"is of {size[0]} x {size[1]} pixels, and the clip of {height} x {width}", "crop it, or give --size"
        )


def _check_vectors(request: SampleRequest, conditions: Conditions) -> None:
    for condition in (condition for condition in conditions if isinstance(condition, Vector)):
        try:
            vectors = np.array(request.values["vector"], np.float32)
        except (TypeError, ValueError):
            raise ConfigError("--vectors", "must be vectors of numbers, all of the same length") from None
        if vectors.shape[1:] != (condition.width,) or not np.isfinite(vectors).all():
            raise ConfigError("--vectors", f"of shape {vectors.shape}: the model takes finite (N, {condition.width})")


def check_amount(what: str, total: int, config: ModelConfig, output: Path) -> None:
    """Raise ConfigError, naming the setting ``what``, for more samples than one request may have.

    output: the file that ``total`` samples are written to; its format determines the memory that they need.
    """
    videos, cure = len(config.sample_size) == 3, "generate fewer at once, and the rest with another seed"
    most, noun = (MOST_VIDEOS, "videos") if videos else (MOST_IMAGES, "images")
    if total > most:
        raise ConfigError(what, f"{total:,} {noun}: at most {most:,} are generated at once", cure)
    need, available = 0 if videos else memory_bytes(output, total, config.sample_size), host_memory_bytes()
    if need > available:
        memory = f"this machine has {available / 2**30:,.1f} GiB"
        raise ConfigError(what, f"{total:,} {noun} need {need / 2**30:,.1f} GiB, and {memory}", cure)


def read_prompts(flag: str, file: str) -> list[str]:
    """Return the prompts in the text file that ``flag`` names, one per line; raises ConfigError if there are none."""
    try:
        lines = lines_of(Path(file).read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} = {file}", f"cannot be read: {error}", "name a text file") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{flag} = {file}", "contains no prompt", "write one prompt per line")
    return prompts


def check_prompts_fit(config: ModelConfig, prompts: Sequence[str], flag: str) -> None:
    """Raise ConfigError, naming ``flag``, for a prompt that a text encoder of the model cannot read completely."""
    for section in config.text_encoders if prompts else ():
        check_captions(open_tokenizer(section), prompts, flag)


def together(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the same number of values for each item: a single value is repeated for all values of another."""
    longest = max(values, key=lambda item: len(values[item]))
    most = len(values[longest])
    for item, column in values.items():
        if len(column) not in (1, most):
            raise ConfigError(
                f"{FLAGS[item][0]}: {len(column)} values",
                f"go with {most} of {FLAGS[longest][0]}",
                "pass as many of each, or a single one for all",
            )
    return {item: column if len(column) == most else column * most for item, column in values.items()}


def split_classes(text: str, names: Sequence[str]) -> list[str]:
    """Return the classes in a list like ``cat,7-9,"salt, pepper"``; a text that is a class name is not split."""
    parts: list[str] = []
    for part in [text] if text in names else text.split(","):
        if parts and parts[-1].lstrip().startswith('"') and parts[-1].count('"') % 2:  # (still inside the quotes)
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def in_a_list(name: str) -> str:
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
    if total > MOST_IMAGES:
        raise ConfigError(
            "--classes", f"lists {total:,} labels, and at most {MOST_IMAGES:,} samples are generated at once"
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
        reason = f"is outside 0 ... {num_classes - 1} (predictor.num_classes = {num_classes})"
        raise ConfigError(f"--classes: {text}", reason)
    labels = range(int(first), int(last or first) + 1)
    for label in labels if names else ():
        _check_agrees(label, names, num_classes)
    return labels


def _check_agrees(number: int, names: Sequence[str], num_classes: int) -> None:
    """Raise ConfigError if ``number`` is the name of a class and the label of another."""
    label = names.index(str(number)) if str(number) in names else number
    if label != number < num_classes:
        raise ConfigError(
            f"--classes: {number}",
            f"is the name of label {label}, and label {number} is {names[number] if number < len(names) else number}",
            f"name classes in double quotes, such as '\"{number}\"'",
        )


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20


def _refuse_class(requested: Sequence[str], part: str, names: Sequence[str]) -> NoReturn:
    known = f"{nearest(part.strip(), names)}The checkpoint knows: {', '.join(names[:10])}" if names else ""
    raise ConfigError(
        f"--classes = {short_repr(','.join(requested))}",
        f"{short_repr(part)} is neither a label nor a range" + (", nor the name of a class" if names else ""),
        (known + (", ..." if len(names) > 10 else "") + "; or write " if names else "write ") + "0-9 or 1,5,7-9",
    )


def resized(config: ModelConfig, frames: int | None, size: str | None) -> ModelConfig:
    """Return ``config`` for samples with other ``frames`` or ``size`` ("HxW"); no weight depends on them."""
    if frames is None and size is None:
        return config
    default = config.sample_size
    if frames is not None and len(default) == 2:
        raise ConfigError(f"--frames = {short_repr(frames)}", "this model generates images, not videos", "leave it out")
    target = default[-2:] if size is None else _parse_size(size)
    if len(default) == 3:
        frames = default[0] if frames is None else whole_number("--frames", frames, 1, MOST_FRAMES)
        target = (frames, *target)
    try:
        predictor = config.predictor.resized(config.ae.latent_shape(target))
    except ConfigError as error:
        flag = "--frames" if "frames" in error.what or size is None else "--size"
        raise ConfigError(f"{flag} = {frames if flag == '--frames' else size}", error.reason, error.cure) from None
    _check_forward_fits(predictor, f"--size = {size}" if size is not None else f"--frames = {frames}")
    return dataclasses.replace(config, predictor=predictor)


def _check_forward_fits(predictor: PredictorConfig, what: str) -> None:
    """Raise ConfigError if the tokens of one sample alone take more than this machine's memory."""
    need, available = FORWARD_TENSORS * 4 * predictor.num_tokens * int(predictor.hidden_size), host_memory_bytes()
    if need > available:
        reason = f"a sample of {predictor.num_tokens:,} tokens needs {need / 2**30:,.1f} GiB"
        raise ConfigError(what, f"{reason}, and this machine has {available / 2**30:,.1f}", "generate smaller samples")


def _parse_size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise ConfigError(f"--size = {short_repr(text)}", "is not HEIGHTxWIDTH", "write 480x832")
    for side in (height, width):
        check_between("--size", int(side), 1, MOST_PIXELS)
    return int(height), int(width)
