"""PyTorch's zip files (``.pt``, ``.pth``, ``.bin``) as nested dicts of arrays, read and written without PyTorch.

The file is a zip archive: ``*/data.pkl`` is a pickle in which each tensor is a call that names a storage,
and ``*/data/<key>`` holds the bytes of that storage.
"""

from __future__ import annotations

import io
import lzma
import math
import pickle
import pickletools
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_unfolded, error_text
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import STORED, widen

_DTYPES = {
    **{"DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": STORED["bfloat16"]},
    **{"LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "<i1", "ByteStorage": "<u1"},
    **{"BoolStorage": "?", "ComplexFloatStorage": "<c8", "ComplexDoubleStorage": "<c16", "UntypedStorage": "<u1"},
}
_BITS = ("BFloat16Storage", "UntypedStorage")
"""Storages whose numbers NumPy does not show as they are."""
_LATER_DTYPES = {"uint16": "<u2", "uint32": "<u4", "uint64": "<u8", **STORED}
"""Dtypes for which PyTorch has no storage: they are named next to an UntypedStorage."""
_PLAIN_MODULES = {
    *("_codecs", "argparse", "collections", "copy_reg", "copyreg", "dataclasses", "datetime", "decimal", "enum"),
    *("fractions", "functools", "numbers", "pathlib", "random", "types", "typing", "uuid", "zoneinfo"),
}
_PLAIN_BUILTINS = {
    *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "getattr", "int", "list", "long"),
    *("object", "range", "set", "slice", "str", "tuple", "unicode", "xrange"),
}
"""Python's own modules and built-ins that a checkpoint may name besides its weights; the others could only do harm."""


_NO_ZIP = (OSError, RuntimeError, ValueError, LookupError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What a damaged zip file raises."""
_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, TypeError, ValueError, AttributeError, LookupError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""What a damaged pickle raises."""


class _Storage(NamedTuple):
    """A flat run of numbers; ``kind``: the dtype of ``STORED`` whose bits they are, if any."""

    values: np.ndarray
    kind: str


def read_torch_file(path: str | Path) -> Any:
    """Read what ``torch.save`` wrote: dicts, lists and plain values with arrays where tensors were.

    Arrays are views of the file, read when they are used; writing to one leaves the file as it is.
    bfloat16 and float8 come as float32, ``argparse.Namespace`` and subclasses of dict as dict. Nothing that the pickle
    names is imported or called: other objects, such as a config or a NumPy scalar, are inert stand-ins.

    Raises:
        CheckpointError: no such file, not in PyTorch's zip format, its tensors need far more memory than it has
            bytes, or its pickle names a part of Python that no checkpoint needs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(_Archive(path, archive))
    except UnusableFile as problem:
        raise CheckpointError(f"{path} {problem}. Copy or download it again.") from None
    except _NO_ZIP as error:
        raise CheckpointError(
            f"{path} is not a file in PyTorch's zip format: {error_text(error)}. Save it again with torch.save of "
            "PyTorch 1.6 or later."
        ) from error


class _Archive:
    """The members of a PyTorch zip file; their bytes are mapped, not read."""

    def __init__(self, path: str | Path, archive: zipfile.ZipFile) -> None:
        self.path, self._archive = Path(path), archive
        self._prefix = next((n[: -len("data.pkl")] for n in archive.namelist() if n.endswith("/data.pkl")), None)
        self._bytes = np.memmap(self.path, np.uint8, "c")
        self._requested_bytes = 0

    def count_bytes(self, num_bytes: int) -> None:
        """Count the memory that the file needs; raises UnusableFile if that is far more than its size."""
        self._requested_bytes += num_bytes
        check_unfolded(len(self._bytes), self._requested_bytes)

    def member(self, name: str) -> np.ndarray:
        """Return the bytes of member ``name``, (size,) uint8."""
        try:
            info = self._archive.getinfo(f"{self._prefix}{name}")
        except KeyError:
            raise CheckpointError(f"{self.path} has no {name}. It is incomplete or not from torch.save.") from None
        if info.flag_bits & 1:
            raise CheckpointError(f"{self.path} is encrypted. Save it again without a password.")
        if info.compress_type != zipfile.ZIP_STORED:
            self.count_bytes(info.file_size)
            return np.frombuffer(self._archive.read(info), np.uint8)
        if bytes(self._bytes[info.header_offset :][:4]) != b"PK\3\4" or info.header_offset < 0:
            raise zipfile.BadZipFile(f"{name} is not at the offset in its index")
        header = bytes(self._bytes[info.header_offset :][:_HEADER_BYTES])
        start = _start_of_member(header, info.header_offset)
        return self._bytes[start : start + info.file_size]

    def has_big_endian_numbers(self) -> bool:
        """Return whether the writer's machine stored the most significant byte first."""
        return f"{self._prefix}byteorder" in self._archive.namelist() and bytes(self.member("byteorder")) == b"big"


_HEADER_BYTES = 30


def _start_of_member(header: bytes, offset: int) -> int:
    """Return where the bytes of an archive's member begin whose own header is at ``offset``."""
    name_size, extra_size = struct.unpack("<HH", header[26:_HEADER_BYTES])
    return offset + _HEADER_BYTES + int(name_size) + int(extra_size)


def check_pickle(content: bytes) -> None:
    """Raise UnpicklingError if a pickle numbers a value beyond its length: memory is allocated for all before it."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(content):
            raise pickle.UnpicklingError(f"value {argument:,} of {len(content):,} bytes")


def _read(archive: _Archive) -> Any:
    pickled = archive.member("data.pkl").tobytes()
    if archive.has_big_endian_numbers():
        raise CheckpointError(f"{archive.path} is from a big-endian machine. Save it again on a little-endian one.")
    try:
        check_pickle(pickled)
        return _plain(_TensorUnpickler(archive, io.BytesIO(pickled)).load())
    except _DAMAGED as error:
        raise CheckpointError(
            f"{archive.path} has a damaged pickle: {error_text(error)}. Copy or download it again."
        ) from error


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler that can build arrays and plain containers, and nothing else."""

    def __init__(self, archive: _Archive, file: BinaryIO) -> None:
        super().__init__(file)
        self._archive = archive
        self._known = _harmless_classes(archive)

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for ``name``, by default an inert object; ``name`` itself is never imported."""
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        if f"{module}.{name}" in self._known:
            return self._known[f"{module}.{name}"]
        root = module.partition(".")[0]
        is_plain = name in _PLAIN_BUILTINS if root in ("builtins", "__builtin__") else root in _PLAIN_MODULES
        if not is_plain and root in _STDLIB_MODULES:
            raise CheckpointError(
                f"{self._archive.path} needs {module}.{name}, which is not loaded from a file. Save a "
                "dict of tensors and plain values instead."
            )
        return type(name, (_Inert,), {"what": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _location, _numel = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"unknown persistent object {kind!r}")
        if storage_type not in _DTYPES:
            raise _unsupported(self._archive.path, f"a {storage_type}")
        values = self._archive.member(f"data/{key}").view(_DTYPES[storage_type])
        return _Storage(values, "bfloat16" if storage_type == "BFloat16Storage" else "")


_STDLIB_MODULES = sys.stdlib_module_names | {"__builtin__", "copy_reg", "commands"}


def _unsupported(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {what}, which is not supported. Save it as float32, float16, bfloat16 or float8."
    )


class _Inert:
    """Stands for an object that is not a tensor; accepts whatever a pickle does to it, and stores nothing."""

    what = "an object"

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _ignore(self, *_: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore


class _Attributes:
    """Base of the stand-in for ``argparse.Namespace``."""


class _Dict(dict[Any, Any]):
    """Base of the stand-ins for subclasses of dict; their arguments, such as defaultdict's, are not items."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _harmless_classes(archive: _Archive) -> dict[str, Callable[..., Any]]:
    """Return stand-ins for what a pickle may name, new ones for each file: a pickle can set attributes on them."""

    def rebuild_tensor(storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> np.ndarray:
        archive.count_bytes(math.prod(size) * storage.values.itemsize)
        return _as_array(storage, offset, size, stride)

    def rebuild_typed_tensor(
        storage: _Storage, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
    ) -> np.ndarray:
        name = getattr(dtype, "__name__", "object")
        if name not in _LATER_DTYPES:
            raise _unsupported(archive.path, f"a tensor of {name}")
        typed = _Storage(storage.values.view(_LATER_DTYPES[name]), name if name in STORED else "")
        return rebuild_tensor(typed, offset, size, stride)

    def rebuild_parameter(data: Any, *_: Any) -> Any:
        return data

    return {
        "torch._utils._rebuild_tensor_v2": rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": rebuild_typed_tensor,
        "torch._utils._rebuild_parameter": rebuild_parameter,
        "torch.Size": lambda sizes: tuple(sizes),
        "collections.OrderedDict": type("OrderedDict", (_Dict,), {}),
        "collections.defaultdict": type("defaultdict", (_Dict,), {}),
        "argparse.Namespace": type("Namespace", (_Attributes,), {}),
    }


def names_in_torch_file(path: str | Path) -> tuple[str, ...]:
    """Return the names of the tensors in a PyTorch file; no tensor is read.

    A file from before PyTorch 1.6, which is not a zip archive, passes unchecked, without names. Raises CheckpointError
    for any other that holds no tensors by name.
    """
    with open(path, "rb") as file:
        is_old = file.read(2) == b"\x80\x02"
    if is_old:
        return ()
    try:
        with zipfile.ZipFile(path) as archive:
            members = _Archive(path, archive)
            pickled = members.member("data.pkl").tobytes()
            check_pickle(pickled)
            content = _NameUnpickler(members, io.BytesIO(pickled)).load()
    except UnusableFile as problem:
        raise CheckpointError(f"{path} {problem}. Copy or download it again.") from None
    except (*_NO_ZIP, *_DAMAGED) as error:
        raise CheckpointError(f"{path} cannot be read: {error_text(error)}. Copy or download it again.") from error
    others = [name for name, value in content.items() if value is not _TENSOR] if isinstance(content, dict) else [""]
    if others or not content:
        has = f"has {others[0]!r}, which is no tensor" if others and others[0] else "holds no tensors by name"
        raise CheckpointError(f"{path} {has}. Copy or download it again.")
    return tuple(map(str, content))


_TENSOR = object()
"""Stands for a tensor that is not read."""


class _NameUnpickler(_TensorUnpickler):
    """A :class:`_TensorUnpickler` that builds no arrays."""

    def find_class(self, module: str, name: str) -> Any:
        stand_in = super().find_class(module, name)
        return (lambda *_: _TENSOR) if name.startswith("_rebuild_") else stand_in

    def persistent_load(self, pid: Any) -> Any:
        return None


def check_torch_load(file: BinaryIO) -> None:
    """Raise an Exception for a file that is damaged, or makes ``torch.load(weights_only=True)`` write out of bounds.

    Before 2.10 PyTorch sets items of whatever a pickle names, tensors too, and believes a pickle about the size of a
    storage (CVE-2026-24747). Here a pickle may set items of dicts and lists only, and an archive must have the bytes
    that it declares. Nothing is built.
    """
    file.seek(0)
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)
    if is_archive:
        _check_archive(file)
    else:  # a magic number, a version, facts of the machine, the content, the names of the storages that follow
        try:
            begins_right = _CheckingUnpickler(file, None).load() == _MAGIC
        except _DAMAGED:
            begins_right = False
        if not begins_right:
            raise LookupError("it is not a PyTorch file")
        for _ in range(4):
            _CheckingUnpickler(file, None).load()
    file.seek(0)


_MAGIC = 0x1950A86A20F9469CFC6C
"""First number in files from before PyTorch 1.6."""


def _check_archive(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        members, comment = archive.infolist(), archive.comment
    folder = members[0].filename.partition("/")[0] + "/"
    is_plain = all(info.filename.startswith(folder) and not info.compress_type for info in members)
    if comment or not is_plain or len({info.filename.lower() for info in members}) < len(members):
        raise pickle.UnpicklingError("it is not an archive that PyTorch writes")
    by_name = {info.filename.removeprefix(folder): info for info in members}
    content = by_name["data.pkl"]
    file.seek(content.header_offset)
    file.seek(_start_of_member(file.read(_HEADER_BYTES), content.header_offset))
    pickled = io.BytesIO(file.read(content.file_size))  # (by hand: the archives of DCP have no check sums)
    _CheckingUnpickler(pickled, {name: info.file_size for name, info in by_name.items()}).load()


class _WithoutItems(_Inert):
    """Stands for an object whose items no pickle may set."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Raise UnpicklingError: PyTorch before 2.10 would write out of bounds."""
        raise pickle.UnpicklingError("its pickle sets items of something that is not a dict or a list")


class _CheckingUnpickler(pickle._Unpickler):
    """An unpickler that builds nothing but plain containers; ``sizes``: bytes of the members of an archive."""

    def __init__(self, file: BinaryIO, sizes: Mapping[str, int] | None) -> None:
        super().__init__(file)
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for ``name``."""
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        is_dict = module == "collections" and name in ("OrderedDict", "Counter", "defaultdict")
        return type(name, (_Dict if is_dict else _WithoutItems,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Check that a storage is as large as the pickle declares."""
        _, kind, key, _, count, *_ = pid
        if self._sizes is not None:
            size = np.dtype(_DTYPES[kind]).itemsize * count
            if type(count) is not int or not 0 <= size <= self._sizes[f"data/{key}"]:
                raise pickle.UnpicklingError(f"storage {key} has fewer than the {count} numbers declared for it")
        return _WithoutItems()


def _as_array(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
    """View ``storage`` as an array of shape ``size``; offset and strides are in elements."""
    values, kind = storage
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (0 not in size and last >= len(values)):
        raise pickle.UnpicklingError(f"a tensor of {size} reaches beyond its {len(values)} stored numbers")
    if 0 in size:
        return np.zeros(size, np.float32 if kind else values.dtype)
    steps = [step * values.itemsize for step in stride]
    view = np.lib.stride_tricks.as_strided(values[offset:], size, steps)
    return np.require(widen(view, kind) if kind else view.view(np.ndarray), requirements="A")


def _plain(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Replace stand-ins and subclasses in nested containers by plain dicts, lists and tuples, each once (``known``)."""
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    content = vars(value) if isinstance(value, _Attributes) else value
    plain = content
    if isinstance(content, dict):
        plain = {_plain(key, known): _plain(item, known) for key, item in content.items()}
    elif isinstance(content, list | tuple):
        plain = type(content)(_plain(item, known) for item in content)
    known[id(value)] = plain
    return plain


_STORAGES = {np.dtype(code): name for name, code in _DTYPES.items() if name not in _BITS}


def write_torch_file(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of arrays, numbers, strings, booleans and None.

    ``torch.load(path, weights_only=True)`` reads it, arrays as tensors, bit for bit.

    Raises:
        CheckpointError: ``content`` holds something else, or an array of a dtype PyTorch lacks.
    """
    pickler = _TensorPickler(str(path))
    pickled = pickler.dumps(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(pickler.arrays):
            with archive.open(f"archive/data/{key}", "w", force_zip64=array.nbytes >= 1 << 31) as member:
                member.write(array.reshape(-1).view(np.uint8).data)
        archive.writestr("archive/version", "3\n")


class _TensorPickler:
    """Writes the pickle (protocol 2) of nested containers; arrays are set aside in ``arrays``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.arrays: list[np.ndarray] = []

    def dumps(self, content: Any) -> bytes:
        """Return the whole pickle of ``content``."""
        return pickle.PROTO + b"\x02" + self._value(content) + pickle.STOP

    def _value(self, value: Any) -> bytes:
        if value is None or isinstance(value, bool):
            return {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]
        if isinstance(value, np.ndarray | np.generic):
            return self._tensor(np.asarray(value))
        if isinstance(value, int):
            return pickle.LONG1 + self._with_length("<B", pickle.encode_long(value))
        if isinstance(value, float):
            return pickle.BINFLOAT + struct.pack(">d", value)
        if isinstance(value, str):
            return pickle.BINUNICODE + self._with_length(
                "<I", value.encode("utf-8", "surrogatepass")
            )  # (as pickle does)
        if isinstance(value, Mapping):
            items = b"".join(self._value(part) for item in value.items() for part in item)
            return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
        if isinstance(value, list):
            return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(self._value, value)) + pickle.APPENDS
        if isinstance(value, tuple):
            return self._tuple(*map(self._value, value))
        raise CheckpointError(f"{self._what} cannot hold a {type(value).__name__}. Write arrays and plain values.")

    def _tensor(self, array: np.ndarray) -> bytes:
        storage_type = _STORAGES.get(array.dtype)
        if storage_type is None:
            raise CheckpointError(
                f"{self._what} cannot hold {array.dtype}, which PyTorch does not have. Convert the array."
            )
        array = np.ascontiguousarray(array).reshape(array.shape)  # the former makes 0-D arrays 1-D
        key = str(len(self.arrays))
        self.arrays.append(array)
        storage = self._tuple(
            self._value("storage"), self._global("torch", storage_type), *map(self._value, (key, "cpu", array.size))
        )
        strides = tuple(step // array.itemsize for step in array.strides)
        no_hooks = self._global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
        arguments = self._tuple(
            storage + pickle.BINPERSID, *map(self._value, (0, array.shape, strides, False)), no_hooks
        )
        return self._global("torch._utils", "_rebuild_tensor_v2") + arguments + pickle.REDUCE

    @staticmethod
    def _with_length(size_format: str, content: bytes) -> bytes:
        return struct.pack(size_format, len(content)) + content

    @staticmethod
    def _tuple(*parts: bytes) -> bytes:
        return pickle.MARK + b"".join(parts) + pickle.TUPLE

    @staticmethod
    def _global(module: str, name: str) -> bytes:
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()
