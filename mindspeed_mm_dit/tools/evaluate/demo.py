"""Captions of the built-in digits, in many phrasings: "a handwritten seven", "the number 7", "a digit after six".

Training uses SEEN; samples for UNSEEN show whether a network has learned what captions mean, or only memorized them.
Some phrasings name a digit by its neighbour.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from mindspeed_mm_dit.configs.source import Shape
from mindspeed_mm_dit.data.builtin import BuiltinData, write_then_rename
from mindspeed_mm_dit.data.order import philox
from mindspeed_mm_dit.data.video_file import write_video
from mindspeed_mm_dit.errors import not_installed

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONS_EACH = 6
"""Captions of an image; a batch gets one of them, drawn at random."""
SEEN = (
    *("{word}", "a {word}", "a handwritten {word}", "the digit {word}", "the number {word}", "the figure {word}"),
    *("a photo of the number {word}", "an image of a {word}", "this is a {word}", "somebody wrote a {word}"),
    *("the number {word}, written by hand", "a pixelated {word}", "a {word} drawn in ink", "please draw a {word}"),
    *("handwriting: {word}", "one can read a {word} here", "a scanned {word} from a form", "a white {word} on black"),
    *("a low resolution picture of the digit {word}", "the word says {word}"),
    *("{numeral}", "a {numeral}", "a handwritten {numeral}", "the digit {numeral}", "the number {numeral}"),
    *("the figure {numeral}", "an image of a {numeral}", "this is a {numeral}", "digit {numeral}", "write {numeral}"),
    *("a grey {numeral} on a dark ground", "number {numeral}, by hand", "someone's {numeral}", "label: {numeral}"),
    *("a scan of the digit {numeral}", "a blurry {numeral}", "class {numeral}", "it reads {numeral}"),
    *("a digit after {before}", "the number that comes after {before}", "one more than {before}", "{before} plus one"),
    *("the digit that follows {before}", "what you count after {before}", "the successor of {before}"),
    *("a digit before {after}", "the number that comes before {after}", "one less than {after}", "{after} minus one"),
    *("the digit that precedes {after}", "what you count before {after}", "the predecessor of {after}"),
)
UNSEEN = (
    *("a {word} scribbled with a pen", "show me the digit {word}", "I would like to see a {word}"),
    *("a child's drawing of the number {word}", "the symbol for {word}", "an old postcard with a {word} on it"),
    *("could you paint a {word}?", "a tiny picture with the number {word} in the middle"),
    *("a {numeral} scribbled with a pen", "show me a {numeral}", "the character {numeral}", "{numeral}, please"),
    *("I want the number {numeral}", "a handwriting sample of {numeral}", "picture of numeral {numeral}"),
    *("the next digit after {before}", "the number right after {before}", "{before} and one more"),
    *("the number just before {after}", "the digit directly in front of {after}"),
)


def captions_of(digit: int, patterns: Sequence[str]) -> list[str]:
    """Return the captions of ``digit`` from ``patterns``; zero has no digit before it, nine none after it."""
    words = {"word": NAMES[digit], "numeral": str(digit)}
    words |= {"before": NAMES[digit - 1]} if digit > 0 else {}
    words |= {"after": NAMES[digit + 1]} if digit < 9 else {}
    fitting = [pattern for pattern in patterns if all("{" + key not in pattern or key in words for key in _KEYS)]
    captions = (f" {pattern.format(**words)}" for pattern in fitting)
    return [caption.replace(" a eight", " an eight").replace(" a 8", " an 8")[1:] for caption in captions]


_KEYS = ("word", "numeral", "before", "after")


def draw_captions(number: int, digit: int) -> list[str]:
    """Draw CAPTIONS_EACH distinct captions for image ``number``, which shows ``digit``."""
    offered = captions_of(digit, SEEN)
    chosen = philox((0, 2), (0, 0, number, 0)).choice(len(offered), CAPTIONS_EACH, replace=False)
    return [offered[index] for index in chosen.tolist()]


DIGIT_OF = {caption: digit for digit in range(10) for caption in captions_of(digit, SEEN + UNSEEN)}
"""The digit that each caption describes."""


INVERTED_EACH = 4
CANVASES, OFFSET_STEP = ((12, 12), (8, 16), (16, 8)), 4
"""For digits on rectangles: (H, W) of each canvas, and the pixels between two possible offsets of a digit."""


class Digits(NamedTuple):
    """Handwritten digits."""

    images: Any
    """(N, 8, 8) float64, whole numbers from 0 to 16; when written, N images of any size, uint8."""
    labels: np.ndarray
    """(N,) int64."""


def read_digits() -> Digits:
    """Return scikit-learn's 1,797 digits, read from its data file: importing scikit-learn would take half a second.

    Raises:
        PlatformError: it is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise not_installed("dataset_param.source", "scikit-learn", "scores")
    with gzip.open(Path(package.origin).parent / "datasets/data/digits.csv.gz", "rt", encoding="utf-8") as file:
        rows = np.array([line.split(",") for line in file], np.float64)
    return Digits(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64))


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits (8 x 8, grey, classes 0-9) and labels.csv to ``folder``.

    Pixel values 0 ... 16 become 0 ... 255. The folder is written aside and renamed, so if it exists it is complete.
    """
    _write_images(folder, _pixels())


def write_captioned_digits(folder: Path) -> None:
    """Write the same images with captions.csv, which has CAPTIONS_EACH lines per image, each with a caption.

    The phrasings of an image are drawn by its number, from those seen in training.
    """
    _write_images(folder, _pixels(), "captions.csv", draw_captions)


def write_inverted_digits(folder: Path) -> None:
    """Write the first INVERTED_EACH images of each digit, black on white, with labels.csv: a set to fine-tune on."""
    pixels, labels = _pixels()
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:INVERTED_EACH] for label in range(10)]))
    _write_images(folder, Digits(255 - pixels[chosen], labels[chosen]))


def write_digits_buckets(folder: Path) -> None:
    """Write the same digits with labels.csv, each on one of CANVASES in turn, at a random offset by its number."""
    pixels, labels = _pixels()
    _write_images(folder, Digits([_placed(number, image) for number, image in enumerate(pixels)], labels))


def _placed(number: int, digit: np.ndarray) -> np.ndarray:
    """Return a black canvas with ``digit`` (8, 8) on it, offset from its corner by multiples of PLACE."""
    canvas = np.zeros(CANVASES[number % len(CANVASES)], np.uint8)
    draw = philox((0, 3), (0, 0, number, 0))
    row, column = (OFFSET_STEP * int(draw.integers((side - 8) // OFFSET_STEP + 1)) for side in canvas.shape)
    canvas[row : row + 8, column : column + 8] = digit
    return canvas


def _pixels() -> Digits:
    """Return the digits as images, (N, 8, 8) uint8."""
    digits = read_digits()
    return Digits(np.round(digits.images * (255 / 16)).astype(np.uint8), digits.labels)


def _write_images(
    folder: Path, digits: Digits, index: str = "labels.csv", captions: Callable[[int, int], list[str]] | None = None
) -> None:
    """Write the images and ``index``; ``captions``: (number of an image, its label) -> its captions, a line each."""
    with write_then_rename(folder) as aside:
        for label in range(10):
            (aside / str(label)).mkdir(parents=True, exist_ok=True)
        with open(aside / index, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["image_path", "label", *(["caption"] if captions else [])])
            for number, (image, label) in enumerate(zip(digits.images, digits.labels.tolist())):
                path = f"{label}/{number:04d}.png"
                Image.fromarray(image).save(aside / path)
                caption_columns = [[caption] for caption in captions(number, label)] if captions else [[]]
                writer.writerows([path, label, *words] for words in caption_columns)


DIGITS = BuiltinData(write_digits, num_images=1797, num_classes=10)
CAPTIONED_DIGITS = BuiltinData(write_captioned_digits, num_images=1797, num_classes=10)
INVERTED_DIGITS = BuiltinData(write_inverted_digits, num_images=10 * INVERTED_EACH, num_classes=10)
DIGITS_BUCKETS = BuiltinData(write_digits_buckets, num_images=1797, num_classes=10)


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
        **{"architectures": ["UMT5EncoderModel"], "model_type": "umt5", "vocab_size": len(vocabulary)},
        **{"d_model": WIDTH, "num_heads": HEADS, "d_kv": HEAD_WIDTH, "d_ff": HIDDEN, "num_layers": LAYERS},
        **{"relative_attention_num_buckets": BUCKETS, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0},
        **{"is_encoder_decoder": True, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        "dtype": "float32",
    }
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


NUM_CLIPS = 1000
CANVAS, NUM_FRAMES, FPS = 48, 9, 8
"""Height and width in pixels; frames of a clip; frames per second."""
SHAPE = (NUM_FRAMES, CANVAS, CANVAS)
"""(F, H, W) of ``moving_digits``."""
SHAPES = tuple((frames, *size) for frames in (NUM_FRAMES, 17) for size in ((CANVAS, CANVAS), (32, 64), (64, 32)))
"""The shapes of ``moving_digits_buckets``. Along an axis where the canvas is no larger than a digit, none moves."""
ZOOM = 4
"""Pixels of a clip per pixel of a digit, in height and width."""
LIGHT = 20
"""Levels, of 255, that the canvas gains along frames, rows and columns each; all three add up to less than ink."""
OFFSETS = (0, CANVAS - 8 * ZOOM)
"""Rows in which a digit moves left or right, columns for up and down: few, so that little data suffices."""
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Steps (rows, columns) of each word."""
CAPTIONS = tuple(f"a {name} moves {direction}" for name in NAMES for direction in DIRECTIONS)
"""Every possible caption."""
HELD_OUT = ("a zero moves left", "a three moves right", "a five moves up", "a eight moves down")
"""Captions without a clip, though each of their words occurs in others."""


def write_moving_digits(folder: Path, shapes: Sequence[Shape] = (SHAPE,)) -> None:
    """Write NUM_CLIPS clips, their annotation, and a text encoder to ``folder``, which must not exist.

    shapes: each clip gets a random one, by its number.
    A given version of PyAV writes the same files each time. The folder is written aside and renamed, so if it exists it
    is complete.
    """
    digits = read_digits()
    entries = []
    with write_then_rename(folder) as aside:
        (aside / "videos").mkdir(parents=True)
        for number, (image, digit) in enumerate(zip(digits.images[:NUM_CLIPS], digits.labels)):
            shape = shapes[philox((0, 4), (0, 0, number, 0)).integers(len(shapes))]
            caption, direction, offset = _draw(number, NAMES[digit], shape)
            path = f"videos/{number:04d}.mp4"
            write_video(aside / path, moving(image, direction, offset, shape), FPS)
            entry = {"path": path, "cap": caption, "num_frames": shape[0], "fps": FPS}
            entries.append({**entry, "resolution": {"height": shape[1], "width": shape[2]}, "label": int(digit)})
        (aside / "annotation.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        write_tokenizer(aside / "tokenizer", CAPTIONS)
        write_text_encoder(aside / "text_encoder", aside / "tokenizer")


def _draw(number: int, name: str, shape: Shape = SHAPE) -> tuple[str, str, int]:
    """Draw caption and direction of a clip of the digit ``name``, and the row or column that it moves in."""
    directions = [
        direction
        for direction, step in DIRECTIONS.items()
        if f"a {name} moves {direction}" not in HELD_OUT and np.dot(np.abs(step), _travel(shape))
    ]
    generator = philox((0, 0), (0, 0, number, 0))
    direction = directions[generator.integers(len(directions))]
    across = _travel(shape)[DIRECTIONS[direction][0] != 0]
    return f"a {name} moves {direction}", direction, min(int(generator.choice(OFFSETS)), across)


def _travel(shape: Shape) -> tuple[int, int]:
    """Return how many pixels a digit can move, in rows and columns."""
    return shape[1] - 8 * ZOOM, shape[2] - 8 * ZOOM


def moving(image: np.ndarray, direction: str, offset: int, shape: Shape = SHAPE) -> np.ndarray:
    """Return frames (F, H, W, 3) uint8 of a moving digit (8, 8), levels 0 ... 16, drawn four times as large.

    offset: 0 ... 16, its row for left and right, its column for up and down.
    """
    digit = np.round(np.kron(image, np.ones((ZOOM, ZOOM))) * (255 / 16)).astype(np.uint8)
    step, size = DIRECTIONS[direction], len(digit)
    frames = _light(shape).copy()
    for number, frame in enumerate(frames):
        along = number / (len(frames) - 1)
        row, column = (_offset_along(sign, along, offset, travel) for sign, travel in zip(step, _travel(shape)))
        region = frame[row : row + size, column : column + size]
        np.maximum(region, digit[:, :, None], out=region)
    return frames


@cache
def _light(shape: Shape) -> np.ndarray:
    """Return the empty canvas (F, H, W, 3) uint8: brighter to the right, downwards and with time."""
    along_f, along_h, along_w = (np.linspace(0, LIGHT, size) for size in shape)
    levels = along_f[:, None, None] + along_h[:, None] + along_w  # (F, H, W)
    return np.repeat(np.round(levels).astype(np.uint8)[..., None], 3, 3)


def _offset_along(sign: int, along: float, offset: int, travel: int) -> int:
    """Return a digit's offset on one axis after the fraction ``along`` of its ``travel``; sign: -1, 0 or 1."""
    if sign == 0:
        return offset
    return round(along * travel if sign > 0 else (1 - along) * travel)


MOVING_DIGITS = BuiltinData(write_moving_digits)
MOVING_DIGITS_BUCKETS = BuiltinData(partial(write_moving_digits, shapes=SHAPES))
