"""Checksums of what PyTorch's distributed checkpoint (DCP) writes, taken on every rank on the way to the disk."""

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
    """DCP's writer of a folder, which leaves the checksums of all ranks' files there.

    They travel to the first rank with what DCP gathers there for its index.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs: _SummingFileSystem = _SummingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the files of this rank; return DCP's account of them and their checksums."""
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
    """Keep PyTorch from summing each record too, which costs as much and which it never looks at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _SummingFileSystem(FileSystem):
    """DCP's access to files, which keeps the checksums of those it has written."""

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
