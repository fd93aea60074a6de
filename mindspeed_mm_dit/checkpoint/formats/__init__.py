"""The checkpoint formats, one module each: how to recognise, read and write one."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm_dit.checkpoint.formats import ckpt, diffusers, mindspore, original, pipeline, pt, pytorch, safetensors
from mindspeed_mm_dit.checkpoint.formats.contract import Format, StorageSupport
from mindspeed_mm_dit.configs.files import how_to_fetch
from mindspeed_mm_dit.errors import CheckpointError, ConfigError

__all__ = ["FORMATS", "Format", "StorageSupport", "choose_format", "of_source"]

FORMATS: dict[str, Format] = {
    "mindspore": Format(mindspore.fits, mindspore.read, mindspore.write, StorageSupport.TRAINING),
    "pytorch": Format(pytorch.fits, pytorch.read, pytorch.write, StorageSupport.TRAINING),
    "pipeline": Format(pipeline.fits, pipeline.read, pipeline.write, StorageSupport.ONE_TREE),
    "diffusers": Format(diffusers.fits, diffusers.read, diffusers.write, StorageSupport.ONE_TREE),
    "pt": Format(pt.fits, pt.read, pt.write, StorageSupport.WEIGHTS, (".pt", ".pth", ".bin")),
    "safetensors": Format(
        safetensors.fits, safetensors.read, safetensors.write, StorageSupport.ONE_TREE, (".safetensors",)
    ),
    "original": Format(original.fits, safetensors.read, original.write, StorageSupport.ONE_TREE, (".safetensors",)),
    "ckpt": Format(ckpt.fits, ckpt.read, ckpt.write, StorageSupport.ANYTHING, (".ckpt",)),
}
"""By the name that --to takes; the first that fits a path is its format."""


def of_source(path: Path) -> str:
    """Return the name of the format that ``path`` is in."""
    for name, known in FORMATS.items():
        if known.fits(path):
            return name
    if not path.exists():
        raise CheckpointError(f"SOURCE = {path}", "there is no such file or folder", how_to_fetch(path))
    raise CheckpointError(f"SOURCE = {path}", "is in no format known here", f"formats are: {', '.join(FORMATS)}")


def choose_format(path: Path, to: str | None) -> str:
    """Return the name of the format that ``path`` will be in: ``to``, or the one of its ending."""
    by_ending = next((name for name, known in FORMATS.items() if path.suffix in known.endings), None)
    folders = [name for name, known in FORMATS.items() if not known.endings]
    if by_ending is None and to is None:
        raise ConfigError(
            f"TARGET = {path}",
            "its ending names no format",
            f"end it in .pt, .safetensors or .ckpt, or give --to {'|'.join(folders)} for a folder",
        )
    name = to or by_ending
    if name not in FORMATS:
        raise ConfigError(f"--to = {to}", "unknown format", f"formats are: {', '.join(FORMATS)}")
    endings = FORMATS[name].endings
    if path.suffix not in endings if endings else by_ending is not None:
        cure = f"end it in {' or '.join(endings)}" if endings else f"give a folder, such as {path.with_suffix('')}"
        raise ConfigError(f"TARGET = {path}", f"does not look like --to {name}", cure)
    return name
