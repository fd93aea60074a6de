"""Files of reference values of image models with labels: their inputs, DiTs with the weights beside them, and what
both make of samples at a time. Of later recipes a ``.pt`` says how they were made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.published import plain
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.contract import Ask
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.timesteps import told
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network
from mindspeed_mm_dit.verify.reference.file import FORMAT, Given, Tensor, Weights, answer, config_of, loaded
from mindspeed_mm_dit.verify.step import norm
from mindspeed_mm_dit.verify.table import FORWARD, Bound, Quantity

Arrays = Mapping[str, np.ndarray]
_LATENTS = ("x0", "x1", "noise", "x", "e")
_OF_SAMPLES = (*_LATENTS, "t", "r", "y", "drop_u", "z_normal", "time_u", "time_z")
"""Inputs that have a value a sample."""


class Point:
    """Samples between data and noise: what ``process`` makes of them, and a network says there.

    x: (B, C, H, W) data; draws: times and noise, as ``process`` takes them; condition: what steers the network.
    """

    def __init__(self, process: Any, x: Tensor, draws: Sequence[Tensor], *condition: Tensor) -> None:
        self.process, self.x, self.draws, self.condition = process, x, draws, condition

    @classmethod
    def of_flow(cls, process: FlowMatching, x: Tensor, noise: Tensor, t: np.ndarray, *condition: Tensor) -> Point:
        """Return the samples of a flow at times ``t`` (B,)."""
        coefficients = ops.tensor(process.coefficients(t))
        return cls(process, x, (ops.tensor(told(process.config, t)), noise, coefficients), *condition)

    @cached_property
    def x_t(self) -> Tensor:
        """Noised latents (B, C, H, W)."""
        return self.process.noised(self.x, *self.draws)

    def target(self) -> Tensor:
        """Return the velocity of a flow's path, (B, C, H, W)."""
        return self.process.target(self.x, *self.draws[1:])

    def output(self, network: Any) -> Tensor:
        """Return what ``network`` says, (B, C or 2C, H, W); nothing is kept for gradients."""
        return answer(network, self.x_t, self.draws[0], *self.condition)

    def losses(self, network: Any) -> Tensor:
        """Return the loss of each sample, (B,)."""
        return self.loss_of(network(self.x_t, self.draws[0], *self.condition))

    def loss_of(self, output: Tensor) -> Tensor:
        """Return the loss of what a network says, (B,)."""
        return self.process.loss(output, self.x, self.x_t, *self.draws)


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
        """Shape of each input that some kind has; None is any size."""
        given, latent = self.given, self.config.latent_shape
        named = [name for name in _OF_SAMPLES if name in given and given[name].ndim]
        B = len(given[named[0]]) if named else 0
        chains = given["sample/start"].shape[0] if "sample/start" in given and given["sample/start"].ndim else 0
        return {
            **{name: (B, *latent) if name in _LATENTS else (B,) for name in _OF_SAMPLES},
            **dict.fromkeys(("noise_scale", "proj_coeff", "sample/cfg_scale", "sample/cfg_interval_start"), ()),
            "sample/start": (chains, *latent), "sample/y": (chains,), "sample/brownian": (None, chains, *latent),
            "sample/cfg": (3,),
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

    def asked(self, guidance: Guidance) -> Ask:
        """Return the network, guided, for the labels of the chains: (x, t, share of noise) -> output."""
        labels, null = self.given.tensor("sample/y"), ops.tensor(self.null(len(self.given["sample/y"])))
        return guided_network(self.network, [labels], [null], guidance)

    def velocity(self, process: FlowMatching, ask: Ask) -> Callable[[Tensor, np.ndarray], Tensor]:
        """Return the field of a flow's chains: (x, times (B,)) -> dx/dt."""
        return lambda x, t: process.velocity(ask(x, ops.tensor(told(process.config, t)), 1 - t), x, t)

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


class RecipeFile(LabelledImages):
    """One whose numbers of ``config`` are sizes alone: flags, learning rate and constants stand in the ``.pt``, as the
    recipe's own code saves them. Raises CheckpointError for a ``.pt`` that lacks what the values were made with."""

    def __init__(self, given: Given, weights: Weights) -> None:
        content = read_torch_file(weights["--checkpoint"])
        self._content, self._checkpoint = content if isinstance(content, Mapping) else {}, "--checkpoint"
        super().__init__(given, weights)

    @cached_property
    def weights(self) -> Arrays:
        return plain(self.said("model"))

    def fresh_network(self, config: Any = None, weights: Any = None) -> DiT:
        return super().fresh_network(config, None if weights is None else plain(weights))

    def said(self, *keys: str) -> Any:
        """Return the entry at ``keys`` of the nested ``.pt``; raises CheckpointError where there is none."""
        found: Any = self._content
        for key in keys:
            if not isinstance(found, Mapping) or key not in found:
                raise CheckpointError(
                    self._checkpoint, f"lacks {'/'.join(keys)}, which the values were made with", FORMAT
                )
            found = found[key]
        return found

    def number(self, *keys: str) -> float:
        """Return a number of the ``.pt``."""
        found = self.said(*keys)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise CheckpointError(self._checkpoint, f"{'/'.join(keys)} = {shown(found)} is no number", FORMAT)
        return float(found)


def rows_of_chain(names: str, bound: Bound = FORWARD) -> tuple[Quantity, Quantity]:
    """Return the rows of the last state of chains ``names``, and of the norms of all states (``file.states``)."""
    return (
        Quantity(f"{names}/result", lambda file, *chain: file.states(*chain)[-1], bound),
        Quantity(f"{names}/norms", lambda file, *chain: np.array(list(map(norm, file.states(*chain)))), bound),
    )
