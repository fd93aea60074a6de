"""Measure what checksums add to the time of a save, for each framework's files, and the cost of comparing them.

    python benchmarks/checksums.py --folder /tmp/somewhere [--gib 1] [--clock cpu]

Writes the same arrays with and without checksums in turn, synced to the disk each time, then compares them.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from common import CLOCKS, Report, timed

from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.mindspore_ckpt import write as write_with_sums
from mindspeed_mm_dit.checkpoint.torch_folder import ChecksumWriter
from mindspeed_mm_dit.framework.mindspore_file import write_mindspore_file

TENSORS = 64


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("checksums", f"Checksums: what they add to a save of {args.gib:g} GiB")
    numbers = np.random.default_rng(0).standard_normal((TENSORS, int(args.gib * 2**28) // TENSORS), np.float32)
    arrays = {str(i): row for i, row in enumerate(numbers)}
    tensors = {name: torch.from_numpy(row) for name, row in arrays.items()}
    writers: dict[str, Callable[[Path], object]] = {
        "pytorch without": lambda path: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True),
        "pytorch with": lambda path: dcp.save(tensors, storage_writer=ChecksumWriter(path), no_dist=True),
        "mindspore without": lambda path: write_plainly(path / "state.ckpt", arrays),
        "mindspore with": lambda path: write_with_sums(path, arrays),
    }
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(-1, args.rounds):  # one to warm up
        for name in list(writers)[:: -1 if number % 2 else 1]:
            empty(args.folder / "saved")
            took = timed(functools.partial(writers[name], args.folder / "saved"), args.clock)
            seconds[name] += [took] if number >= 0 else []
    empty(args.folder / "saved")
    writers["pytorch with"](args.folder / "saved")
    seconds["comparing"] = [timed(lambda: check(args.folder / "saved"), args.clock) for _ in range(args.rounds)]
    shutil.rmtree(args.folder / "saved")
    report.raw(seconds)
    report.echo(f"\n{args.clock} seconds; the change is the median over rounds, each against the same round without.\n")
    report.table(("files of", "without", "with", "change"), [row(seconds, name) for name in ("pytorch", "mindspore")])
    report.echo(f"Comparing the checksums of {args.gib:g} GiB: {statistics.median(seconds['comparing']):.2f} s.")
    report.save()


def empty(path: Path) -> None:
    """Make the folder for a checkpoint, without the last one."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def write_plainly(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a MindSpore file to the disk, without a checksum."""
    write_mindspore_file(path, arrays)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def check(path: Path) -> None:
    """Compare a checkpoint with its checksums."""
    assert checksums.find_damage(path) is None


def row(seconds: dict[str, list[float]], name: str) -> tuple[str, ...]:
    """Return a line of the table."""
    without, with_sums = seconds[f"{name} without"], seconds[f"{name} with"]
    change = statistics.median(b / a for a, b in zip(without, with_sums)) - 1
    return name, f"{statistics.median(without):.2f} s", f"{statistics.median(with_sums):.2f} s", f"{change:+.1%}"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder on the disk to write to")
    parser.add_argument("--gib", type=float, default=1.0, help="size of a save")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    return parser.parse_args()


if __name__ == "__main__":
    main()
