"""Safetensors files mapped into memory, and digests of the files that an encoder consists of. No framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mindspeed_mm_dit.configs.files import UnusableFile, check_file
from mindspeed_mm_dit.errors import DataError

MAKE_AGAIN = "remove it and run mm-dit cache-latents again: it keeps the other shards"
_DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64}


def map_tensors(path: Path) -> dict[str, Any]:
    """Map the tensors of a safetensors file into memory.

    Raises:
        DataError: it is damaged; one that is cut short is not mapped, since reading past its end would end the process.
    """
    try:
        check_file(path)
        with safe_open(path, "numpy"):  # compares the header with the size of the file
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: np.memmap(path, _DTYPES[of["dtype"]], "r", 8 + length + of["data_offsets"][0], tuple(of["shape"]))
            for name, of in header.items()
        }
    except (UnusableFile, SafetensorError, OSError, ValueError, KeyError) as error:
        raise DataError(str(path), f"is no shard of a cache: {error}", MAKE_AGAIN) from None


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; raises DataError where it is damaged."""
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DataError(str(path), f"is no shard of a cache: {error}", MAKE_AGAIN) from None
