"""Small colour profiles (ICC version 2), and what they mean in sRGB by the arithmetic of the standards."""

import struct

import numpy as np

WHITE = np.array([0.9642, 1.0, 0.8249])  # D50, to which the colours of all profiles are adapted
SRGB = np.array([[0.4361, 0.3851, 0.1431], [0.2225, 0.7169, 0.0606], [0.0139, 0.0971, 0.7141]])
WIDE = np.array([[0.6097, 0.2053, 0.1492], [0.3111, 0.6257, 0.0632], [0.0195, 0.0609, 0.7446]])
"""XYZ of red, green and blue in columns: sRGB's, and those of Adobe RGB (1998)."""


def profile(space: bytes, pcs: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A profile of pixels in ``space`` with the given tags beside those that each profile has."""
    named = b"desc" + bytes(4) + struct.pack(">I", 5) + b"ours\0" + bytes(78)
    own = {b"desc": named, b"cprt": b"text" + bytes(4) + b"ours\0"}
    table, body, tags = b"", b"", {**own, b"wtpt": xyz(WHITE), **tags}
    for name, content in tags.items():
        table += struct.pack(">4sII", name, 132 + 12 * len(tags) + len(body), len(content))
        body += content.ljust(-(-len(content) // 4) * 4, b"\0")
    rest = struct.pack(">I", len(tags)) + table + body
    kind = b"prtr" if space == b"CMYK" else b"mntr"
    head = struct.pack(">I4sI4s4s4s", 128 + len(rest), bytes(4), 0x02100000, kind, space, pcs)
    head = head.ljust(36, b"\0") + b"acsp"
    return head.ljust(68, b"\0") + xyz(WHITE)[8:] + bytes(48) + rest


def xyz(values: np.ndarray) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))


def curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def of_rgb(primaries: np.ndarray, gamma: float) -> bytes:
    """A profile of RGB: light is each level to the power of ``gamma``."""
    columns = {name + b"XYZ": xyz(column) for name, column in zip((b"r", b"g", b"b"), primaries.T)}
    return profile(b"RGB ", b"XYZ ", {**columns, **{name + b"TRC": curve(gamma) for name in (b"r", b"g", b"b")}})


def of_grey(gamma: float) -> bytes:
    return profile(b"GRAY", b"XYZ ", {b"kTRC": curve(gamma)})


def of_inks(lab: np.ndarray) -> bytes:
    """A profile of CMYK: ``lab`` (2, 2, 2, 2, 3) are the colours of no and full ink of C, M, Y and K."""
    levels = np.round(np.asarray(lab) * [2.55, 1, 1] + [0, 128, 128]).astype(np.uint8)
    ramp = bytes(range(256))
    table = struct.pack(">4s4xBBBx9i", b"mft1", 4, 3, 2, *(65536 if n % 4 == 0 else 0 for n in range(9)))
    return profile(b"CMYK", b"Lab ", {b"A2B0": table + 4 * ramp + levels.tobytes() + 3 * ramp})


def in_srgb(levels: tuple[int, ...], primaries: np.ndarray, gamma: float) -> np.ndarray:
    """The levels of sRGB for the colour that ``levels`` of ``primaries`` and ``gamma`` are."""
    light = np.linalg.inv(SRGB) @ primaries @ ((np.array(levels) / 255) ** gamma)
    light = np.clip(light, 0, 1)
    return 255 * np.where(light < 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
