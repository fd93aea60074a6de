"""Weights that are stored in few bits: what the bits stand for, defined once for NumPy and for PyTorch.

A format stores a weight of n numbers in *parts*, arrays by name; all numbers are computed in float32:

    nf4     codes uint8 (n / 2,): two a byte, the first in the high half; absmax (n / 64,): w = table[code] absmax
            (Dettmers et al. 2023, arXiv 2305.14314). Blocks of 64 run over the flat weight, across rows. Double
            quantisation stores absmax as uint8: absmax = map[code] scale[block of 256] + offset
    fp8     codes uint8: bits of float8 e4m3 or e5m2; scale, of the whole weight, of each row, or of square blocks:
            w = code scale
    int8    codes int8; scale as for fp8. zero (out, 1), if there is one, is subtracted from the codes. If rotated,
            groups of inputs are multiplied by a Hadamard matrix (ConvRot)
    bf16    codes uint8 (2 n,): the upper halves of float32
    f16     codes uint8 (2 n,): float16
    q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k     codes uint8 (blocks, bytes of a block), as in GGUF files (llama.cpp)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mindspeed_mm_dit.framework.safetensors_file import widen as widen_float

Array = Any

WIDENED_AT_ONCE = 2**22
"""Numbers that a product on PyTorch widens at once: temporary tensors take about 10 bytes for each."""
BLOCK = 64
"""Numbers that share a scale in nf4 here; files may have other blocks."""
# The quantiles of a normal distribution that bitsandbytes rounds to (Dettmers et al. 2023, appendix E).
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip
_ROTATION = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32) / 2


class Arrays(NamedTuple):
    """What formulas need of an array library; the rest (slices, shifts, products, reshape) NumPy and PyTorch share."""

    float32: Callable[[Array], Array]
    """Numbers -> float32."""
    view: Callable[[Array, str], Array]
    """(bytes (..., n), "int8", "float16", "bfloat16" or a float8) -> what they stand for, as they lie; not float32."""
    take: Callable[[Array, Array], Array]
    """(table, integers) -> rows of the table."""
    concatenate: Callable[[list[Array], int], Array]
    constant: Callable[[np.ndarray, Array], Array]
    """(array, like) -> the array where ``like`` is."""


def _view(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype in ("int8", "float16"):
        return np.ascontiguousarray(array).view(dtype)
    bits = np.ascontiguousarray(array).view(np.uint16) if dtype == "bfloat16" else array
    return widen_float(bits, dtype)


NUMPY = Arrays(
    lambda array: array.astype(np.float32, copy=False),
    _view,
    lambda table, codes: table[codes],
    np.concatenate,
    lambda array, like: array,
)


_TABLES = ("table", "nested_map")
"""Parts that belong to every number."""


def _rows_of_part(part: Array, name: str, begin: int, end: int, rows: int) -> Array:
    """Return what belongs to the rows from ``begin`` to ``end`` of a weight of ``rows``."""
    count = math.prod(part.shape)
    if name in _TABLES or count == 1:
        return part
    if part.shape[0] == rows:
        return part[begin:end]
    return part.reshape(-1)[count * begin // rows : count * end // rows]


@dataclass(frozen=True)
class LowBitWeight:
    """A weight as it is stored; its parts are arrays of NumPy, or tensors."""

    format: str
    """A key of ``FORMATS``."""
    shape: tuple[int, ...]
    parts: Mapping[str, Array]
    options: tuple[tuple[str, Any], ...] = ()
    """Settings of the format, by name: ``dtype`` of fp8, ``rotation`` of int8 and fp8, ``block`` of nf4, ``square``:
    side of the blocks that share a scale."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(int(part.nbytes) for part in self.parts.values())

    @property
    def bytes_of_numbers(self) -> int:
        """Bytes of the parts that grow with the weight: of all but tables."""
        return sum(int(part.nbytes) for name, part in self.parts.items() if name not in _TABLES)

    @property
    def _block(self) -> int:
        """Numbers that only go together."""
        options = dict(self.options)
        if self.format == "nf4":
            return int(options.get("block", BLOCK) * options.get("nested_block", 1))
        if "square" in options:
            return int(options["square"] * math.prod(self.shape[1:]))
        return FORMATS[self.format].numbers_of_block or 1

    def rows(self, begin: int, end: int) -> LowBitWeight | None:
        """Return the rows from ``begin`` to ``end`` as they are stored; None if a block of the format crosses them."""
        rows, block, numbers = self.shape[0], self._block, math.prod(self.shape)
        in_row = numbers // max(rows, 1)
        if numbers % block or begin * in_row % block or end * in_row % block:
            return None
        parts = {name: _rows_of_part(part, name, begin, end, rows) for name, part in self.parts.items()}
        return replace(self, shape=(end - begin, *self.shape[1:]), parts=parts)

    def widened(self, library: Arrays = NUMPY) -> Array:
        """Return the weight, float32 of ``shape``."""
        return FORMATS[self.format].widen(self.parts, self.shape, dict(self.options), library)


class StoredArray(NDArrayOperatorsMixin):
    """A weight of a file as an array of float32 that is widened whenever its numbers are used, and not before.

    Some of its rows stay as they are stored, where blocks of the format do not cross rows.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, stored: LowBitWeight) -> None:
        self.stored, self.shape = stored, tuple(stored.shape)
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = 4 * self.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.stored.widened().astype(np.float32 if dtype is None else dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        wide = (np.asarray(each) if isinstance(each, StoredArray) else each for each in inputs)
        return getattr(ufunc, method)(*wide, **options)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.step in (None, 1) and self.ndim == 2:
            part = self.stored.rows(*key.indices(len(self))[:2])
            if part is not None:
                return StoredArray(part)
        return np.asarray(self)[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "stored":
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def as_stored(array: np.ndarray | StoredArray) -> LowBitWeight | None:
    """Return an array of fewer bits than float32 as it is stored; None if it is another."""
    if isinstance(array, StoredArray):
        return array.stored
    if array.dtype == np.float16:
        return LowBitWeight("f16", array.shape, {"codes": np.ascontiguousarray(array).reshape(-1).view(np.uint8)})
    return None


def split_rows(array: Any, ends: Iterable[int]) -> list[Any]:
    """Return the rows of an array before, between and after ``ends``, as they are stored where blocks allow."""
    begins = [0, *ends]
    parts = [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(array)])]
    if isinstance(array, StoredArray) and not isinstance(array[parts[0]], StoredArray):
        array = np.asarray(array)  # (once for all parts)
    return [array[rows] for rows in parts]


def join_rows(arrays: Sequence[Any]) -> Any:
    """Return arrays on top of each other: as they are stored where they share a format, else as numbers."""
    stored = [array.stored for array in arrays if isinstance(array, StoredArray)]
    joined = _joined(stored) if len(stored) == len(arrays) else None
    return np.concatenate([np.asarray(array) for array in arrays]) if joined is None else StoredArray(joined)


def _joined(weights: Sequence[LowBitWeight]) -> LowBitWeight | None:
    first, rows = weights[0], sum(weight.shape[0] for weight in weights)
    kind = lambda w: (w.format, w.options, w.parts.keys(), w.shape[1:])  # noqa: E731
    if any(kind(w) != kind(first) or math.prod(w.shape) % w._block for w in weights):
        return None
    parts: dict[str, Array] = {}
    for name, part in first.parts.items():
        each = [weight.parts[name] for weight in weights]
        is_scale = name == "scale" and "square" not in dict(first.options)
        if (name in _TABLES or (is_scale and part.size == 1)) and all(np.array_equal(other, part) for other in each):
            parts[name] = part
        elif name in _TABLES:
            return None
        else:
            sides = [(w.shape[0], *(1 for _ in w.shape[1:])) for w in weights]
            each = [np.broadcast_to(s, side) if is_scale and s.size == 1 else s for s, side in zip(each, sides)]
            parts[name] = np.concatenate(each)
    return replace(first, shape=(rows, *first.shape[1:]), parts=parts)


def num_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a weight (out, in) that :func:`quantized` brings into the format ``name``."""
    numbers, rows = math.prod(shape), shape[0]
    return {
        "nf4": -(-numbers // 2) + 4 * -(-numbers // BLOCK) + NF4.nbytes,
        "fp8": numbers + 4,
        "int8": numbers + 4 * rows,
        "bf16": 2 * numbers,
    }[name]


def rotation_matrix(size: int) -> np.ndarray:
    """Return the symmetric orthogonal matrix (size, size) that ConvRot multiplies groups of inputs by.

    ``size`` is a power of 4; the matrix is its own inverse.
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.kron(matrix, _ROTATION)
    return matrix


def _widen_scaled(parts: Mapping[str, Array], shape: tuple[int, ...], options: dict[str, Any], lib: Arrays) -> Array:
    codes = parts["codes"]
    if "dtype" in options:
        codes = lib.view(codes, options["dtype"])
    weight = lib.float32(codes).reshape(shape)
    if "zero" in parts:
        weight = weight - parts["zero"]
    if "scale" in parts:
        square = options.get("square")
        weight = weight * (_of_squares(parts["scale"], shape, square, lib) if square else parts["scale"])
    if rotation := options.get("rotation", 0):
        matrix = lib.constant(rotation_matrix(rotation), weight)
        weight = (weight.reshape(-1, rotation) @ matrix).reshape(shape)
    return weight


def _of_squares(scale: Array, shape: tuple[int, ...], side: int, lib: Arrays) -> Array:
    """Return the scales of square blocks, of any shape, as those of each number of a weight (out, in)."""
    scale = scale.reshape(-1, -(-shape[1] // side))
    for length in shape:  # (repeats rows, then columns)
        scale = lib.take(scale, lib.constant(np.arange(length) // side, scale)).T
    return scale


def _widen_f16(parts: Mapping[str, Array], shape: tuple[int, ...], options: dict[str, Any], lib: Arrays) -> Array:
    return lib.float32(lib.view(parts["codes"], "float16")).reshape(shape)


def _widen_bf16(parts: Mapping[str, Array], shape: tuple[int, ...], options: dict[str, Any], lib: Arrays) -> Array:
    return lib.float32(lib.view(parts["codes"], "bfloat16")).reshape(shape)


def _widen_nf4(parts: Mapping[str, Array], shape: tuple[int, ...], options: dict[str, Any], lib: Arrays) -> Array:
    block, table, codes = options.get("block", BLOCK), parts["table"], parts["codes"]
    absmax = parts["absmax"]
    if "nested_absmax" in parts:
        nested = parts["nested_absmax"][:, None]
        absmax = _by_block(lib.take(parts["nested_map"], absmax), options["nested_block"], lib) * nested
        absmax = absmax.reshape(-1)[: len(parts["absmax"])] + options["offset"]
    pairs = lib.take(_pairs(table, lib), codes.reshape(-1))  # (n / 2, 2)
    return (
        (_by_block(pairs.reshape(-1), block, lib) * absmax[:, None]).reshape(-1)[: int(np.prod(shape))].reshape(shape)
    )


def _pairs(table: Array, lib: Arrays) -> Array:
    """Return the two numbers of each byte, (256, 2): a lookup of bytes needs half the indices of one of codes."""
    byte = np.arange(256)
    return lib.take(table, lib.constant(np.stack([byte >> 4, byte & 15], 1), table))


def _by_block(numbers: Array, block: int, lib: Arrays) -> Array:
    """Return the numbers in rows of ``block``; the last is filled with zeros."""
    missing = -len(numbers) % block
    if missing:
        numbers = lib.concatenate([numbers, 0 * numbers[:1].repeat(missing)], 0)
    return numbers.reshape(-1, block)


def _halves(codes: Array, lib: Arrays) -> Array:
    """Return the low halves of the bytes of each block (..., n), then the high ones: (..., 2 n)."""
    return lib.concatenate([codes & 15, codes >> 4], -1)


def _fifth_bits(codes: Array, lib: Arrays) -> Array:
    """Return the bits of (blocks, 4) bytes, lowest first: (blocks, 32)."""
    shifts = lib.constant(np.arange(8, dtype=np.uint8), codes)
    return ((codes[:, :, None] >> shifts) & 1).reshape(-1, 32)


def _q8_0(b: Array, lib: Arrays) -> Array:
    return _half(b, 0, lib) * lib.float32(lib.view(b[:, 2:], "int8"))


def _q4_0(b: Array, lib: Arrays) -> Array:
    return _half(b, 0, lib) * (lib.float32(_halves(b[:, 2:], lib)) - 8)


def _q4_1(b: Array, lib: Arrays) -> Array:
    return _half(b, 0, lib) * lib.float32(_halves(b[:, 4:], lib)) + _half(b, 2, lib)


def _q5_0(b: Array, lib: Arrays) -> Array:
    codes = _halves(b[:, 6:], lib) | (_fifth_bits(b[:, 2:6], lib) << 4)
    return _half(b, 0, lib) * (lib.float32(codes) - 16)


def _q5_1(b: Array, lib: Arrays) -> Array:
    codes = _halves(b[:, 8:], lib) | (_fifth_bits(b[:, 4:8], lib) << 4)
    return _half(b, 0, lib) * lib.float32(codes) + _half(b, 2, lib)


def _half(b: Array, at: int, lib: Arrays) -> Array:
    """Return the float16 at a byte of each block, (blocks, 1) float32."""
    return lib.float32(lib.view(b[:, at : at + 2], "float16"))


def _scales_of_6_bits(b: Array, lib: Arrays) -> tuple[Array, Array]:
    """Return the scales s and minima t (blocks, 8) in the 12 bytes of Q4_K and Q5_K, times the block's d and m."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    s = lib.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    t = lib.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return _half(b, 0, lib) * lib.float32(s), _half(b, 2, lib) * lib.float32(t)


def _q4_k(b: Array, lib: Arrays) -> Array:
    s, t = _scales_of_6_bits(b, lib)
    codes = _halves(b[:, 16:].reshape(-1, 4, 32), lib).reshape(-1, 8, 32)
    return s[:, :, None] * lib.float32(codes) - t[:, :, None]


def _q5_k(b: Array, lib: Arrays) -> Array:
    s, t = _scales_of_6_bits(b, lib)
    shifts = lib.constant(np.arange(8, dtype=np.uint8)[:, None], b)
    codes = _halves(b[:, 48:].reshape(-1, 4, 32), lib).reshape(-1, 8, 32)
    codes = codes | (((b[:, None, 16:48] >> shifts) & 1) << 4)
    return s[:, :, None] * lib.float32(codes) - t[:, :, None]


def _q6_k(b: Array, lib: Arrays) -> Array:
    low, high, scales = b[:, :128].reshape(-1, 2, 64), b[:, 128:192].reshape(-1, 2, 1, 32), b[:, 192:208]
    shifts = lib.constant(np.array([0, 2, 4, 6], np.uint8)[:, None], b)
    codes = _halves(low, lib).reshape(-1, 2, 4, 32) | (((high >> shifts) & 3) << 4)  # runs of 32
    numbers = (lib.float32(codes) - 32).reshape(-1, 16, 16)
    return _half(b, 208, lib)[:, :, None] * lib.float32(lib.view(scales, "int8"))[:, :, None] * numbers


class Format(NamedTuple):
    """How a weight is stored."""

    widen: Callable[[Mapping[str, Array], tuple[int, ...], dict[str, Any], Arrays], Array]
    """(parts, shape, options, library) -> the weight, float32."""
    bytes_of_block: int = 0
    """Of a type of GGUF."""
    numbers_of_block: int = 0
    """Of a type of GGUF; rows consist of whole blocks."""


def _gguf(decode: Callable[[Array, Arrays], Array], num_bytes: int, numbers: int) -> Format:
    def widen(parts: Mapping[str, Array], shape: tuple[int, ...], options: dict[str, Any], lib: Arrays) -> Array:
        return decode(parts["codes"].reshape(-1, num_bytes), lib).reshape(shape)

    return Format(widen, num_bytes, numbers)


FORMATS = {
    "nf4": Format(_widen_nf4),
    "fp8": Format(_widen_scaled),
    "int8": Format(_widen_scaled),
    "bf16": Format(_widen_bf16),
    "f16": Format(_widen_f16),
    "q8_0": _gguf(_q8_0, 34, 32),
    "q4_0": _gguf(_q4_0, 18, 32),
    "q4_1": _gguf(_q4_1, 20, 32),
    "q5_0": _gguf(_q5_0, 22, 32),
    "q5_1": _gguf(_q5_1, 24, 32),
    "q4_k": _gguf(_q4_k, 144, 256),
    "q5_k": _gguf(_q5_k, 176, 256),
    "q6_k": _gguf(_q6_k, 210, 256),
}


# --- quantise ---------------------------------------------------------------------------------------------------------


_CHUNK = 2**16
"""Numbers that stay in a processor's cache."""


def quantized(weight: np.ndarray, name: str) -> LowBitWeight:
    """Return a weight (out, in) in the format ``name``, "nf4", "fp8", "int8" or "bf16", each number the nearest.

    nf4 has blocks of 64, as bitsandbytes; int8 a scale for each row; fp8 (e4m3) one for the weight, as ComfyUI.
    """
    return _QUANTIZE[name](np.ascontiguousarray(weight, np.float32))


def _to_nf4(weight: np.ndarray) -> LowBitWeight:
    blocks = _by_block(weight.reshape(-1), BLOCK, NUMPY)
    absmax = np.abs(blocks).max(1)
    relative = blocks / np.maximum(absmax, np.finfo(np.float32).tiny)[:, None]
    codes = _by_chunks(_number_above, relative.reshape(-1), (NF4[1:] + NF4[:-1]) / 2)
    packed = (codes[::2] << 4) | codes[1::2]
    return LowBitWeight("nf4", weight.shape, {"codes": packed[: -(-weight.size // 2)], "absmax": absmax, "table": NF4})


def _by_chunks(codes: Callable[[np.ndarray, Any], np.ndarray], numbers: np.ndarray, how: Any) -> np.ndarray:
    """Return ``codes`` (numbers, how) -> uint8 of all ``numbers``, computed in a processor's cache."""
    chunks = (numbers[begin : begin + _CHUNK] for begin in range(0, len(numbers), _CHUNK))
    return np.concatenate([codes(chunk, how) for chunk in chunks] or [np.zeros(0, np.uint8)])


def _number_above(numbers: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return how many of a few ``bounds`` are below each of the numbers: many times faster than a search."""
    counts = np.zeros(len(numbers), np.uint8)
    for bound in bounds:
        counts += numbers > bound
    return counts


def _fp8_codes(numbers: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return the nearest e4m3 of positive numbers over ``scale``; ties to even."""
    relative = numbers / scale
    bits = relative.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - np.uint32((127 - 7) << 3)
    small = np.rint(np.minimum(relative, 1) * np.float32(2**9)).astype(np.uint32)  # (below 2^-6, steps are equal)
    return np.minimum(np.where(relative < np.float32(2**-6), small, normal), 126).astype(np.uint8)


def _to_int8(weight: np.ndarray) -> LowBitWeight:
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    codes = np.rint(weight / np.maximum(scale, np.finfo(np.float32).tiny)).astype(np.int8)
    return LowBitWeight("int8", weight.shape, {"codes": codes, "scale": scale})


def _to_fp8(weight: np.ndarray) -> LowBitWeight:
    scale = np.abs(weight).max() / np.float32(448)
    code = _by_chunks(_fp8_codes, np.abs(weight).reshape(-1), max(scale, np.finfo(np.float32).tiny))
    code = code.reshape(weight.shape)
    codes = code | (np.signbit(weight).astype(np.uint8) << 7)
    return LowBitWeight(
        "fp8", weight.shape, {"codes": codes, "scale": np.float32(scale)}, (("dtype", "float8_e4m3fn"),)
    )


def _to_bf16(weight: np.ndarray) -> LowBitWeight:
    bits = weight.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # (to the nearest, ties to even)
    return LowBitWeight("bf16", weight.shape, {"codes": rounded.view(np.uint8).reshape(-1)})


_QUANTIZE: dict[str, Callable[[np.ndarray], LowBitWeight]] = {
    "nf4": _to_nf4,
    "fp8": _to_fp8,
    "int8": _to_int8,
    "bf16": _to_bf16,
}
