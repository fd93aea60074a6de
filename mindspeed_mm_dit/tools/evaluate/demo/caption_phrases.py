"""Captions of the built-in digits, in many phrasings: "a handwritten seven", "the number 7", "a digit after six".

Training uses SEEN; samples for UNSEEN show whether a network has learned what captions mean, or only memorized them.
Some phrasings name a digit by its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm_dit.data.draws import philox

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
