"""Read an AutoencoderKL in diffusers' format: config.json, and the weights as arrays."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig, config_file
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file

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
        raise CheckpointError(
            f"ae: {path}", "no such file", "put diffusers' config.json into the folder of the weights"
        )
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
            f"{path}: norm_num_groups = {architecture.norm_num_groups}, "
            f"block_out_channels = {list(architecture.block_out_channels)}",
            "sizes must be positive, and norm_num_groups divide every width",
            "copy or download the file again",
        )
    _require_known(path, "act_fn", {architecture.act_fn}, "silu")
    for key, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        types: tuple[str, ...] = getattr(architecture, key)
        _require_known(path, key, set(types), kind)
        if len(types) != len(architecture.block_out_channels):
            levels = len(architecture.block_out_channels)
            raise CheckpointError(f"{path}: {key}", f"names {len(types)} levels, block_out_channels has {levels}")
    return architecture


def _require_known(path: Path, key: str, kinds: set[str], known: str) -> None:
    if kinds - {known}:
        what, cure = f"{path}: {key} = {', '.join(sorted(kinds - {known}))}", "use an autoencoder of the SD-VAE kind"
        raise CheckpointError(what, f"only {known} is supported", cure)


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
    problems = [*(f"{name} is missing" for name in missing[:1]), *(f"{name} is unknown" for name in unknown[:1])]
    if problems:
        raise CheckpointError(what, f"weight {'; '.join(problems)}", "use the files of a diffusers AutoencoderKL")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(what, f"weight {name} is {weights[name].shape}, config.json makes it {shape}")
        if weights[name].dtype.kind != "f":
            reason = f"weight {name} is stored in {weights[name].dtype}, which is not read here"
            raise CheckpointError(what, reason, "use a file in bfloat16")
