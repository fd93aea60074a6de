"""A folder of PyTorch's distributed checkpoint (DCP): read so that no pickle can run code, written with checksums.

A pickle may name any function to be called. A folder has one in ``.metadata``, the index, and one for each entry that
is no tensor. DCP itself loads both unchecked.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import math
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as before_2_3
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan, SavePlanner
from torch.futures import Future

from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.checksums import Checksum, ChecksumFile
from mindspeed_mm_dit.configs.files import UnusableFile, check_unfolded, error_text
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.torch_file import check_pickle, check_torch_load

INDEX = ".metadata"
_ADVICE = "Do not use this checkpoint, or ask whoever made it for a .safetensors file."
_CLASSES = (
    *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING),
    *(before_2_3.TensorProperties, before_2_3.MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.Size),
)
"""What PyTorch 2.0 to 2.13 puts into ``.metadata``, besides dtypes, the layout and the path it was written to."""
_MEMBER = "builtins.getattr"
"""How Python 3.11.0 to 3.11.3 (Debian 12's) pickle a member of an enum: ``getattr(cls, name)``."""


def read_metadata(path: Path) -> metadata.Metadata:
    """Return the index of the checkpoint folder ``path``.

    Raises:
        CheckpointError: it names anything but PyTorch's own classes of an index (which is never executed), or a file
            outside the folder.
        Exception: whatever a damaged pickle raises.
    """
    content = (path / INDEX).read_bytes()
    check_pickle(content)
    index = _IndexUnpickler(path / INDEX, io.BytesIO(content)).load()
    if not isinstance(index, metadata.Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
    for entry in (index.storage_data or {}).values():
        if Path(entry.relative_path).name != entry.relative_path:
            raise CheckpointError(f"{path / INDEX} names {entry.relative_path}, a file outside its folder. {_ADVICE}")
    _check_sizes(path, index)
    return index


def _check_sizes(path: Path, index: metadata.Metadata) -> None:
    """Raise CheckpointError if the tensors of an index are far larger than the files that hold them."""
    tensors = [
        entry for entry in index.state_dict_metadata.values() if isinstance(entry, metadata.TensorStorageMetadata)
    ]
    claimed_bytes = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors)
    files = {path / storage.relative_path for storage in (index.storage_data or {}).values()}
    if not all(file.is_file() for file in files):  # (which their own checks name)
        return
    try:
        check_unfolded(sum(file.stat().st_size for file in files), claimed_bytes)
    except UnusableFile as problem:
        raise CheckpointError(f"{path} {problem}. {_ADVICE}") from None


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that can build an index, and nothing else."""

    def __init__(self, path: Path, file: io.BytesIO) -> None:
        super().__init__(file)
        self._path = path
        self._known = _constructors()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}" not in self._known:
            raise _refused(str(self._path), f"{module}.{name}")
        return self._known[f"{module}.{name}"]


def _constructors() -> dict[str, Callable[..., Any]]:
    """Return constructors for an index's objects by name; new each time, as a pickle can set attributes on them."""
    makers = {cls: _constructor(cls) for cls in _CLASSES}
    known: dict[str, Callable[..., Any]] = {f"{cls.__module__}.{cls.__name__}": maker for cls, maker in makers.items()}
    known[_MEMBER] = lambda maker, name: _member(next((cls for cls in makers if makers[cls] is maker), None), name)
    known["torch.serialization._get_layout"] = lambda name: torch.serialization._get_layout(name)
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath"):
            known[f"{module}.{name}"] = lambda *parts: os.path.join(*parts)
    return known


def _constructor(cls: type) -> type:
    """Return a class whose instances are those of ``cls``, which itself stays out of the pickle's reach."""
    return type(cls.__name__, (), {"__new__": lambda _, *values: cls.__new__(cls, *values)})


def _member(cls: Any, name: str) -> enum.Enum:
    """Return a member of an enum; this is all that ``getattr`` may get."""
    if not isinstance(cls, enum.EnumMeta):
        raise pickle.UnpicklingError(f"its pickle asks for {name} of {cls}, which is no enum")
    return cls[name]


def _refused(what: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{what} has a pickle that asks for {name}, which could run code and is not loaded. {_ADVICE}"
    )


def read_number(path: Path, name: str) -> float:
    """Return the entry ``name`` of the checkpoint folder ``path``, a pickled number (a step counter of Adam).

    Raises:
        CheckpointError: the entry is anything else, which is not loaded.
    """
    for entry, file, content in _byte_entries(path):
        if entry == name:
            number = _load_harmless(f"{name} in {path / file}", content)
            if isinstance(number, int | float):
                return number
            raise CheckpointError(f"{name} in {path / file} is a {type(number).__name__}, not a number. {_ADVICE}")
    raise CheckpointError(f"{path} lacks {name}. {_ADVICE}")


class _Slice(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        content = self._file.read(max(0, min(len(buffer), self._size - self._position)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class SafeFileReader(dcp.FileSystemReader):
    """DCP's folder reader, which reads the index by :func:`read_metadata`, and checks tensors before it loads them."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what ``plan`` names; raises CheckpointError for a tensor that ``torch.load`` must not see."""
        for item in (item for item in plan.items if item.type == LoadItemType.TENSOR):
            entry = self.storage_data[item.storage_index]
            with open(Path(self.path) / entry.relative_path, "rb") as file:
                try:
                    check_torch_load(cast(BinaryIO, _Slice(file, entry.offset, entry.length)))
                except Exception as problem:  # (a damaged file raises anything)
                    raise CheckpointError(
                        f"{item.storage_index.fqn} in {Path(self.path) / entry.relative_path} is not loaded: "
                        f"{error_text(problem)}. {_ADVICE}"
                    ) from None
        return super().read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the index, marked with the id of this load as DCP does."""
        index = read_metadata(Path(self.path))
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


class TensorsOnlyPlanner(DefaultLoadPlanner):
    """A load planner that refuses entries that are no tensors, which DCP would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse the entry."""
        name = read_item.dest_index.fqn
        raise CheckpointError(f"{name} is a pickled object where a tensor belongs, and is not loaded. {_ADVICE}")


def check_pickles(folder: Path, known: Iterable[str]) -> None:
    """Check every pickle below ``folder`` before a program loads them that does not check them itself.

    known: names of classes, besides PyTorch's own harmless ones, that are allowed in ``.pt`` files and in entries that
        are no tensors; those not installed here are skipped.

    Raises:
        CheckpointError: a pickle names anything else; the error gives the file and that name.
    """
    classes = [cls for name in known if (cls := _imported(name)) is not None]
    with torch.serialization.safe_globals([(_member, _MEMBER), *classes]):
        for index in sorted(folder.rglob(INDEX)):
            for name, file, content in _byte_entries(index.parent):
                _load_harmless(f"{name} in {index.parent / file}", content)
        for path in sorted(folder.rglob("*.pt")):
            _load_harmless(str(path), path)


def _byte_entries(path: Path) -> Iterable[tuple[str, str, io.BytesIO]]:
    """Yield name, file and bytes of every entry of the checkpoint ``path`` that is no tensor."""
    index = read_metadata(path)
    for key, storage in (index.storage_data or {}).items():
        if isinstance(index.state_dict_metadata[key.fqn], metadata.BytesStorageMetadata):
            with open(path / storage.relative_path, "rb") as file:
                file.seek(storage.offset)
                yield key.fqn, storage.relative_path, io.BytesIO(file.read(storage.length))


def _load_harmless(what: str, content: Path | io.BytesIO) -> Any:
    """Return the content of a pickle; raise CheckpointError if it names anything but known classes."""
    try:
        with open(content, "rb") if isinstance(content, Path) else contextlib.nullcontext(content) as file:
            check_torch_load(file)
        return torch.load(content, map_location="cpu", weights_only=True, mmap=isinstance(content, Path))
    except Exception as error:  # (a damaged file raises anything)
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is not None:
            raise _refused(what, named[1]) from None
        raise CheckpointError(f"{what} is not loaded: {error_text(error).splitlines()[0]}. {_ADVICE}") from None


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


class ChecksumWriter(dcp.FileSystemWriter):
    """DCP's folder writer, which also writes the checksums of all ranks' files.

    They reach the first rank along with what DCP gathers for its index.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs: _SummingFileSystem = _SummingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the files of this rank; return DCP's results and the checksums."""
        both: Future[Any] = Future()
        with _without_sums_of_records():
            both.set_result((super().write_data(plan, planner).wait(), self.fs.sums))
        return both

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write the index and the checksums, on the first rank."""
        super().finish(metadata, [written for written, _ in results])
        for _, sums in results:
            self.fs.sums.update(sums)
        checksums.write_checksums(Path(self.path), self.fs.sums)


@contextmanager
def _without_sums_of_records() -> Iterator[None]:
    """Turn off PyTorch's own checksums of records, which cost as much and are never compared."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _SummingFileSystem(FileSystem):
    """DCP's file system, which keeps the checksums of the files it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            summed = ChecksumFile(file)
            yield summed if mode == "wb" else file
        if mode == "wb":
            self.sums[Path(path).name] = summed.checksum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
