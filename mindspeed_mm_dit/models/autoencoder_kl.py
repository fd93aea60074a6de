"""AutoencoderKL, the autoencoder of latent diffusion (Rombach et al. 2022), on every framework: files and latents."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig, Flux2VAEConfig, config_file
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.autoencoder_kl_network import AutoencoderKLNetwork, KLArchitecture, Tensor
from mindspeed_mm_dit.models.joint import pack, unpack
from mindspeed_mm_dit.models.layers import as_tokens

_OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


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


class AutoencoderKL(Autoencoder):
    """Encodes images to scaled latents and back."""

    def __init__(self, config: AutoencoderKLConfig | Flux2VAEConfig) -> None:
        super().__init__(config)
        architecture, weights = self._read()
        network = AutoencoderKLNetwork(architecture)
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        require_same_names(f"ae.from_pretrained = {config.from_pretrained}", shapes, weights)
        runtime.load_arrays(network, weights)
        self.network = runtime.freeze(network, config.dtype)
        runtime.compiled(self.network.encoder)
        runtime.compiled(self.network.decoder)

    def _read(self) -> tuple[KLArchitecture, dict[str, np.ndarray]]:
        return read_autoencoder_kl(self.config)

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with ops.no_grad(), runtime.low_precision(False):  # (``ae.dtype`` sets the precision, not --bf16)
            mean, log_variance = ops.chunk(ops.to_float32(self.network(images)), 2, 1)  # 2 x (B, C, h, w)
            return mean, ops.exp(0.5 * ops.clamp(log_variance, -30.0, 20.0))

    def decode(self, scaled_latents: Tensor) -> Tensor:
        with ops.no_grad(), runtime.low_precision(False):
            return ops.to_float32(self._decoded(self.raw(scaled_latents)))

    def _decoded(self, raw: Tensor) -> Tensor:
        return self.network.decode(raw)


class AutoencoderKLFlux2(AutoencoderKL):
    """FLUX.2's, which cuts latents into patches of 2 x 2; its config has their mean and std (``scale``)."""

    def _read(self) -> tuple[KLArchitecture, dict[str, np.ndarray]]:
        architecture, weights = super()._read()
        return architecture, {name: array for name, array in weights.items() if not name.startswith("bn.")}

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = super().moments(images)  # (B, C, H, W) each
        return _in_patches(mean), _in_patches(std)

    def _decoded(self, raw: Tensor) -> Tensor:
        return super()._decoded(unpack(as_tokens(raw), *raw.shape[2:]))


def _in_patches(x: Tensor) -> Tensor:
    B, C, H, W = x.shape
    return ops.reshape(ops.permute(pack(x), (0, 2, 1)), (B, 4 * C, H // 2, W // 2))
