"""Files of pretrained models in the folders of transformers and diffusers: check them, read them, load them."""

from __future__ import annotations

import dataclasses
import logging
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import (
    WEIGHT_FILES,
    AutoencoderKLConfig,
    PretrainedAutoencoderConfig,
    config_file,
)
from mindspeed_mm_dit.configs.files import (
    UnusableFile,
    WeightFile,
    check_model_folder,
    check_names_no_code,
    error_text,
    read_safetensors_header,
    weight_file_in,
)
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file
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
        except (UnusableFile, OSError) as error:
            problem = error if isinstance(error, UnusableFile) else f"cannot be read: {error_text(error)}"
            raise CheckpointError(f"{setting} = {file} {problem}. Copy or download it again.") from None
        num_tensors += len(tensors)
        for name, dtype in ((name, str(entry.get("dtype", "F32"))) for name, entry in tensors.items()):
            if name.endswith(".weight") and not dtype.startswith(("F", "BF")):
                raise CheckpointError(
                    f"{setting} = {file} has weight {name} in {shorten_repr(dtype)}, which is not supported. Use a "
                    "folder in bfloat16."
                )
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
        kind == stored[0][0]
        and all(np.array_equal(data[i : i + _CHUNK], stored[0][1][i : i + _CHUNK]) for i in range(0, len(data), _CHUNK))
        for kind, data in stored[1:]
    )


_CHUNK = 1 << 26
"""Bytes that are compared at once."""


def _check_sizes(setting: str, file: Path, num_tensors: int) -> None:
    """Raise CheckpointError for impossible sizes in a config.json, before a network is built with them."""
    content = read_json(file, setting)
    halves = (content, content.get("text_config"), content.get("vision_config"))
    parts = [part for part in halves if isinstance(part, dict)]
    for key, value in ((key, part[key]) for part in parts for key in sorted(_SIZES & part.keys())):
        most = num_tensors if key.endswith("_layers") and num_tensors else MAX_WIDENED
        if value is not None and not (type(value) is int and 0 < value <= most):
            raise CheckpointError(
                f"{setting} = {file} has {key} = {shorten_repr(value)}, which does not fit the weights in its folder. "
                "Copy it again."
            )


def weights_of_transformers(setting: str, folder: Path) -> WeightFile:
    """Return the file of weights, or the list of its parts, that transformers reads; raises CheckpointError."""
    try:
        return weight_file_in(folder, _WEIGHT_FILES)
    except UnusableFile as problem:
        raise CheckpointError(f"{setting} = {folder} {problem}. Copy it again.") from None


def _parts(path: Path, setting: str) -> list[Path]:
    """Return the weight files: ``path`` itself, or those that it lists."""
    if path.suffix != ".json":
        return [path]
    listed = read_json(path, setting).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{setting} = {path} lists no weight files. Copy or download it again.")
    return [path.parent / name for name in sorted(set(listed.values()))]


MAX_WIDENED = 1 << 20
_SIZES = {
    *("num_layers", "num_hidden_layers", "num_heads", "num_attention_heads", "d_model", "d_kv", "d_ff", "hidden_size"),
    *("intermediate_size", "vocab_size", "patch_size", "num_channels", "max_position_embeddings", "projection_dim"),
}
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
        raise CheckpointError(f"{what} does not fit its config.json: {'; '.join(problems)}. Copy the folder again.")


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
        raise CheckpointError(
            f"{what} cannot be loaded by diffusers: {error_text(error)}. Copy the folder again."
        ) from error
    check_complete(what, loading_info)
    return module


# --- AutoencoderKL: config.json and the weights as arrays -------------------------------------------------------------


_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass(frozen=True)
class KLArchitecture:
    """The keys of diffusers' config.json that define the network, with diffusers' defaults."""

    in_channels: int = 3
    """Channels of an image."""
    out_channels: int = 3
    """Channels of a decoded image."""
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    """Kind of each level of the encoder; only this kind is supported."""
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    """Kind of each level of the decoder; only this kind is supported."""
    block_out_channels: tuple[int, ...] = (64,)
    """Width of each level, from full resolution down; each further level halves height and width."""
    decoder_block_out_channels: tuple[int, ...] | None = None
    """The same of the decoder, in the order of the encoder; null: as in the encoder."""
    layers_per_block: int = 1
    """Residual blocks per level of the encoder; the decoder has one more."""
    act_fn: str = "silu"
    """Activation; only silu is supported."""
    latent_channels: int = 4
    """Channels of a latent."""
    norm_num_groups: int = 32
    """Groups of every GroupNorm."""
    use_quant_conv: bool = True
    """Whether a 1 x 1 convolution follows the encoder."""
    use_post_quant_conv: bool = True
    """Whether a 1 x 1 convolution precedes the decoder."""
    mid_block_add_attention: bool = True
    """Whether the middle blocks of encoder and decoder have self-attention over all pixels."""


def read_autoencoder_kl(config: AutoencoderKLConfig) -> tuple[KLArchitecture, dict[str, np.ndarray]]:
    """Read architecture and weights (by diffusers' names) from the folder or weight file ``from_pretrained``.

    Raises:
        CheckpointError: a file is missing or damaged, or the network differs from model.json.
    """
    weights = config.weight_file()
    architecture = read_architecture(config_file(config.from_pretrained))
    return architecture, with_new_names(_read_weights(weights))


def read_architecture(path: Path) -> KLArchitecture:
    """Read a diffusers config.json; raises CheckpointError for an unsupported kind of network."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Put diffusers' config.json into the folder of the weights.")
    content = read_json(path, "ae")
    known = {field.name for field in dataclasses.fields(KLArchitecture)}
    architecture = from_mapping(KLArchitecture, {k: v for k, v in content.items() if k in known}, str(path))
    positive = (
        architecture.in_channels,
        architecture.out_channels,
        architecture.layers_per_block,
        architecture.latent_channels,
        architecture.norm_num_groups,
    )
    widths = (*architecture.block_out_channels, *(architecture.decoder_block_out_channels or ()))
    if min(positive) < 1 or any(w < 1 or w % architecture.norm_num_groups for w in widths):
        raise CheckpointError(
            f"{path} has norm_num_groups = {architecture.norm_num_groups}, block_out_channels = "
            f"{list(architecture.block_out_channels)}, but sizes must be positive, and norm_num_groups must divide "
            "every width. Copy or download the file again."
        )
    _require_known(path, "act_fn", {architecture.act_fn}, "silu")
    for key, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        types: tuple[str, ...] = getattr(architecture, key)
        _require_known(path, key, set(types), kind)
        if len(types) != len(architecture.block_out_channels):
            levels = len(architecture.block_out_channels)
            raise CheckpointError(f"{path} has {key} for {len(types)} levels, but block_out_channels for {levels}.")
    return architecture


def _require_known(path: Path, key: str, kinds: set[str], known: str) -> None:
    if kinds - {known}:
        raise CheckpointError(
            f"{path} has {key} = {', '.join(sorted(kinds - {known}))}, but only {known} is supported. Use an "
            "autoencoder of the SD-VAE kind."
        )


def _read_weights(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".ckpt" and not zipfile.is_zipfile(path):
        return read_mindspore_file(path)
    if path.suffix == ".safetensors":
        return read_safetensors_file(path)[0]
    content: Any = read_torch_file(path)
    return dict(content.get("state_dict", content))


def with_new_names(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename the attention weights of files from before diffusers 0.18 (2023): query is now to_q."""
    return {_new_name(name): array for name, array in weights.items()}


def _new_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_OLD_NAMES[last]}.{leaf}" if last in _OLD_NAMES and ".attentions." in name else name


def require_same_names(what: str, expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError unless ``weights`` has exactly the names and shapes ``expected``."""
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    problems = [*(f"lacks weight {name}" for name in missing[:1]), *(f"has unknown {name}" for name in unknown[:1])]
    if problems:
        raise CheckpointError(f"{what} {' and '.join(problems)}. Use the files of a diffusers AutoencoderKL.")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{what} has weight {name} of shape {weights[name].shape}, but config.json makes it {shape}."
            )
        if weights[name].dtype.kind != "f":
            raise CheckpointError(
                f"{what} has weight {name} in {weights[name].dtype}, which is not supported. Use a file in bfloat16."
            )
