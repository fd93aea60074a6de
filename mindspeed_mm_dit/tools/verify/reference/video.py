"""Files of reference values of text-to-video models: their networks, and the rows of a group of names.

The first part of a name is its group: ``dit/output`` is in the group ``dit``. Each group is one class, created when its
first quantity is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.published import trees_of
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.checkpoint.weights import preferred, read_weights
from mindspeed_mm_dit.configs.custom_dit import CustomDiTConfig
from mindspeed_mm_dit.configs.wan import WanConfig
from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.models.video_transformer import CustomDiT, Wan
from mindspeed_mm_dit.objectives.wan_flow.draws import batch
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow
from mindspeed_mm_dit.tools.verify.reference.file import ReferenceArrays, Tensor, Weights, config_of, loaded
from mindspeed_mm_dit.tools.verify.table import Quantity, Rows

NETWORKS: dict[str, tuple[str, type, Callable[[Any], Any]]] = {
    "dit": ("--checkpoint", CustomDiTConfig, CustomDiT),
    "wan": ("--wan", WanConfig, Wan),
}
"""Group -> flag of its weights, config, network."""
NUM_TRAIN_TIMESTEPS = 1000
"""Number of rows in the training tables, if a file has none."""
_PATCH = ("frames", "height", "width")
_SIZES = ("num_layers", "num_heads", "head_dim", *(f"patch_size ({side})" for side in _PATCH), "in_channels",
          "out_channels", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len")  # fmt: skip
_DIFFUSERS = {"num_heads": "num_attention_heads", "head_dim": "attention_head_dim"}
"""Key of ``dit`` -> the same key of ``wan``."""


class TextToVideo:
    """The arrays of a file, and networks with the weights of each flag; groups compute its quantities."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        self.arrays, self.weights = arrays, weights
        self.network = cache(self.fresh_network)
        self.group = cache(lambda group: group(self))

    @cached_property
    def autoencoder(self) -> Any:
        """Wan's autoencoder, from --vae, with the sizes in its own config.json."""
        from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
        from mindspeed_mm_dit.models.diffusers_autoencoders import AutoencoderKLWan

        with _named("--vae"):
            folder = {"from_pretrained": str(self.weights["--vae"])}
            return AutoencoderKLWan(WanVAEConfig(**WanVAEConfig.spelled_out(folder)))

    @cached_property
    def text_encoder(self) -> Any:
        """UMT5, from --text-encoder, in float32."""
        from mindspeed_mm_dit.configs.text_encoder import UMT5Config
        from mindspeed_mm_dit.models.text_encoders import UMT5

        with _named("--text-encoder"):
            return UMT5.build(UMT5Config(str(self.weights["--text-encoder"]), dtype="fp32"))

    def fresh_network(self, kind: str) -> Any:
        """Return a new network of NETWORKS, with its config as ``.config``; the one in :attr:`network` never changes.

        Raises CheckpointError for invalid sizes, and for weights of another network.
        """
        flag, config_class, network = NETWORKS[kind]
        with _named(flag):
            weights, stored = _read(find_checkpoint(self.weights[flag], flag))
        sizes, what = stored or self._sizes(kind), f"{flag}: config" if stored else "--reference: config"
        # (latents of one patch are a placeholder: the caller checks those of the file)
        config = config_of(config_class, {**sizes, "latent_size": sizes.get("patch_size")}, what)
        return loaded(network, config, weights, flag)

    def checked_network(self, kind: str) -> Any:
        """Return a network, and check the inputs ``dit/`` and ``sample/`` of the file against it.

        Raises CheckpointError, naming the array, for inputs that do not fit the network or each other.
        """
        network = self.network(kind)
        _check_inputs(self.arrays, network.config)
        return network

    def _sizes(self, kind: str) -> dict[str, Any]:
        """Return the sizes in the file's ``config`` by the keys of the section ``predictor``."""
        sizes: dict[str, Any] = self.arrays.sizes(_SIZES)
        sizes["patch_size"] = [sizes.pop(f"patch_size ({side})") for side in _PATCH]
        return {_DIFFUSERS.get(key, key): value for key, value in sizes.items()} if kind == "wan" else sizes


def rows_of_group(prefix: str, group: Callable[[TextToVideo], Any], needs: str | None, *rows: Quantity) -> Rows:
    """Return rows whose names start with ``prefix``, computed by one ``group`` of the file.

    needs: flag of the weights, for rows that name none.
    """

    def of_file(row: Quantity) -> Quantity:
        return dataclasses.replace(
            row, names=f"{prefix}/{row.names}", needs=row.needs or needs,
            compute=lambda file, *groups: row.compute(file.group(group), *groups),
        )  # fmt: skip

    return tuple(map(of_file, rows))


def tutorial_flow(shift: float, rows: int = NUM_TRAIN_TIMESTEPS) -> WanFlow:
    """Return the objective with the tutorial's constants."""
    config = WanFlowConfig(num_train_timesteps=rows, shift=shift, sigma_min=0.0, extra_one_step=True)
    return WanFlow(config)


def draws_at(process: WanFlow, row: int, noise: np.ndarray) -> list[Tensor]:
    """Return the draws of a batch whose samples are all at ``row`` of the table of times."""
    values = batch(process.config, np.full(len(noise), row), noise)
    return [ops.tensor(values[name]) for name in process.draw_names]


def check_latents(config: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError, naming the array, for latents (B, C, F, H, W) that do not fit a network."""
    try:
        config.check_latents(shape[1:])
    except ConfigError as error:
        raise CheckpointError(f"--reference: {name}: {error.what}", error.reason, error.cure) from None


def _check_inputs(arrays: ReferenceArrays, config: Any) -> None:
    latents = [name for name in ("dit/x", "sample/start") if name in arrays]
    for name in latents:
        check_latents(config, name, arrays[name].shape)
        arrays.check_shape(name, arrays[latents[0]].shape)
    x, text = arrays[latents[0] if latents else "dit/x"], arrays["dit/text"]
    B, L = len(x), text.shape[-2] if text.ndim > 2 else 0
    expected = {
        "dit/text": (B, 1, L, config.text_dim) if text.ndim == 4 else (B, L, config.text_dim), "dit/t": (B,),
        "dit/t_shared": (1,), "dit/target": (B, config.out_channels, *x.shape[2:]), "sample/negative_text": text.shape,
    }  # fmt: skip
    for name, shape in expected.items():
        if name in arrays:
            arrays.check_shape(name, shape)


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """Prefix errors with the flag that named a part, because the part only knows its file."""
    try:
        yield
    except UserError as error:
        if error.what.startswith(flag):
            raise
        raise type(error)(f"{flag}: {error.what}", error.reason, error.cure) from None


def _read(path: Path) -> tuple[Mapping[str, np.ndarray], dict[str, Any]]:
    """Return weights and, from a .pt, its ``config`` without the private keys of diffusers (leading underscore)."""
    if path.suffix not in (".pt", ".pth", ".bin"):
        return read_weights(path, use_ema=False), {}
    content = read_torch_file(path)
    config = content.get("config")
    settings = {k: v for k, v in config.items() if not str(k).startswith("_")} if isinstance(config, Mapping) else {}
    return preferred(trees_of(content, path), use_ema=False), settings
