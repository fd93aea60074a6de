"""Write the emoji of Noto Color Emoji to data/emoji, 32 x 32 on white, each with its Unicode name as its caption.

    sudo apt-get install fonts-noto-color-emoji
    pip install emoji
    python examples/dit/emoji/prepare.py [FONT]

The font is licensed under the SIL Open Font License 1.1. The names are CLDR's, from the package emoji (BSD).
seen.csv lists the emoji to learn from, unseen.csv those that are kept out: their words are learned from others, and no
picture shows these words together. Left out are those that no other emoji explains: flags, two people with a skin tone
each, and names with a word that no other name has ("robot").
"""

import csv
import re
import sys
import zlib
from collections import Counter
from pathlib import Path

import emoji
from PIL import Image, ImageDraw, ImageFont, features

FONT = Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FOLDER = Path("data/emoji")
UNSEEN = {
    "colour": r"(green|brown) heart|(orange|purple) circle|(red|blue) square|green book",
    "hour": r"(two|eight|ten) o'clock|(five|nine|eleven)-thirty",
    "gender": r"(woman (firefighter|detective|judge|surfing|cook|mage)|man (pilot|artist|farmer|rowing boat|scientist))"
    r"\b.*",
}
"""Beside one in three emoji with a skin tone. A woman's or man's kind of work is unseen in all skin tones."""


def kept_out(name: str) -> str:
    """Return why this emoji is kept out of training, or nothing."""
    for word, pattern in UNSEEN.items():
        if re.fullmatch(pattern, name):
            return word
    return "skin tone" if "skin tone" in name and zlib.crc32(name.encode()) % 3 == 0 else ""


def drawn(sequence: str, font: ImageFont.FreeTypeFont) -> Image.Image | None:
    """Draw an emoji; None if the font is older than it, and has no glyph for it or one for each of its parts."""
    image = Image.new("RGB", (136, 136), "white")
    ImageDraw.Draw(image).text((0, 4), sequence, font=font, embedded_color=True)
    one = font.getlength(sequence) == font.getlength("\N{GRINNING FACE}")
    return image.resize((32, 32), Image.Resampling.LANCZOS) if one and image.getextrema() != ((255, 255),) * 3 else None


def words_of(name: str) -> set[str]:
    """Return the words of a name."""
    return set(re.split(r"[\s-]+", name))


def main() -> None:
    """Write images and both lists."""
    if not FONT.is_file():
        sys.exit(f"{FONT} is missing: sudo apt-get install fonts-noto-color-emoji, or name the file of the font")
    if not features.check("raqm"):
        sys.exit("Pillow cannot join the parts of an emoji: sudo apt-get install libfribidi0")
    font = ImageFont.truetype(str(FONT), 109, layout_engine=ImageFont.Layout.RAQM)
    found = {}
    for sequence, about in emoji.EMOJI_DATA.items():
        name = about["en"].strip(":").replace("_", " ").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        flag = "\N{REGIONAL INDICATOR SYMBOL LETTER A}" <= sequence[0] <= "\N{REGIONAL INDICATOR SYMBOL LETTER Z}"
        whole = about["status"] == emoji.STATUS["fully_qualified"] and not flag and name.count("skin tone") < 2
        if whole and (image := drawn(sequence, font)):
            found[name] = sequence, image
    used = Counter(word for name in found for word in words_of(name))
    FOLDER.mkdir(parents=True, exist_ok=True)
    lists = {file: [("image_path", "caption", "unseen", "code")] for file in ("seen.csv", "unseen.csv")}
    for name, (sequence, image) in found.items():
        if min(used[word] for word in words_of(name)) > 1:
            image.save(FOLDER / f"{name}.png")
            why = kept_out(name)
            lists["unseen.csv" if why else "seen.csv"].append((f"{name}.png", name, why, str(ord(sequence[0]))))
    for file, rows in lists.items():
        with (FOLDER / file).open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows(rows)
        print(f"{FOLDER / file}: {len(rows) - 1:,} emoji")


main()
