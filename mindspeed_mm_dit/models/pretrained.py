"""What Hugging Face's ``from_pretrained`` leaves to be done: a look before, silence, and a look at what it found."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_mm_dit.configs.autoencoder import PretrainedAutoencoderConfig
from mindspeed_mm_dit.configs.files import UnusableFile, check_safetensors
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.torch_file import check_torch_file

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What transformers calls the weights in a folder, in the order in which it looks."""


def check_weights(setting: str, folder: Path) -> None:
    """Raise CheckpointError unless the weights in transformers' ``folder`` are whole; no weight is read."""
    found = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{setting} = {folder}", f"holds none of {', '.join(_WEIGHT_FILES)}", "copy it again")
    for file in _parts(found, setting):
        try:
            if file.suffix == ".safetensors":
                check_safetensors(file)
            else:
                check_torch_file(file)
        except (UnusableFile, OSError) as problem:
            raise CheckpointError(f"{setting} = {file}", str(problem), "copy or download it again") from None


def _parts(found: Path, setting: str) -> list[Path]:
    """Return the files of weights that ``found`` is, or lists."""
    if found.suffix != ".json":
        return [found]
    listed = read_json(found, setting).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{setting} = {found}", "lists no files of weights", "copy or download it again")
    return [found.parent / name for name in sorted(set(listed.values()))]


@contextmanager
def quiet(library_logging: ModuleType) -> Iterator[None]:
    """Keep diffusers or transformers, by its ``utils.logging``, from advising, and from calling a .bin an error."""
    before = library_logging.get_verbosity()
    library_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        library_logging.set_verbosity(before)


def check_complete(what: str, found: Mapping[str, Any], spare: tuple[str, ...] = ()) -> None:
    """Raise CheckpointError where weights were missing, of another shape or unused: random ones would fill the gaps.

    found: the loading info that comes with ``output_loading_info``; spare: beginnings of names that may be left unused.
    """
    for kind, words in (("missing_keys", "is missing"), ("mismatched_keys", "has another shape than config.json says"),
                        ("unexpected_keys", "is none of this network")):  # fmt: skip
        names = sorted(str(name) for name in found.get(kind) or () if not str(name).startswith(spare))
        if names:
            more = f", and so are {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(what, f"weight {names[0]} {words}{more}", "copy the folder again")


def load_diffusers(config: PretrainedAutoencoderConfig) -> Any:
    """Return the module of diffusers that ``config`` names, with the weights of its folder, all of them.

    Raises CheckpointError where they are missing or damaged.
    """
    import diffusers

    config.check_files()
    what = f"ae.from_pretrained = {config.from_pretrained}"
    try:
        with quiet(diffusers.utils.logging):
            module, found = getattr(diffusers, config.diffusers_class).from_pretrained(
                config.from_pretrained, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # (whatever damaged files make of it)
        raise CheckpointError(what, f"diffusers cannot load it: {error}", "copy the folder again") from error
    check_complete(what, found)
    return module
