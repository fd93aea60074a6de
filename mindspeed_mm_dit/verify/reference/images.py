"""Files of reference values of image models with labels: their inputs, and DiTs with the weights beside them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.verify.reference.file import FORMAT, Given, Tensor, Weights, answer, config_of, loaded

Arrays = Mapping[str, np.ndarray]


class LabelledImages:
    """The arrays of a file and its networks. Each kind of files inherits it and computes its quantities.

    Raises CheckpointError for a file without ``config``, for sizes that no network has or this machine cannot hold, for
    weights of another network, and for inputs that the network cannot be given.
    """

    sizes: tuple[str, ...] = (
        "hidden_size", "num_layers", "num_heads", "patch_size", "input_size", "in_channels", "num_classes",
    )  # fmt: skip
    """What the numbers of ``config`` are, as settings of a section ``predictor``."""
    num_timesteps: int | None = None
    """Times are whole numbers below it; None: real ones from 0 to 1."""

    def __init__(self, given: Given, weights: Weights) -> None:
        if "config" not in given:
            raise CheckpointError("--reference", "has no 'config'", FORMAT)
        self.given, self._path = given, weights["--checkpoint"]
        self._checkpoint = f"--checkpoint = {self._path}"
        self.config = self.network_of(self.flags)
        self._check_inputs()

    @property
    def flags(self) -> Mapping[str, Any]:
        """Settings of the network beside its sizes."""
        return {}

    @property
    def shapes(self) -> Mapping[str, tuple[int | None, ...]]:
        """Shape of each input; None is any size."""
        given, latent = self.given, self.config.latent_shape
        named = [name for name in ("x0", "x1", "noise", "t", "y") if name in given and given[name].ndim]
        B = len(given[named[0]]) if named else 0
        chains = given["sample/start"].shape[0] if "sample/start" in given and given["sample/start"].ndim else 0
        return {
            **dict.fromkeys(("x0", "x1", "noise"), (B, *latent)), "t": (B,), "y": (B,),
            "sample/start": (chains, *latent), "sample/y": (chains,), "sample/brownian": (None, chains, *latent),
        }  # fmt: skip

    @cached_property
    def weights(self) -> Arrays:
        """The weights of --checkpoint."""
        return read_weights(find_checkpoint(self._path), use_ema=False)

    def network_of(self, flags: Mapping[str, Any]) -> DiTConfig:
        """Return the network of ``config`` with ``flags``."""
        what = f"--reference: config = {shown(self.given['config'].tolist())}"
        config: DiTConfig = config_of(DiTConfig, {**self.given.sizes(self.sizes), **flags}, what)
        return config

    def fresh_network(self, config: DiTConfig | None = None, weights: Arrays | None = None) -> DiT:
        """Return the network with the weights of the file, or another one with others."""
        weights = self.weights if weights is None else weights
        network: DiT = loaded(DiT, config or self.config, weights, self._checkpoint)
        return network

    @cached_property
    def network(self) -> DiT:
        """The network that is asked; its weights never change."""
        return self.fresh_network()

    def ask(self, x: Tensor, t: Tensor, labels: np.ndarray) -> Tensor:
        """Return what the network says of ``x`` (B, C, H, W) at times ``t`` (B,)."""
        return answer(self.network, x, t, ops.tensor(labels.astype(np.int64)))

    def null(self, count: int) -> np.ndarray:
        """Return the labels of ``count`` samples without one."""
        return self.config.conditions.null(count)["labels"]

    def guided_halves(self, x: Tensor, t: Tensor, labels: np.ndarray, scale: float, channels: int) -> Tensor:
        """Return the published batch (2B, ...) of two halves, the second asked without labels: the first ``channels``
        of both are guided alike, the others stay what each half's own network said."""
        halves = [self.ask(x, t, each) for each in (labels, self.null(len(labels)))]
        guided = min(channels, self.config.in_channels)
        labelled, unlabelled = (half[:, :guided] for half in halves)
        first = Guidance(scale).combine(labelled, unlabelled, guided)
        return ops.cat([ops.cat([first, half[:, guided:]], 1) for half in halves], 0)

    def _check_inputs(self) -> None:
        given, shapes = self.given, self.shapes
        for name in [name for name in shapes if name in given]:
            given.check_shape(name, shapes[name])
        for name in [name for name in ("y", "sample/y") if name in given]:
            given.check_range(name, self.config.num_classes, why=": the null class is the last")
        if "t" in given and "t" in shapes and self.num_timesteps is None:
            given.check_range("t", 1, "f", ": flow matching has data at 1")
        elif "t" in given and "t" in shapes:
            most = (self.num_timesteps or 0) - 1
            given.check_range("t", most, why=f": the published DiT has {self.num_timesteps} timesteps")
