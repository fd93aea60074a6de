"""Helpers around Hugging Face's ``from_pretrained``: check files before, silence its logs, check its result."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import WEIGHT_FILES, PretrainedAutoencoderConfig
from mindspeed_mm_dit.configs.files import (
    UnusableFile,
    WeightFile,
    check_model_folder,
    check_names_no_code,
    read_safetensors_header,
    weight_file_in,
)
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import names_in_torch_file, read_torch_file

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names of the weight files in a folder, in the order in which transformers looks for them."""


def check_weights(setting: str, folder: Path) -> None:
    """Raise CheckpointError unless the weights in a transformers ``folder`` are complete; reads no weights.

    Raises ConfigError if its files name code.
    """
    check_model_folder(setting, folder)
    check_names_no_code(setting, folder)
    num_tensors = 0
    for file in _parts(weights_of_transformers(setting, folder).path, setting):
        try:
            is_new = file.suffix == ".safetensors"
            tensors = (
                read_safetensors_header(file).tensors if is_new else {name: {} for name in names_in_torch_file(file)}
            )
        except (UnusableFile, OSError) as problem:
            raise CheckpointError(f"{setting} = {file}", str(problem), "copy or download it again") from None
        num_tensors += len(tensors)
        for name, dtype in ((name, str(entry.get("dtype", "F32"))) for name, entry in tensors.items()):
            if name.endswith(".weight") and not dtype.startswith(("F", "BF")):
                reason = f"weight {name} is stored in {short_repr(dtype)}, which is not read here"
                raise CheckpointError(f"{setting} = {file}", reason, "use a folder in bfloat16")
    _check_sizes(setting, folder / "config.json", num_tensors)


def read_tensors(setting: str, folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors in a transformers ``folder``; low-precision ones as float32."""
    for file in _parts(weights_of_transformers(setting, folder).path, setting):
        if file.suffix == ".safetensors":
            yield from read_safetensors_file(file)[0].items()
        elif names_in_torch_file(file):  # (none in files from before PyTorch 1.6)
            yield from read_torch_file(file).items()


def are_equal_if_stored(setting: str, folder: Path, names: Collection[str]) -> bool:
    """Return whether those of the tensors ``names`` that a transformers ``folder`` holds have the same bytes."""
    stored: list[tuple[Any, np.ndarray]] = []
    for file in _parts(weights_of_transformers(setting, folder).path, setting):
        if file.suffix == ".safetensors":
            header = read_safetensors_header(file)
            data = np.memmap(file, np.uint8, "r")[header.start :]
            entries = [header.tensors[name] for name in names if name in header.tensors]
            stored += [((e["dtype"], e["shape"]), data[slice(*e["data_offsets"])]) for e in entries]
        elif set(names).intersection(names_in_torch_file(file)):
            arrays = [array for name, array in read_torch_file(file).items() if name in names]
            stored += [((array.dtype, array.shape), array.reshape(-1).view(np.uint8)) for array in arrays]
    return all(
        kind == stored[0][0] and all(np.array_equal(data[i : i + _CHUNK], stored[0][1][i : i + _CHUNK])
                                     for i in range(0, len(data), _CHUNK))
        for kind, data in stored[1:]
    )  # fmt: skip


_CHUNK = 1 << 26
"""Bytes that are compared at once."""


def _check_sizes(setting: str, file: Path, num_tensors: int) -> None:
    """Raise CheckpointError for impossible sizes in a config.json, before a network is built with them."""
    content = read_json(file, setting)
    halves = (content, content.get("text_config"), content.get("vision_config"))
    parts = [part for part in halves if isinstance(part, dict)]
    for key, value in ((key, part[key]) for part in parts for key in sorted(_SIZES & part.keys())):
        most = num_tensors if key.endswith("_layers") and num_tensors else MOST_WIDE
        if value is not None and not (type(value) is int and 0 < value <= most):
            reason = "does not fit the weights in its folder"
            raise CheckpointError(f"{setting} = {file}: {key} = {short_repr(value)}", reason, "copy it again")


def weights_of_transformers(setting: str, folder: Path) -> WeightFile:
    """Return the file of weights, or the list of its parts, that transformers reads; raises CheckpointError."""
    try:
        return weight_file_in(folder, _WEIGHT_FILES)
    except UnusableFile as problem:
        raise CheckpointError(f"{setting} = {folder}", str(problem), "copy it again") from None


def _parts(path: Path, setting: str) -> list[Path]:
    """Return the weight files: ``path`` itself, or those that it lists."""
    if path.suffix != ".json":
        return [path]
    listed = read_json(path, setting).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{setting} = {path}", "lists no weight files", "copy or download it again")
    return [path.parent / name for name in sorted(set(listed.values()))]


MOST_WIDE = 1 << 20
_SIZES = {
    "num_layers", "num_hidden_layers", "num_heads", "num_attention_heads", "d_model", "d_kv", "d_ff", "hidden_size",
    "intermediate_size", "vocab_size", "patch_size", "num_channels", "max_position_embeddings", "projection_dim",
}  # fmt: skip
"""Keys of a config.json of transformers by which modules are built."""


@contextmanager
def quiet(library_logging: ModuleType) -> Iterator[None]:
    """Silence diffusers or transformers via its ``utils.logging``, which logs hints, and an error for each .bin."""
    before = library_logging.get_verbosity()
    library_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        library_logging.set_verbosity(before)


def check_complete(what: str, loading_info: Mapping[str, Any], optional: tuple[str, ...] = ()) -> None:
    """Raise CheckpointError if weights were missing, misshapen or unused: diffusers initialises those at random.

    loading_info: from ``output_loading_info``; optional: prefixes of names that may remain unused.
    """
    problems = []
    for kind, words in (
        ("missing_keys", "is missing"),
        ("mismatched_keys", "has another shape than config.json says"),
        ("unexpected_keys", "is unknown to this network"),
    ):
        if names := sorted(str(name) for name in loading_info.get(kind) or () if not str(name).startswith(optional)):
            more = f", and so are {len(names) - 1} more" if len(names) > 1 else ""
            problems.append(f"weight {names[0]} {words}{more}")
    if problems:
        raise CheckpointError(what, "; ".join(problems), "copy the folder again")


def load_diffusers(config: PretrainedAutoencoderConfig) -> Any:
    """Return the diffusers module that ``config`` names, with all weights loaded from its folder.

    Raises CheckpointError if weights are missing or damaged.
    """
    import diffusers

    config.check_files()
    path = Path(config.from_pretrained)
    variant = weight_file_in(path, WEIGHT_FILES).variant if path.is_dir() else None
    what = f"ae.from_pretrained = {config.from_pretrained}"
    try:
        with quiet(diffusers.utils.logging):
            module, loading_info = getattr(diffusers, config.diffusers_class).from_pretrained(
                path, variant=variant, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:  # (damaged files can raise anything)
        raise CheckpointError(what, f"diffusers cannot load it: {error}", "copy the folder again") from error
    check_complete(what, loading_info)
    return module
