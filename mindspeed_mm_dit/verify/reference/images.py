"""Files of reference values of image models with labels: their inputs, and DiTs with the weights beside them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.verify.reference.file import (
    FORMAT,
    Given,
    Tensor,
    Weights,
    answer,
    check_fits,
    check_range,
    check_shape,
    config_of,
    loaded,
    sizes_in,
)

_SIZES = ("hidden_size", "num_layers", "num_heads", "patch_size", "input_size", "in_channels", "num_classes")
"""What the numbers of ``config`` are."""
_LATENTS = ("x0", "x1", "noise")


class LabelledImages:
    """The arrays of a file and its networks. Each kind of files inherits it and computes its quantities.

    Raises CheckpointError for a file without ``config``, for sizes that no network has or this machine cannot hold, for
    weights of another network, and for inputs that the network cannot be given.
    """

    num_timesteps: int | None = None
    """Times are whole numbers below it; None: real ones from 0 to 1."""

    def __init__(self, given: Given, weights: Weights) -> None:
        if "config" not in given:
            raise CheckpointError("--reference", "has no 'config'", FORMAT)
        self.given = given
        what = f"--reference: config = {shown(given['config'].tolist())}"
        self.config: DiTConfig = config_of(DiTConfig, sizes_in(given, _SIZES), what)
        checkpoint = weights["--checkpoint"]
        self._weights = read_weights(find_checkpoint(checkpoint), use_ema=False)
        check_fits(self.config, self._weights, what, f"--checkpoint = {checkpoint}")
        self._check_inputs()
        given.update(self._as_taken())

    def fresh_network(self) -> DiT:
        """Return a DiT with the weights of the checkpoint."""
        return loaded(DiT, self.config, self._weights)

    @cached_property
    def network(self) -> DiT:
        """The DiT that is asked; its weights never change."""
        return self.fresh_network()

    def ask(self, x: Tensor, t: Tensor, labels: np.ndarray) -> Tensor:
        """Return what the network says of ``x`` (B, C, H, W) at times ``t`` (B,)."""
        return answer(self.network, x, t, ops.tensor(labels))

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
        given, config = self.given, self.config
        latent = (config.in_channels, config.input_size, config.input_size)
        named = [name for name in (*_LATENTS, "t", "y") if name in given and given[name].ndim]
        batch = len(given[named[0]]) if named else 0
        wanted = {**{name: (batch, *latent) for name in _LATENTS}, "t": (batch,), "y": (batch,)}
        if "sample/start" in given:
            chains = given["sample/start"].shape[:1] or (0,)
            steps = given.get("sample/brownian", np.zeros(0)).shape[:1] or (0,)
            wanted |= {"sample/start": (*chains, *latent), "sample/y": chains}
            wanted |= {"sample/brownian": (*steps, *chains, *latent)}
        for name, shape in wanted.items():
            if name in given:
                check_shape(given, name, shape)
        for name in {"y", "sample/y"} & given.keys():
            check_range(given, name, config.num_classes, why=": the null class is the last")
        if "t" in given and self.num_timesteps is None:
            check_range(given, "t", 1, "f", ": flow matching has data at 1")
        elif "t" in given:
            most = (self.num_timesteps or 0) - 1
            check_range(given, "t", most, why=f": the published DiT has {self.num_timesteps} timesteps")

    def _as_taken(self) -> dict[str, np.ndarray]:
        """Return latents, times and labels in the kinds of number that networks take."""
        times = np.int64 if self.num_timesteps else np.float32
        floats = dict.fromkeys((*_LATENTS, "sample/start", "sample/brownian"), np.float32)
        kinds = {**floats, "t": times, "y": np.int64, "sample/y": np.int64}
        return {name: self.given[name].astype(kind) for name, kind in kinds.items() if name in self.given}
