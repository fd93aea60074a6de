"""Single files of weights: PyTorch's ``.pt``, ``.safetensors``, MindSpore's ``.ckpt``; names of others become ours.

.pt             facebookresearch/DiT's: published (a bare state dict), or trained ({"model", "ema", "opt", "args"})
.safetensors    one set of weights; the header holds the facts of the run and diffusers' config
.ckpt           one set of weights by their names, or several as ``model.NAME``, ``ema.NAME``
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import Format, StorageSupport, read_ckpt
from mindspeed_mm_dit.checkpoint.state import Arrays, State, check_are_floats, flatten, infer_predictor, shapes_of
from mindspeed_mm_dit.checkpoint.store import check_facts
from mindspeed_mm_dit.configs.files import read_safetensors_header
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.tuning import is_linear_weight
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.low_bit import StoredArray, quantized
from mindspeed_mm_dit.framework.mindspore_file import write_mindspore_file
from mindspeed_mm_dit.framework.safetensors_file import (
    StoredTensor,
    name_of_dtype,
    read_safetensors_file,
    write_safetensors_file,
)
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file
from mindspeed_mm_dit.integrations.formats.config_json import config_from_diffusers
from mindspeed_mm_dit.integrations.formats.families import FAMILIES, from_original, incomplete_family, to_original_names
from mindspeed_mm_dit.integrations.formats.quantized import (
    METADATA_KEY,
    Formats,
    comfy_tensors,
    nf4_tensors,
    read_formats,
    read_quantized,
)
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import rotary_tables_2d
from mindspeed_mm_dit.terminal import progress

_TREES = {
    "model": ("model", "model_state_dict", "state_dict", "module", "params"),
    "ema": ("ema", "model_ema1", "ema_state_dict", "ema_model", "model_ema", "params_ema"),
}
"""Our name of a set of weights -> keys in a file, DeepSpeed's "module" among them. JiT keeps two EMAs, and samples with
the first."""
_PREFIXES = ("module.", "_orig_mod.", "net.", "model.", "diffusion_model.")
"""Prefixes of all names if the network is part of another module: DDP's, torch.compile's, JiT's, Lightning's."""
_NETWORK = "model.diffusion_model."
_OTHER_MODELS = ("first_stage_model.", "cond_stage_model.", "conditioner.", "text_encoders.", "vae.")
"""Prefix of a network, and those of autoencoder and text encoders, in one file, as Stability AI publishes them."""
_COUNTS = ("n_averaged",)
"""Tensors other than weights in torch.optim's AveragedModel."""
_TABLES = {"feat_rope.freqs_cos": 0, "feat_rope.freqs_sin": 1}
"""Tables of rotary embeddings in LightningDiT's files, which are computed here -> index in ``rotary_tables_2d``."""
_TABLE_ERROR = 1e-2
"""Largest allowed difference from our table: the rounding of bfloat16, far less than that of other positions."""


# --- names ------------------------------------------------------------------------------------------------------------


def extract_trees(content: Any, path: str | Path) -> dict[str, Arrays]:
    """Return the sets of weights in the content of a file, by our names; a bare state dict is "model".

    Raises CheckpointError if it holds none.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict.")
    trees = {n: content[key] for n, keys in _TREES.items() for key in keys[::-1] if isinstance(content.get(key), dict)}
    if not trees and content and all(isinstance(value, np.ndarray) for value in content.values()):
        trees = {"model": content}
    if not trees:
        keys = ", ".join(map(str, list(content)[:8]))
        raise CheckpointError(f"{path} holds no weights. Its keys are: {keys}.")
    if len(trees) == 1 and len(parts := _parts(trees.get("model", {}))) > 1:  # a module of both, as Lightning saves it
        return extract_trees(parts, path)
    return {name: plain(weights, path) for name, weights in trees.items()}


def _parts(weights: Mapping[Any, Any]) -> dict[str, Arrays]:
    """Return a state dict by the first parts of its names, if all are keys of ``_TREES``."""
    parts: dict[str, Arrays] = {}
    for name, array in weights.items():
        first, _, rest = str(name).partition(".")
        parts.setdefault(first, {})[rest] = array
    return parts if all(any(part in keys for keys in _TREES.values()) for part in parts) else {}


def plain(weights: Mapping[Any, Any], path: str | Path = "SOURCE") -> Arrays:
    """Return the parameters of a state dict under the names used here: without prefixes, tables and other extras.

    Raises CheckpointError if a table that is computed here holds other positions, or an entry is no tensor.
    """
    weights = {str(name): array for name, array in weights.items() if name not in _COUNTS}
    for name, array in weights.items():
        if not isinstance(array, (np.ndarray, StoredArray)):
            raise CheckpointError(f"{path}: {shorten_repr(name)} is no tensor of numbers. Save the weights alone.")
    weights = {name: weights[name] for name in network_tensor_names(weights)}
    check_are_floats(weights, str(path))
    while prefix := next((p for p in _PREFIXES if weights and all(name.startswith(p) for name in weights)), None):
        weights = {name.removeprefix(prefix): array for name, array in weights.items()}
    weights = from_original(weights)
    for name in _TABLES.keys() & weights.keys():
        _check_table(name, weights[name])
    return {name: array for name, array in weights.items() if name not in _TABLES}


def network_tensor_names(names: Collection[str]) -> list[str]:
    """Return ``names`` without those of an autoencoder and text encoders, if a file holds a whole pipeline."""
    is_pipeline = any(name.startswith(_NETWORK) for name in names)
    return [name for name in names if not (is_pipeline and name.startswith(_OTHER_MODELS))]


def _check_table(name: str, table: np.ndarray) -> None:
    """Raise CheckpointError unless ``table`` (N, head_dim / 2 twice) is that of a square of patches counted from 0."""
    side = round(len(table) ** 0.5) if table.ndim == 2 else 0
    ours = rotary_tables_2d(table.shape[-1], side)[_TABLES[name]].repeat(2, axis=1) if side else np.zeros(0)
    if ours.shape != table.shape or np.abs(ours - table).max() > _TABLE_ERROR:
        raise CheckpointError(
            f"{name} is not the table of rotary positions of a square of patches, counted from 0, which is computed "
            "here. Weights that were trained with other positions cannot be used."
        )


def recognised(state: State) -> State:
    """Return ``state`` with the tensor that its family's networks have and it has not."""
    return replace(state, lacking=incomplete_family(state.weights))


# --- .pt and .ckpt ----------------------------------------------------------------------------------------------------

_OUR_FACTS = {"iteration", "consumed_samples"}


def read_pt(path: Path) -> State:
    """Read weights and EMA; the optimizer's state is skipped, as its tensors have no names there."""
    content = read_torch_file(path)
    trees = extract_trees(content, path)
    args = content.get("args")
    facts = dict(args) if isinstance(args, Mapping) and args.keys() >= _OUR_FACTS else {}
    check_facts(facts, path)
    return recognised(State(trees, facts))


def _write_pt(path: Path, state: State) -> None:
    """Write a bare state dict if there is one set of weights, else both sets and the facts of the run as "args"."""
    trees = {tree: {name: np.asarray(array) for name, array in arrays.items()} for tree, arrays in state.trees.items()}
    content: dict[str, Any] = {**trees, "args": state.facts}
    write_torch_file(path, next(iter(trees.values())) if len(trees) == 1 else content)


def _write_ckpt(path: Path, state: State) -> None:
    """Write all arrays; () becomes (1,)."""
    arrays = state.weights if set(state.trees) == {"model"} else flatten(state.trees)
    write_mindspore_file(path, {name: np.atleast_1d(array) for name, array in arrays.items()})


# --- .safetensors -----------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> State:
    """Read a file."""
    stored = read_stored([path], path)
    facts, config = (_object(stored.metadata, key, path) for key in ("facts", "config"))
    check_facts(facts, path)
    described = config_from_diffusers(config, f"{path}: its config.json")
    state = State({"model": plain(stored.arrays, path)}, facts, config, described)
    return recognised(replace(state, is_bfloat16=stored.is_bfloat16, notes=stored.notes))


class Stored(NamedTuple):
    """What files hold, and how."""

    arrays: Arrays
    metadata: dict[str, str]
    is_bfloat16: bool
    notes: tuple[str, ...]


def read_stored(files: Sequence[Path], what: Path, named: Collection[str] = ()) -> Stored:
    """Read weights from one file or several; matrices of few bits are widened when they are used.

    what: names them in errors; if it is an index, ``named`` are the tensors that it says they have. Raises
    CheckpointError for a file that cannot be read, a tensor or a scale that is missing.
    """
    arrays: Arrays = {}
    metadata, dtypes = dict[str, str](), dict[str, str]()
    formats: Formats = {}
    for file in files:
        formats |= read_formats(*read_safetensors_file(file, _format_names), str(file))
        content, header = read_safetensors_file(file, network_tensor_names, as_bits=True)
        arrays, metadata = arrays | content, metadata | header
        dtypes |= {name: entry["dtype"] for name, entry in read_safetensors_header(file).tensors.items()}
    check_named(named, arrays, what)
    weights, notes = read_quantized(arrays, dtypes, formats, str(what))
    return Stored(weights, metadata, 2 * list(dtypes.values()).count("BF16") > len(dtypes), notes)


def _format_names(names: Collection[str]) -> list[str]:
    return [name for name in network_tensor_names(names) if name.endswith(f".{METADATA_KEY}")]


def check_named(named: Collection[str], arrays: Arrays, index: Path) -> None:
    """Raise CheckpointError if no file has a tensor that the ``index`` of them names."""
    if missing := sorted(set(named) - arrays.keys()):
        raise CheckpointError(f"{index} names {missing[0]}, which none of the files has. Copy the folder again.")


def _object(metadata: Mapping[str, str], key: str, path: Path) -> dict[str, Any]:
    """Return the JSON object that was written under ``key`` of the header; {} if there is none."""
    try:
        content = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {key!r} of its __metadata__ is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} cannot be read: {key!r} of its __metadata__ is no JSON object.")
    return content


Rename = Callable[[Arrays], Arrays]


def _write_safetensors(path: Path, state: State, rename: Rename = dict) -> None:
    known = {"facts": state.facts, "config": state.config}
    metadata = {key: json.dumps(value) for key, value in known.items() if value}
    quantised = _names_to_quantise(state, rename)
    tensors: dict[str, StoredTensor] = {}
    arrays = rename(state.weights)
    for name, array in progress("preparing tensors", arrays.items(), total=len(arrays), unit="tensor", delay=2):
        if name in quantised:
            tensors |= _tensors_of_few_bits(name, array, state.written_as)
        else:
            tensors[name] = _tensor(name, array, state.is_bfloat16)
    write_safetensors_file(path, tensors, {"format": "pt", **metadata})


def _names_to_quantise(state: State, rename: Rename) -> set[str]:
    """Return the new names of the linear layers' weights, if these are to be written in few bits."""
    if not state.written_as:
        return set()
    parameters = parameters_of(infer_predictor(shapes_of(state.weights), state.facts, state.predictor))
    linear = {name for name, parameter in parameters.items() if is_linear_weight(name, parameter)}
    marks = rename({name: np.full(array.shape[:1], name in linear) for name, array in state.weights.items()})
    return {name for name, mark in marks.items() if mark.all()}


def _tensors_of_few_bits(name: str, array: np.ndarray | StoredArray, kind: str) -> dict[str, StoredTensor]:
    """Return the tensors of a weight in the format ``kind``; the bits of the source if they are in it."""
    stored = array.stored if isinstance(array, StoredArray) and array.stored.format == kind else None
    if stored is None or "zero" in stored.parts:
        stored = quantized(np.asarray(array, np.float32), kind)
    if kind == "bf16":
        return {name: StoredTensor("BF16", stored.shape, lambda: stored.parts["codes"])}
    if kind == "nf4":
        return {part: _tensor(part, value) for part, value in nf4_tensors(name, stored).items()}
    parts = comfy_tensors(name, stored).items()
    return {part: StoredTensor(dtype, bits.shape, partial(np.asarray, bits)) for part, (dtype, bits) in parts}


def _write_original(path: Path, state: State) -> None:
    """Write the names that the network's authors gave, as ComfyUI takes them; raises ConfigError if there are none."""
    kind = "an autoencoder"
    if not state.is_autoencoder:
        kind = infer_predictor(shapes_of(state.weights), state.facts, state.predictor).model_id
    if kind not in FAMILIES:
        raise ConfigError(f"--to original does not apply: there are no other names for {kind} here. Leave --to out.")
    _write_safetensors(path, state, lambda arrays: to_original_names(arrays, FAMILIES[kind]))


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str], as_bfloat16: bool = False) -> None:
    """Write a file as PyTorch's libraries expect it; raises OSError if the disk does not take it.

    as_bfloat16: write float32 arrays in bfloat16 if that loses nothing.
    """
    tensors = {name: _tensor(name, array, as_bfloat16) for name, array in arrays.items()}
    write_safetensors_file(path, tensors, {"format": "pt", **metadata})


def _tensor(name: str, array: np.ndarray | StoredArray, as_bfloat16: bool = False) -> StoredTensor:
    """Return what to write of an array; one of few bits is widened when it is written."""
    if as_bfloat16 and isinstance(array, StoredArray) and array.stored.format == "bf16":
        codes = array.stored.parts["codes"]
        return StoredTensor("BF16", array.shape, lambda: codes)
    bits = lambda: np.ascontiguousarray(array).view(np.uint32)  # noqa: E731
    if as_bfloat16 and array.dtype == np.float32 and not (bits() & 0xFFFF).any():
        return StoredTensor("BF16", array.shape, lambda: (bits() >> 16).astype("<u2"))
    return StoredTensor(name_of_dtype(array.dtype, name), array.shape, lambda: np.asarray(array))


def _is_file(*endings: str) -> Any:
    return lambda path: path.is_file() and path.suffix in endings


PT = Format(
    _is_file(".pt", ".pth", ".bin"),
    read_pt,
    _write_pt,
    StorageSupport.WEIGHTS,
    (".pt", ".pth", ".bin"),
    facts=lambda path: read_pt(path).facts,
)
SAFETENSORS = Format(
    _is_file(".safetensors"),
    read_safetensors,
    _write_safetensors,
    StorageSupport.ONE_TREE,
    (".safetensors",),
    facts=lambda path: read_safetensors(path).facts,
)
ORIGINAL = SAFETENSORS._replace(fits=lambda path: False, write=_write_original)  # (read as .safetensors is)
CKPT = Format(
    _is_file(".ckpt"),
    lambda path: recognised(State(read_ckpt(path))),
    _write_ckpt,
    StorageSupport.ANYTHING,
    (".ckpt",),
)
