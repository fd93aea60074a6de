"""A file of reference values of text to video, its networks, and what a group of its quantities has to offer.

The names in such a file begin with the group they belong to: ``dit/output`` is of the group ``dit``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.fitting import check_names
from mindspeed_mm_dit.checkpoint.shapes import check_claimed_sizes
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.checkpoint.weights import choose_tree, read_weights
from mindspeed_mm_dit.configs.custom_dit import CustomDiTConfig
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.configs.wan import WanConfig
from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.models.custom_dit import CustomDiT
from mindspeed_mm_dit.models.wan import Wan
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow
from mindspeed_mm_dit.verify.reference.file import FORMAT, Given

Tensor = Any
Parts = Mapping[str, str | Path]
"""Flag -> file or folder with the weights of one part of the model."""

NETWORKS: dict[str, tuple[str, type[CustomDiTConfig] | type[WanConfig], Any]] = {
    "dit": ("--checkpoint", CustomDiTConfig, CustomDiT),
    "wan": ("--wan", WanConfig, Wan),
}
"""Group -> flag of its weights, config, network."""
NUM_TRAIN_TIMESTEPS = 1000
"""Rows of the training tables, where a file has none."""
_SIZES = ("num_layers", "num_heads", "head_dim", "patch_size", "in_channels", "out_channels", "text_dim", "freq_dim",
          "ffn_dim", "rope_max_seq_len")  # fmt: skip
"""What the numbers of ``config`` are; ``patch_size`` has three."""
_DIFFUSERS = {"num_heads": "num_attention_heads", "head_dim": "attention_head_dim"}


class VideoReference:
    """The arrays of a file, and networks with the weights of ``parts``."""

    def __init__(self, given: Given, parts: Parts) -> None:
        self.given, self.parts = given, parts
        self.network = cache(partial(self._network, takes_inputs=True))

    def input(self, name: str) -> Tensor:
        """Return an array of the file as a tensor."""
        return ops.tensor(self.given[name])

    @cached_property
    def autoencoder(self) -> Any:
        """Wan's, of --vae, with the sizes that its own config.json has."""
        from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
        from mindspeed_mm_dit.models.autoencoder_kl_wan import AutoencoderKLWan

        with _named("--vae"):
            folder = {"from_pretrained": str(self.parts["--vae"])}
            return AutoencoderKLWan(WanVAEConfig(**WanVAEConfig.spelled_out(folder)))

    @cached_property
    def text_encoder(self) -> Any:
        """UMT5, of --text-encoder, in float32."""
        from mindspeed_mm_dit.configs.text_encoder import UMT5Config
        from mindspeed_mm_dit.models.umt5 import UMT5

        with _named("--text-encoder"):
            return UMT5.build(UMT5Config(str(self.parts["--text-encoder"]), dtype="fp32"))

    def fresh_network(self, kind: str) -> Any:
        """Return the network of the group ``kind`` for a use that changes its weights, and has inputs of its own."""
        return self._network(kind, takes_inputs=False)

    def _network(self, kind: str, takes_inputs: bool) -> Any:
        """Return the network of the group ``kind``, its config as ``.config``.

        takes_inputs: whether it is to be given those of ``dit/`` and ``sample/``.
        Raises CheckpointError for sizes that no network has, inputs that it cannot be given, and weights of another.
        """
        flag, config_class, network = NETWORKS[kind]
        with _named(flag):
            weights, own = _read(find_checkpoint(self.parts[flag], flag))
        sizes = own or _sizes(self.given["config"], diffusers=kind == "wan")
        what = f"{flag}: config" if own else "--reference: config"
        try:  # as if latents were one patch: those of the file are checked next
            config = from_mapping(config_class, {**sizes, "latent_size": sizes.get("patch_size")}, what)
        except ConfigError as error:
            raise CheckpointError(error.what, error.reason, error.cure) from None
        if takes_inputs:
            _check_inputs(self.given, config)
        check_claimed_sizes(config, what)
        check_names(config.parameters().shapes(), {name: a.shape for name, a in weights.items()}, flag)
        model = network(config)
        runtime.load_arrays(model, weights)
        return runtime.compiled(runtime.to_runtime_device(model))


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """Let errors of a part, which knows its file alone, name the flag that gave it."""
    try:
        yield
    except UserError as error:
        if error.what.startswith(flag):
            raise
        raise type(error)(f"{flag}: {error.what}", error.reason, error.cure) from None


class Group(ABC):
    """The quantities whose names begin alike, each recomputed when it is asked for."""

    part: str | None
    """Flag of the weights that they need."""
    inputs: re.Pattern[str]
    """Names, without the group's, that are given."""

    def __init__(self, reference: VideoReference) -> None:
        self._reference, self._given = reference, reference.given

    @abstractmethod
    def value(self, name: str) -> np.ndarray | None:
        """Return our value of the result ``name``, without the group's; None for a name that means nothing here."""

    @classmethod
    def needs(cls, name: str) -> str | None:
        """Return the flag of the weights that the result ``name`` needs."""
        return cls.part

    def tolerance(self, name: str, tolerance: float) -> float:
        """Return the largest relative error of ``name`` that passes, where ``tolerance`` is asked for."""
        return tolerance


def check_shape(given: Given, name: str, wanted: tuple[int | None, ...]) -> None:
    """Raise CheckpointError unless the array ``name`` of a file has the shape ``wanted``; None is any size but 0."""
    found = given[name].shape
    if len(found) != len(wanted) or not all(size == other if other else size > 0 for size, other in zip(found, wanted)):
        sizes = str(wanted).replace("None", "any")
        raise CheckpointError(f"--reference: {name}", f"has the shape {found}, expected {sizes}", FORMAT)


def check_whole(given: Given, name: str, most: int) -> None:
    """Raise CheckpointError unless the array ``name`` of a file holds whole numbers from 0 to ``most``."""
    array = given[name]
    if array.dtype.kind not in "iu" or not ((array >= 0) & (array <= most)).all():
        raise CheckpointError(f"--reference: {name}", f"must hold whole numbers from 0 to {most}", FORMAT)


def _check_inputs(given: Given, config: Any) -> None:
    """Raise CheckpointError, naming the array, for inputs that ``config``'s network cannot be given together."""
    latents = [name for name in ("dit/x", "sample/start") if name in given]
    for name in latents:
        try:
            config.check_latents(given[name].shape[1:])
        except ConfigError as error:
            raise CheckpointError(f"--reference: {name}: {error.what}", error.reason, error.cure) from None
        check_shape(given, name, given[latents[0]].shape)
    x, text = given[latents[0] if latents else "dit/x"], given["dit/text"]
    B, L = len(x), text.shape[-2] if text.ndim > 2 else 0
    wanted = {
        "dit/text": (B, 1, L, config.text_dim) if text.ndim == 4 else (B, L, config.text_dim), "dit/t": (B,),
        "dit/t_shared": (1,), "dit/target": (B, config.out_channels, *x.shape[2:]), "sample/negative_text": text.shape,
    }  # fmt: skip
    for name, shape in wanted.items():
        if name in given:
            check_shape(given, name, shape)


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return weights, and the ``config`` beside them in a .pt; keys with an underscore are diffusers' own."""
    if path.suffix not in (".pt", ".pth", ".bin"):
        return read_weights(path, use_ema=False), {}
    content = read_torch_file(path)
    config = content.get("config")
    own = {k: v for k, v in config.items() if not str(k).startswith("_")} if isinstance(config, Mapping) else {}
    return choose_tree(content, False, path), own


def _sizes(config: np.ndarray, diffusers: bool) -> dict[str, Any]:
    """Return the sizes in ``config`` of a file by the keys of a section ``predictor``."""
    if config.shape != (len(_SIZES) + 2,) or config.dtype.kind not in "iu":
        raise CheckpointError(
            f"--reference: config = {shown(config.tolist())}",
            f"must be {len(_SIZES) + 2} whole numbers: {', '.join(_SIZES)}, of which patch_size has three",
            FORMAT,
        )
    numbers = config.tolist()
    sizes = dict(zip(_SIZES, [*numbers[:3], numbers[3:6], *numbers[6:]]))
    return {_DIFFUSERS.get(key, key): value for key, value in sizes.items()} if diffusers else sizes


def tutorial_flow(shift: float, rows: int = NUM_TRAIN_TIMESTEPS) -> WanFlow:
    """Return the objective with the constants of the tutorial."""
    config = WanFlowConfig(num_train_timesteps=rows, shift=shift, sigma_min=0.0, extra_one_step=True)
    return WanFlow(config)
