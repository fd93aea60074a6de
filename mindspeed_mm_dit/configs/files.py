"""Reads config files strictly.

Regular files only (JSON, YAML, ``.npy``, ``.npz``), and no model folder that names code. Nothing that could block or
never end is opened, headers are compared with the file before anything is read, and errors name the line.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import os
import re
import stat
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import yaml

from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.strict import check_depth, read_any_json, read_text
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, DataError, nearest
from mindspeed_mm_dit.registry import Registry

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "is a folder, not a file"),
    (stat.S_ISFIFO, "is a named pipe, not a file"),
    (stat.S_ISSOCK, "is a socket, not a file"),
    (stat.S_ISCHR, "is a device, not a file"),
    (stat.S_ISBLK, "is a device, not a file"),
)


FREE_BYTES, MAX_MEMORY_RATIO = 256 * 2**20, 8
"""A file may take MAX_MEMORY_RATIO its size in memory, and FREE_BYTES in any case."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header of a .safetensors file; the limit of safetensors itself."""


class UnusableFile(Exception):
    """A file that cannot be used; the message continues the file's name: "is a named pipe, not a file"."""


class Digest(Protocol):
    """A digest of :mod:`hashlib` that data can be added to."""

    def update(self, data: bytes, /) -> None:
        """Add ``data``."""


def check_file(path: str | Path) -> int:
    """Return the size of ``path`` in bytes; raises UnusableFile unless it is a regular file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UnusableFile("is a link to nothing" if os.path.islink(path) else "does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise UnusableFile(f"cannot be read: {error_text(error)}") from None
    for is_kind, words in _KINDS:
        if is_kind(status.st_mode):
            raise UnusableFile(words)
    return status.st_size


def check_unfolded(size: int, num_bytes: int) -> None:
    """Raise UnusableFile if a file of ``size`` bytes needs ``num_bytes`` of memory, far more than its size.

    Every reader calls this before it allocates or unpacks, so that no small file takes all memory.
    """
    if num_bytes > max(FREE_BYTES, MAX_MEMORY_RATIO * size):
        raise UnusableFile(f"has {size:,} bytes but needs {num_bytes:,} bytes of memory")


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is an accessible folder."""
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or a parent folder without permission
        return False


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a regular file; raises UnusableFile."""
    check_file(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnusableFile(f"cannot be read: {error_text(error)}") from None


def not_a_folder_reason(path: Path) -> str:
    """Return what is wrong with a path of data.json that is not a folder, with its absolute path."""
    return f"is not a folder: {os.path.abspath(path)} (relative paths start at the working directory)"


def suggest_path(path: Path, *known: str) -> str:
    """Return "Did you mean 'x'? " for a missing ``path``, from its folder and the ``known`` names; or ""."""
    siblings = [entry.name for entry in path.parent.iterdir()] if is_folder(path.parent) else []
    return "" if os.path.lexists(path) else nearest(path.name, [*known, *siblings])


def fetch_command(path: str | Path) -> str:
    """Return a sentence with the command that fetches the published weights whose folder ``path`` is in, or ""."""
    published = Registry[Any]("published_weights")
    for name in published:
        folders = {repo.rpartition("/")[2] for repo in published[name].repos.values() if "://" not in repo}
        if folders.intersection(Path(path).parts):
            return f"Fetch it with mm-dit get {name}."
    return ""


def lines_of(text: str) -> list[str]:
    """Return the lines of ``text``, which end with a line feed, after a carriage return or not.

    ``str.splitlines`` also splits at characters inside a line, such as U+2028 or a form feed.
    """
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def error_text(error: Exception) -> str:
    """Return the text of an error, without its last period, and the error number and file name of system errors."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(". ")


def add_content(digest: Digest, path: str | Path) -> None:
    """Add the bytes of a regular file to ``digest``; raises UnusableFile."""
    check_file(path)
    try:
        with open(path, "rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    except OSError as error:
        raise UnusableFile(f"cannot be read: {error_text(error)}") from None


def digest_of(path: str | Path) -> bytes:
    """Return a digest of the content of a regular file; raises UnusableFile."""
    digest = hashlib.blake2b(digest_size=16)
    add_content(digest, path)
    return digest.digest()


def digest_of_files(path: str, setting: str = "ae.from_pretrained") -> str:
    """Return the SHA-256 over the weights and config files at ``path``, a folder or one file; ``setting`` names it."""
    root = Path(path)
    if not root.exists():
        raise DataError(f"{setting} = {path} does not exist. Correct the path.")
    suffixes = {".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".model"}
    files = sorted(file for file in root.iterdir() if file.suffix in suffixes) if root.is_dir() else [root]
    stamps = []
    for file in files:
        try:
            stamps.append((str(file.absolute()), check_file(file), os.stat(file).st_mtime_ns))
        except UnusableFile as problem:
            raise DataError(
                f"{setting} = {path} has a file that cannot be used: {file} {problem}. Copy it again."
            ) from None
    return _digest_of_all(tuple(stamps))


@lru_cache(maxsize=8)
def _digest_of_all(files: tuple[tuple[str, int, int], ...]) -> str:
    """Return the SHA-256 over files (path, bytes, modification time); unchanged files are read only once."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        add_content(digest, path)
    return digest.hexdigest()


class WeightFile(NamedTuple):
    """A file of weights in a folder of diffusers or transformers."""

    path: Path
    variant: str | None
    """The ``fp16`` of model.fp16.safetensors, which these libraries call a variant."""


def weight_file_in(folder: Path, names: Sequence[str]) -> WeightFile:
    """Return the first of ``names`` that is in ``folder``, or its variant if there is only one.

    Raises UnusableFile, listing what is there, if there is none, or several variants.
    """
    for name in names:
        if (folder / name).is_file():
            return WeightFile(folder / name, None)
    for stem, _, ending in (name.rpartition(".") for name in names):
        files_by_variant = {
            file.name[len(stem) + 1 : -len(ending) - 1]: file for file in folder.glob(f"{stem}.*.{ending}")
        }
        variants = sorted(name for name in files_by_variant if re.fullmatch(r"\w+", name))
        if len(variants) > 1:
            found = " and ".join(files_by_variant[name].name for name in variants)
            raise UnusableFile(f"holds several variants of its weights, {found}, but must hold one")
        if variants:
            return WeightFile(files_by_variant[variants[0]], variants[0])
    expected = ", ".join(name for name in names if not name.endswith(".json"))
    raise UnusableFile(f"holds none of {expected}; it holds {list_first_names(folder)}")


def check_model_folder(setting: str, folder: Path) -> None:
    """Raise CheckpointError unless ``folder``, which ``setting`` names, is a local folder with a config.json."""
    if (folder / "config.json").is_file():
        return
    if is_folder(folder):
        problem = f"holds no config.json; it holds {list_first_names(folder)}"
    else:
        problem = "is a file, not a folder" if folder.is_file() else "does not exist, and nothing is downloaded"
    hint = fetch_command(folder) or "Name a local folder with config.json and weights, or correct the path."
    raise CheckpointError(f"{setting} = {folder} {problem}. {hint}")


def list_first_names(folder: Path) -> str:
    """Return the first names in a folder, for errors: "a, b, ..."."""
    names = sorted(file.name for file in folder.iterdir()) if is_folder(folder) else []
    return (", ".join(names[:5]) + (", ..." if len(names) > 5 else "")) or "nothing"


class SafetensorsHeader(NamedTuple):
    """The header of a .safetensors file."""

    tensors: dict[str, dict[str, Any]]
    """Name -> {"dtype", "shape", "data_offsets": (begin, end)}; together the tensors fill the file without gaps."""
    metadata: dict[str, str]
    start: int
    """Byte offset of the first tensor."""


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace ``path`` atomically by a temporary file that ``write`` fills; raises DataError if that fails."""
    from safetensors import SafetensorError

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be written: {error_text(error)}. Free some space and run again to resume."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def read_safetensors_header(path: str | Path) -> SafetensorsHeader:
    """Read the header of a .safetensors file.

    Raises UnusableFile if it is not such a file, or does not have the size that its header implies.
    """
    size = check_file(path)
    try:
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if not 8 < start <= min(size, MAX_HEADER_BYTES):
                raise ValueError(f"the file has {size} bytes, its header ends at {start}")
            header = json.loads(file.read(start - 8), object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its __metadata__ is not a map of strings")
        ranges = sorted(_byte_range(entry["data_offsets"]) for entry in header.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableFile(f"cannot be read: {error_text(error)}") from None
    starts, ends = [0, *(end for _, end in ranges)], [*(begin for begin, _ in ranges), size - start]
    if ranges and ranges[-1][1] != size - start:
        end = start + ranges[-1][1]
        raise UnusableFile(f"is truncated or damaged: it has {size:,} bytes, but its header describes {end:,}")
    if starts != ends:
        raise UnusableFile("is damaged: its tensors overlap or leave gaps")
    return SafetensorsHeader(header, metadata, start)


def read_floats(path: str | Path, name: str) -> np.ndarray:
    """Return the tensor ``name`` of a .safetensors file, float32 or bfloat16, as float32 without its shape.

    Raises UnusableFile if it is not such a file, or does not have that tensor.
    """
    header = read_safetensors_header(path)
    kind = header.tensors.get(name, {}).get("dtype")
    if kind not in ("F32", "BF16"):
        raise UnusableFile(f"has no tensor {name} of float32 or bfloat16")
    begin, end = header.tensors[name]["data_offsets"]
    with open(path, "rb") as file:
        file.seek(header.start + begin)
        data = file.read(end - begin)
    if kind == "F32":
        return np.frombuffer(data, "<f4")
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")  # (the upper half of a float32)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return entries


def _byte_range(offsets: Any) -> tuple[int, int]:
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError(f"a tensor's offsets are {begin} to {end}")
    return begin, end


_NAMES_CODE = (
    *("auto_map", "trust_remote_code", "custom_pipelines", "quantization_config", "base_model_name_or_path"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    *("use_kernels", "kernel_config", "allow_all_kernels"),
)
"""Keys of config files with which transformers, diffusers or peft run other code, fetch kernels, or read another model
than the folder's. CVE-2026-4372: transformers 4.56 to 5.2 run the code that ``_attn_implementation_internal`` names."""
_BUILT_IN_ATTENTION = ("eager", "sdpa")
"""Attention implementations without external kernels."""


def check_names_no_code(setting: str, folder: Path) -> None:
    """Raise ConfigError if a config file in ``folder``, which ``setting`` named, names code to run or to fetch."""
    for file in sorted(folder.glob("*config.json")):
        for key, value in _pairs(read_any_json(file, setting)):
            if key in _NAMES_CODE and value and value not in _BUILT_IN_ATTENTION:
                raise ConfigError(
                    f"{setting} = {file} has {key} = {shorten_repr(value)}, which names code that is never run or "
                    "fetched. Remove the key if the folder works without it, or name another folder."
                )


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a JSON object, and those of all objects inside it."""
    for key, inside in value.items() if isinstance(value, dict) else ():
        yield key, inside
        yield from _pairs(inside)
    for entry in value if isinstance(value, list) else ():
        yield from _pairs(entry)


class _Loader(yaml.SafeLoader):
    """YAML that refuses duplicate keys, and ``<<``, with which a short file can expand to a very large mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            text = key.value if isinstance(key.value, str) else shorten_repr(key.value)
            if text in seen or key.tag == "tag:yaml.org,2002:merge":
                problem = "occurs twice" if text in seen else "is not supported"
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shorten_repr(text)} {problem}", key.start_mark
                )
            seen.add(text)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, flag: str) -> Any:
    """Return the content of a YAML file, or None if it is empty; ``flag`` is the option that named it.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    text, what = read_text(path, flag), f"{flag} = {path}"
    try:
        content = yaml.load(text, _Loader)
        check_depth(what, content)
        return content
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply to be a config file.") from None
    except Exception as error:  # (PyYAML lets through whatever an invalid date or number raises)
        raise ConfigError(f"{what} holds a value that cannot be read: {error_text(error)}.") from None


UNREADABLE: tuple[type[Exception], ...]
UNREADABLE = (ValueError, OSError, EOFError, LookupError, TypeError, RuntimeError, MemoryError)
UNREADABLE += (zlib.error, zipfile.BadZipFile, lzma.LZMAError, tokenize.TokenError)
"""Errors that reading a damaged or encrypted file raises."""


class Header(NamedTuple):
    """The header of an .npy file."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype


def read_npy(path: str | Path) -> np.ndarray:
    """Read an .npy without objects; raises UnusableFile."""
    size = check_file(path)
    try:
        with open(path, "rb") as file:
            read_header(file, size)
            file.seek(0)
            return np.load(file, allow_pickle=False)
    except UNREADABLE as error:
        raise UnusableFile(f"cannot be read: {error_text(error)}") from None


def read_npz(path: str | Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz by name, or only ``names``.

    Raises UnusableFile if one is not an array of numbers or text, is encrypted, or unpacks to far more than the file.
    """
    size = check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            selected = {name: members[name] for name in members if names is None or name in names}
            for info in selected.values():
                with archive.open(info) as member:
                    read_header(member, info.file_size)
        check_unfolded(size, sum(info.file_size for info in selected.values()))
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in selected}
    except UNREADABLE as error:
        raise UnusableFile(f"cannot be read: {error_text(error)}") from None


def read_header(file: IO[bytes], size: int) -> Header:
    """Read the header of an .npy of ``size`` bytes; raises UnusableFile unless its array fills the rest of them."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    header = Header(*read(file))
    if header.dtype.hasobject:
        raise UnusableFile("holds Python objects, which are never loaded")
    num_bytes, expected = size - file.tell(), math.prod(header.shape) * header.dtype.itemsize
    if num_bytes != expected:
        raise UnusableFile(f"holds {num_bytes:,} bytes of data, but its header describes {expected:,}")
    return header
