"""Checksums of the files of PyTorch's distributed checkpoint (DCP), computed on every rank while it writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.checksums import Checksum, SummedFile


class SummingWriter(dcp.FileSystemWriter):
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
        checksums.record(Path(self.path), self.fs.sums)


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
            summed = SummedFile(file)
            yield summed if mode == "wb" else file
        if mode == "wb":
            self.sums[Path(path).name] = summed.checksum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
