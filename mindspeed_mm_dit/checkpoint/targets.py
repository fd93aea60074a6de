"""The target of a conversion: what it may replace, and how it appears atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.errors import CheckpointError


class Summary(NamedTuple):
    """What a conversion did."""

    source: Path
    source_format: str
    target: Path
    target_format: str
    trees: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]
    """What was left out or added, a sentence each."""


def check_target(
    source: Path, target: Path, overwrite: bool, is_ours: Callable[[Path], bool] = lambda path: False
) -> None:
    """Refuse to replace anything but a checkpoint, or what ``is_ours`` accepts, and that only with ``overwrite``."""
    here, there = source.resolve(), target.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise CheckpointError(f"TARGET = {target}", "overlaps with SOURCE", "choose another path")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"TARGET = {target}", "exists", "choose another path, or add --overwrite")
    is_checkpoint = CheckpointStore(target).iterations() or any(known.fits(target) for known in FORMATS.values())
    if target.is_dir() and not is_checkpoint and not is_ours(target):
        raise CheckpointError(f"TARGET = {target}", "is a folder and no checkpoint", "choose another path")


def written(target: Path, make: Callable[[Path], object], is_folder: bool) -> None:
    """Let ``make`` write a file, or fill an empty folder, at a temporary path; then rename it to ``target``.

    Raises CheckpointError if it cannot be written.
    """
    aside = target.with_name(f".{target.name}.partial")
    _remove(aside)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if is_folder:
            aside.mkdir()
        make(aside)
        _move(aside, target)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free / 2**30
        reason = f"cannot be written: {error} ({free:.2f} GiB are free on that disk)"
        raise CheckpointError(f"TARGET = {target}", reason) from error
    finally:
        _remove(aside)


def _move(aside: Path, target: Path) -> None:
    """Replace ``target`` by ``aside`` once all of it is on the disk."""
    for file in [aside] if aside.is_file() else [path for path in aside.rglob("*") if path.is_file()]:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    if aside.is_file():
        os.replace(aside, target)
        return
    old = target.with_name(f".{target.name}.old")
    _remove(old)
    if target.exists():
        os.rename(target, old)
    os.rename(aside, target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
