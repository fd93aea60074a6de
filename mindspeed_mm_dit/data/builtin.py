"""Built-in data sets, by name: each is written as ordinary files where a run looks for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm_dit.configs.files import error_text, is_folder
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.registry import Registry


class BuiltinData(NamedTuple):
    """A built-in data set."""

    write: Callable[[Path], None]
    """Writes it to a folder that does not exist yet."""
    num_images: int = 0
    """Number of images; 0 if it is not checked."""
    num_classes: int = 0
    """Labels are 0 ... num_classes - 1."""


_written: list[tuple[Path, list[Path]]] = []
"""Built-in data written by this process, each with the parent folders that were created for it."""
IMAGES, CLIPS = Registry[BuiltinData]("builtin_images"), Registry[BuiltinData]("builtin_clips")
"""The built-in data sets by name, which is a value of ``dataset_param.source``."""


@contextmanager
def write_then_rename(folder: Path) -> Iterator[Path]:
    """Yield a path next to ``folder`` that is renamed to it at the end, unless another rank has created it first."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        yield aside
        if not folder.exists():
            os.rename(aside, folder)
    except OSError:
        if not folder.exists():  # (otherwise another rank has created it)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_builtin(known: Mapping[str, BuiltinData], source: str, folder: Path) -> None:
    """Fill ``folder`` with the built-in data set ``source``, one of ``known``, unless the folder exists.

    Raises:
        DataError: the folder is not named like the data set, or cannot be written. The name is checked so that a
            mistyped path, or a ``source`` copied from another file, does not yield the wrong images.
    """
    exists = is_folder(folder)
    if os.path.basename(os.path.abspath(folder)) != source:
        raise DataError(
            f"dataset_param.data_folder = {folder} {'exists' if exists else 'does not exist'}, but the folder of "
            f"dataset_param.source = {source!r}, built-in data, must be named {source}. For data of your own, "
            f'{"" if exists else "correct data_folder and "}drop "source" from data.json.'
        )
    if exists:
        return
    missing = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        known[source].write(folder)
        _written.append((folder, missing))
    except (OSError, ValueError) as error:
        raise DataError(
            f"dataset_param.data_folder = {folder} cannot be filled with the built-in {source}: {error_text(error)}. "
            "Name a folder that you can write to, on a disk with room."
        ) from None


def remove_written() -> None:
    """Remove what :func:`write_builtin` wrote in this process, so that a --dry-run leaves nothing behind."""
    while _written:
        folder, new_folders = _written.pop()
        shutil.rmtree(folder, ignore_errors=True)
        for parent in new_folders:
            with suppress(OSError):  # (something else is in it by now)
                parent.rmdir()


def check_is_source(source: str, folder: Path, labels: list[int], labelled: bool) -> None:
    """Raise DataError if images with these ``labels`` are not the built-in data set ``source``.

    labelled: whether the labels are known; if not, only the number of images is checked.
    """
    builtin = IMAGES[source]
    if len(labels) != builtin.num_images or (labelled and set(labels) != set(range(builtin.num_classes))):
        classes = f" of {len(set(labels))} classes" if labelled else ""
        raise DataError(
            f"dataset_param.source = {source!r} has {builtin.num_images} images of {builtin.num_classes} classes, but "
            f'{folder} holds {len(labels)} images{classes}. Drop "source" to train on these, or move the folder away, '
            f"and {source} is written again."
        )
