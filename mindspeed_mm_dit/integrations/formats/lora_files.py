"""Files and folders of adapters as other programs write them (``docs/fine_tuning.md``: which program reads which).

diffusers    pytorch_lora_weights.safetensors: transformer.LAYER.lora_A.weight, alpha in the metadata alone
peft         adapter_model.safetensors: base_model.model.LAYER.lora_A.weight, alpha in adapter_config.json
kohya        FILE.safetensors: lora_unet_LAYER.lora_down.weight, .lora_up.weight, .alpha
native       FILE.safetensors: diffusion_model.LAYER.lora_A.weight, no alpha: A and B each hold the root of the scale
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.lora import Adapter, AdapterFormat, LowRank, layer_names
from mindspeed_mm_dit.configs.files import UnusableFile, list_first_names, read_safetensors_header
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import names_in_torch_file, read_torch_file
from mindspeed_mm_dit.integrations.formats.families import WAN_BLOCK
from mindspeed_mm_dit.integrations.formats.lora_names import count_blocks, to_diffusers, to_native, to_ours
from mindspeed_mm_dit.integrations.formats.lora_settings import LoraSettings, checked_alpha, settings_of
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays

Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]

DIFFUSERS, PEFT, PEFT_CONFIG = "pytorch_lora_weights", "adapter_model", "adapter_config.json"
METADATA = "lora_adapter_metadata"
_ENDINGS = (".safetensors", ".pt", ".pth", ".bin")
_KEY = re.compile(r"(.+?)[._](?:(lora_A|lora_down|lora\.down)|(lora_B|lora_up|lora\.up))(?:\.[\w-]+)??(?:\.weight)?")
_OTHER_KINDS = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lokr_w": "LoKr",
    "hada_w": "LoHa",
    "oft_": "OFT",
}
"""Prefix of the last part of a tensor's name -> the kind of adapters that has it."""
_MAX_TEXT_LENGTH = 150
_TEXT_ENCODER_PREFIX = re.compile(
    r"(base_model\.model\.)?(lora_te\d*_|te\d*\.|text_encoders?[._\d]|clip_[lg]\.|t5xxl\.)"
)
"""Prefixes of the names of adapters of a text encoder: kohya's, diffusers' and ComfyUI's."""


# --- reading ----------------------------------------------------------------------------------------------------------


def fits(path: Path) -> bool:
    """Return whether ``path``, a file or a folder of diffusers or peft, has tensors named as those of adapters."""
    try:
        file = _file(path)
        if file.suffix not in _ENDINGS:
            return False
        names = names_in_torch_file(file) if file.suffix != ".safetensors" else read_safetensors_header(file).tensors
        return any(_match(name) or _other_kind(name) for name in names)
    except (CheckpointError, UnusableFile, OSError):
        return False


def read(path: Path, layers: Iterable[str] | None = None) -> Adapter:
    """Read adapters of any program.

    layers: names of the network's linear layers, if it is known.

    Raises:
        CheckpointError: there are none, they are incomplete, they are of another network, or they are no plain LoRA.
    """
    file = _file(path)
    arrays, metadata = _read(file)
    text_encoder_names = {name for name in arrays if _TEXT_ENCODER_PREFIX.match(name)}
    if text_encoder_names and len(text_encoder_names) == len(arrays):
        raise CheckpointError(
            f"{file} holds adapters of a text encoder alone, which are not used here. Name one of the transformer."
        )
    settings = _settings(file, metadata)
    theirs, notes = _layers({name: arrays[name] for name in arrays if name not in text_encoder_names}, settings, file)
    if text_encoder_names:
        notes = (_not_applied(text_encoder_names), *notes)
    return Adapter(to_ours(theirs, layers, str(file)), str(file), notes)


def _not_applied(names: Collection[str]) -> str:
    """Return the note on adapters of text encoders, which are not read."""
    layers = {match[1] for name in names if (match := _match(name))}
    return f"adapters of a text encoder are in the file too ({len(layers)}), and are not applied"


def _other_kind(name: str) -> str | None:
    """Return the kind of adapters that a tensor of this name belongs to, if that is not plain LoRA."""
    return next((kind for begin, kind in _OTHER_KINDS.items() if f".{begin}" in name), None)


def _match(name: str) -> re.Match[str] | None:
    """Match the name of a matrix of an adapter. Names longer than any network's are not tried, to bound the time."""
    return _KEY.fullmatch(name) if len(name) <= _MAX_TEXT_LENGTH else None


def _file(path: Path) -> Path:
    if path.is_dir():
        files = [path / f"{name}{ending}" for name in (DIFFUSERS, PEFT) for ending in _ENDINGS]
        files = [file for file in files if file.is_file()] or sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            found = ", ".join(file.name for file in files[:5])
            found = found or f"neither {DIFFUSERS} nor {PEFT}, only {list_first_names(path)}"
            raise CheckpointError(f"{path} holds no adapters (LoRA): it has {found}. Name the file or run of adapters.")
        return files[0]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist.")
    return path


def _read(file: Path) -> tuple[Arrays, Mapping[str, str]]:
    if file.suffix == ".safetensors":
        return read_safetensors_file(file)
    content = read_torch_file(file) if file.suffix in _ENDINGS else {}
    if not content or not all(isinstance(array, np.ndarray) for array in content.values()):
        raise CheckpointError(f"{file} holds no adapters. Give a file ending in {', '.join(_ENDINGS)}.")
    return content, {}


def _settings(file: Path, metadata: Mapping[str, str]) -> LoraSettings:
    """Return the settings of rank and alpha, from diffusers' metadata or the adapter_config.json next to the file."""
    config_path = file.parent / PEFT_CONFIG
    if METADATA not in metadata:
        return (
            settings_of(read_json(config_path, "adapter"), str(config_path))
            if config_path.is_file()
            else LoraSettings()
        )
    try:
        content = json.loads(metadata[METADATA])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {METADATA} is not JSON: {error}. Copy or download the file again.") from None
    settings = content if isinstance(content, dict) else {}
    network_settings = {key: value for key, value in settings.items() if not _TEXT_ENCODER_PREFIX.match(key)}
    return settings_of(
        {key.removeprefix("transformer."): value for key, value in network_settings.items()}, f"{file}: {METADATA}"
    )


def _layers(arrays: Arrays, settings: LoraSettings, file: Path) -> tuple[dict[str, LowRank], tuple[str, ...]]:
    """Return the adapters by the layer names in the file, and notes."""
    downs: dict[str, np.ndarray] = {}
    ups: dict[str, np.ndarray] = {}
    alphas: dict[str, float] = {}
    for name, array in arrays.items():
        if name.endswith(".alpha") and array.size == 1:
            alphas[name.removesuffix(".alpha")] = checked_alpha(array.item(), f"{file}: {name}")
        elif (match := _match(name)) and array.ndim == 2:
            _check_numbers(array, f"{file}: {name}")
            (downs if match[2] else ups)[match[1]] = array.astype(np.float32, copy=False)
        else:
            kind = _other_kind(name)
            problem = f"is part of {kind}" if kind else "is no part of a LoRA of linear layers"
            raise CheckpointError(
                f"{file}: {name} {array.shape} {problem}. Name a file of plain LoRA; no other adapters are read."
            )
    for layer in downs.keys() ^ ups.keys() | (alphas.keys() - downs.keys()):
        raise CheckpointError(f"{file}: {layer} lacks one of its two matrices. Copy or download the file again.")
    if not downs:
        raise CheckpointError(f"{file} holds no adapters. Name a file of LoRA adapters.")
    for layer, down in downs.items():
        if ups[layer].shape[1] != len(down) or not len(down):
            raise CheckpointError(
                f"{file}: {layer} has matrices of different ranks: {ups[layer].shape} and {down.shape}. Copy or "
                "download the file again."
            )
    is_native = not alphas and all(layer.startswith("diffusion_model.") for layer in downs)
    defaults_for_missing = [name for name in downs if name not in alphas and not settings.has_alpha(name)]
    notes = (_assumed_note(len(defaults_for_missing), len(downs)),) if defaults_for_missing and not is_native else ()
    try:
        default_alphas = {name: settings.alpha(name, len(down)) for name, down in downs.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error} Use the file with its own settings.") from None
    layers = {name: LowRank(down, ups[name], alphas.get(name, default_alphas[name])) for name, down in downs.items()}
    return _without_zeros(layers), notes


def _check_numbers(array: np.ndarray, what: str) -> None:
    """Raise CheckpointError unless ``array`` holds finite floating-point numbers."""
    if array.dtype.kind != "f":
        raise CheckpointError(
            f"{what} is stored in {array.dtype}, and adapters are floating-point numbers. Name another file."
        )
    if not np.isfinite(array).all():
        raise CheckpointError(f"{what} holds numbers that are not finite. Its training may have diverged.")


def _assumed_note(count: int, total: int) -> str:
    where = "" if count == total else f" for {count} of its {total} layers"
    return (
        f"the file has no alpha{where}, which is assumed to be the rank, as diffusers, ComfyUI and musubi-tuner do: "
        "if it was trained with twice that, its full strength is --lora FILE:2"
    )


def _without_zeros(layers: dict[str, LowRank]) -> dict[str, LowRank]:
    """Undo :func:`_padded_to_one_rank` and :func:`_with_missing_layers`: leave out ranks that are 0 in both A and B."""
    used_ranks = {name: lora.down.any(axis=1) | lora.up.any(axis=0) for name, lora in layers.items()}
    if not any(ranks.any() for ranks in used_ranks.values()):
        return layers
    return {
        name: lora if ranks.all() else LowRank(lora.down[ranks], lora.up[:, ranks], lora.scale * int(ranks.sum()))
        for name, lora in layers.items()
        if (ranks := used_ranks[name]).any()
    }


# --- writing ----------------------------------------------------------------------------------------------------------


def _diffusers(path: Path, adapter: Adapter, shapes: Shapes) -> tuple[str, ...]:
    theirs = to_diffusers(adapter.layers)
    settings = {f"transformer.{key}": value for key, value in _lora_config(theirs).items()}
    metadata = {METADATA: json.dumps(settings, indent=2, sort_keys=True)}
    write_arrays(path / f"{DIFFUSERS}.safetensors", _named(theirs, "transformer."), metadata)
    return ()


def _peft(path: Path, adapter: Adapter, shapes: Shapes) -> tuple[str, ...]:
    theirs = to_diffusers(adapter.layers)
    write_arrays(path / f"{PEFT}.safetensors", _named(theirs, "base_model.model."), {})
    text = json.dumps(_lora_config(theirs), indent=2, sort_keys=True)
    (path / PEFT_CONFIG).write_text(f"{text}\n", encoding="utf-8")
    return ()


def _named(layers: Mapping[str, LowRank], prefix: str) -> dict[str, np.ndarray]:
    named = {f"{prefix}{layer}.lora_A.weight": lora.down for layer, lora in layers.items()}
    return named | {f"{prefix}{layer}.lora_B.weight": lora.up for layer, lora in layers.items()}


def _lora_config(layers: Mapping[str, LowRank]) -> dict[str, Any]:
    """Return peft's LoraConfig of adapters: rank and alpha of the first, and those of each layer that differs."""
    first = next(iter(layers.values()))
    ranks = {_exact_pattern(n): lora.rank for n, lora in layers.items() if lora.rank != first.rank}
    alphas = {_exact_pattern(n): _number(lora.alpha) for n, lora in layers.items() if lora.alpha != first.alpha}
    off = dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out"), False)
    return {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": _number(first.alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": sorted(layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        **off,
    }


def _exact_pattern(name: str) -> str:
    """Return ``name`` as a regular expression, which is what peft takes for patterns."""
    return re.escape(name).replace("\\_", "_")


def _number(x: float) -> float | int:
    return int(x) if float(x).is_integer() else x


def _kohya(path: Path, adapter: Adapter, shapes: Shapes) -> tuple[str, ...]:
    layers, notes = _with_missing_layers(adapter, shapes)
    arrays: dict[str, np.ndarray] = {}
    for name, lora in to_native(_padded_to_one_rank(layers), layer_names(shapes)).items():
        name = f"lora_unet_{name.replace('.', '_')}"
        arrays |= {f"{name}.lora_down.weight": lora.down, f"{name}.lora_up.weight": lora.up}
        arrays[f"{name}.alpha"] = np.array(lora.alpha, np.float32)
    first = next(iter(adapter.layers.values()))
    write_arrays(path, arrays, {"ss_network_dim": str(first.rank), "ss_network_alpha": str(_number(first.alpha))})
    return notes


def _padded_to_one_rank(layers: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Pad all adapters with zeros to the largest rank.

    In a file without metadata diffusers takes the most common rank as the alpha of all layers, which would change the
    strength of layers of another rank.
    """
    largest = max(lora.rank for lora in layers.values())
    return {name: lora if lora.rank == largest else _padded(lora, largest) for name, lora in layers.items()}


def _padded(lora: LowRank, rank: int) -> LowRank:
    padding = rank - lora.rank
    return LowRank(
        np.pad(lora.down, ((0, padding), (0, 0))), np.pad(lora.up, ((0, 0), (0, padding))), lora.scale * rank
    )


def _with_missing_layers(adapter: Adapter, shapes: Shapes) -> tuple[Mapping[str, LowRank], tuple[str, ...]]:
    """Add zeros for missing layers of Wan's blocks: diffusers reads a kohya file of Wan only if it has all of them."""
    blocks = range(count_blocks([name for name in shapes or adapter.layers if name.startswith("blocks.")]))
    block_layers = [f"blocks.{i}.{part}" for i in blocks for part in WAN_BLOCK]
    missing = [name for name in block_layers if name not in adapter.layers]
    if not missing or len(missing) == len(block_layers):  # (of another network than Wan)
        return adapter.layers, ()
    if not shapes:
        return adapter.layers, (
            f"diffusers cannot read this file, which has no {missing[0]}; ComfyUI and musubi-tuner can. With --model "
            "the missing layers are written as zeros, and diffusers can read it too",
        )
    zeros = {name: shapes[f"{name}.weight"] for name in missing}
    fillers = {
        name: LowRank(np.zeros((1, columns), np.float32), np.zeros((rows, 1), np.float32), 1.0)
        for name, (rows, columns) in zeros.items()
    }
    return {**adapter.layers, **fillers}, (
        f"{len(missing)} layers without an adapter are written as zeros: diffusers needs every one of them",
    )


def _native(path: Path, adapter: Adapter, shapes: Shapes) -> tuple[str, ...]:
    native = to_native(_padded_to_one_rank(adapter.layers), layer_names(shapes))
    folded = {name: lora.with_unit_scale() for name, lora in native.items()}
    write_arrays(path, _named(folded, "diffusion_model."), {})
    return ()


DIFFUSERS_LORA = AdapterFormat(fits, read, _diffusers, is_folder=True)
PEFT_LORA = AdapterFormat(fits, read, _peft, is_folder=True)
KOHYA_LORA = AdapterFormat(fits, read, _kohya, is_folder=False)
NATIVE_LORA = AdapterFormat(fits, read, _native, is_folder=False)
