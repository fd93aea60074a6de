"""Base classes for files of labelled-image models, and the files of the published DiT (Peebles & Xie 2023).

A ``.pt`` of a later recipe holds the settings with which the values were made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.integrations.formats.single_files import plain
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.timesteps import network_time
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion, ddim, ddpm
from mindspeed_mm_dit.objectives.gaussian.schedule import respaced_steps
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network
from mindspeed_mm_dit.objectives.registry import ModelFn
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    config_of,
    evaluate,
    loaded,
    norm,
    rows_of_step,
)
from mindspeed_mm_dit.tools.verify.table import EXACT, FORWARD, Bound, Quantity, UnknownQuantity

Arrays = Mapping[str, np.ndarray]
_LATENTS = ("x0", "x1", "noise", "x", "e")
_OF_SAMPLES = (*_LATENTS, "t", "r", "y", "drop_u", "z_normal", "time_u", "time_z")
"""Inputs with one value per sample."""


class Point:
    """Samples between data and noise, with the results of ``process`` and of a network there.

    x: (B, C, H, W) data; draws: times and noise, as ``process`` takes them; condition: labels or text.
    """

    def __init__(self, process: Any, x: Tensor, draws: Sequence[Tensor], *condition: Tensor) -> None:
        self.process, self.x, self.draws, self.condition = process, x, draws, condition

    @classmethod
    def of_flow(cls, process: FlowMatching, x: Tensor, noise: Tensor, t: np.ndarray, *condition: Tensor) -> Point:
        """Return the samples of a flow at times ``t`` (B,)."""
        coefficients = ops.tensor(process.coefficients(t))
        return cls(process, x, (ops.tensor(network_time(process.config, t)), noise, coefficients), *condition)

    @cached_property
    def x_t(self) -> Tensor:
        """Noised latents (B, C, H, W)."""
        return self.process.add_noise(self.x, *self.draws)

    def target(self) -> Tensor:
        """Return the velocity of a flow's path, (B, C, H, W)."""
        return self.process.target(self.x, *self.draws[1:])

    def output(self, network: Any) -> Tensor:
        """Return the output of ``network``, (B, C or 2C, H, W), without gradients."""
        return evaluate(network, self.x_t, self.draws[0], *self.condition)

    def losses(self, network: Any) -> Tensor:
        """Return the loss of each sample, (B,)."""
        return self.loss_of(network(self.x_t, self.draws[0], *self.condition))

    def loss_of(self, output: Tensor) -> Tensor:
        """Return the loss of a network's output, (B,)."""
        return self.process.loss(output, self.x, self.x_t, *self.draws)


class LabelledImages:
    """The arrays of a file and its networks. Each kind of files derives from it and computes its quantities.

    Raises CheckpointError for a file without ``config``, for sizes that are invalid or too large for this machine, for
    weights of another network, and for inputs that do not fit the network.
    """

    sizes: tuple[str, ...] = (
        *("hidden_size", "num_layers", "num_heads", "patch_size", "input_size", "in_channels", "num_classes"),
    )
    """Names of the numbers in ``config``: settings of the section ``predictor``."""
    num_timesteps: int | None = None
    """Times are whole numbers below this; None: real numbers from 0 to 1."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        if "config" not in arrays:
            raise CheckpointError(f"config is not in --reference, and every file of images has it. {FORMAT}")
        self.arrays, self._path = arrays, weights["--checkpoint"]
        self._checkpoint = f"--checkpoint = {self._path}"
        self.config = self.network_of(self.flags)
        self._check_inputs()

    @property
    def flags(self) -> Mapping[str, Any]:
        """Settings of the network other than its sizes."""
        return {}

    @property
    def shapes(self) -> Mapping[str, tuple[int | None, ...]]:
        """Shape of each input that any kind has; None is any size."""
        arrays, latent = self.arrays, self.config.latent_shape
        named = [name for name in _OF_SAMPLES if name in arrays and arrays[name].ndim]
        B = len(arrays[named[0]]) if named else 0
        chains = arrays["sample/start"].shape[0] if "sample/start" in arrays and arrays["sample/start"].ndim else 0
        return {
            **{name: (B, *latent) if name in _LATENTS else (B,) for name in _OF_SAMPLES},
            **dict.fromkeys(("noise_scale", "proj_coeff", "sample/cfg_scale", "sample/cfg_interval_start"), ()),
            "sample/start": (chains, *latent),
            "sample/y": (chains,),
            "sample/brownian": (None, chains, *latent),
            "sample/cfg": (3,),
        }

    @cached_property
    def weights(self) -> Arrays:
        """The weights of --checkpoint."""
        return read_weights(find_checkpoint(self._path), use_ema=False)

    def network_of(self, flags: Mapping[str, Any]) -> DiTConfig:
        """Return the config of the network in ``config``, with ``flags``."""
        what = f"--reference: config = {shorten_repr(self.arrays['config'].tolist())}"
        config: DiTConfig = config_of(DiTConfig, {**self.arrays.sizes(self.sizes), **flags}, what)
        return config

    def fresh_network(self, config: DiTConfig | None = None, weights: Arrays | None = None) -> DiT:
        """Return a new network: by default that of the file, with its weights."""
        weights = self.weights if weights is None else weights
        network: DiT = loaded(DiT, config or self.config, weights, self._checkpoint)
        return network

    @cached_property
    def network(self) -> DiT:
        """The network of the file; its weights never change."""
        return self.fresh_network()

    def predict(self, x: Tensor, t: Tensor, labels: np.ndarray) -> Tensor:
        """Return the network's output for ``x`` (B, C, H, W) at times ``t`` (B,)."""
        return evaluate(self.network, x, t, ops.tensor(labels.astype(np.int64)))

    def unconditional(self, count: int) -> np.ndarray:
        """Return ``count`` unconditional labels."""
        return self.config.conditions.unconditional(count)["labels"]

    def guided_model(self, guidance: Guidance) -> ModelFn:
        """Return the guided network for the labels of the sampling loops: (x, t, noise level) -> output."""
        labels, unconditional = (
            self.arrays.tensor("sample/y"),
            ops.tensor(self.unconditional(len(self.arrays["sample/y"]))),
        )
        return guided_network(self.network, [labels], [unconditional], guidance)

    def velocity(self, process: FlowMatching, model_fn: ModelFn) -> Callable[[Tensor, np.ndarray], Tensor]:
        """Return the vector field of a flow: (x, times (B,)) -> dx/dt."""
        return lambda x, t: process.velocity(model_fn(x, ops.tensor(network_time(process.config, t)), 1 - t), x, t)

    def guided_halves(self, x: Tensor, t: Tensor, labels: np.ndarray, scale: float, channels: int) -> Tensor:
        """Return the published batch (2B, ...) of two halves, the second without labels.

        The first ``channels`` of both halves are the same guided values; the others are each half's own output.
        """
        halves = [self.predict(x, t, each) for each in (labels, self.unconditional(len(labels)))]
        guided = min(channels, self.config.in_channels)
        labelled, unlabelled = (half[:, :guided] for half in halves)
        first = Guidance(scale).combine(labelled, unlabelled, guided)
        return ops.cat([ops.cat([first, half[:, guided:]], 1) for half in halves], 0)

    def _check_inputs(self) -> None:
        arrays, shapes = self.arrays, self.shapes
        for name in [name for name in shapes if name in arrays]:
            arrays.check_shape(name, shapes[name])
        for name in [name for name in ("y", "sample/y") if name in arrays]:
            arrays.check_range(name, self.config.num_classes, why="The last class is the unconditional one.")
        if "t" in arrays and "t" in shapes and self.num_timesteps is None:
            arrays.check_range("t", 1, "f", "Flow matching has data at 1.")
        elif "t" in arrays and "t" in shapes:
            most = (self.num_timesteps or 0) - 1
            arrays.check_range("t", most, why=f"The published DiT has {self.num_timesteps} timesteps.")


class RecipeFile(LabelledImages):
    """A file whose ``config`` holds only sizes; flags, learning rate and constants are in the ``.pt``.

    The recipe's own code saves the ``.pt``. Raises CheckpointError if it lacks a setting that the values need.
    """

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        content = read_torch_file(weights["--checkpoint"])
        self._content, self._checkpoint = content if isinstance(content, Mapping) else {}, "--checkpoint"
        super().__init__(arrays, weights)

    @cached_property
    def weights(self) -> Arrays:
        return plain(self.setting("model"))

    def fresh_network(self, config: Any = None, weights: Any = None) -> DiT:
        return super().fresh_network(config, None if weights is None else plain(weights))

    def setting(self, *keys: str) -> Any:
        """Return the entry at ``keys`` of the nested ``.pt``; raises CheckpointError if there is none."""
        entry: Any = self._content
        for key in keys:
            if not isinstance(entry, Mapping) or key not in entry:
                raise CheckpointError(
                    f"{self._checkpoint} lacks {'/'.join(keys)}, which the values were made with. {FORMAT}"
                )
            entry = entry[key]
        return entry

    def number(self, *keys: str) -> float:
        """Return a number of the ``.pt``."""
        value = self.setting(*keys)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{self._checkpoint} has {'/'.join(keys)} = {shorten_repr(value)}, which must be a number. {FORMAT}"
            )
        return float(value)


def rows_of_chain(names: str, bound: Bound = FORWARD) -> tuple[Quantity, Quantity]:
    """Return the rows for the last state of the sampling loops ``names``, and for the norms of all states."""
    return (
        Quantity(f"{names}/result", lambda file, *chain: file.states(*chain)[-1], bound),
        Quantity(f"{names}/norms", lambda file, *chain: np.array(list(map(norm, file.states(*chain)))), bound),
    )


SAMPLE_SCALE, SAMPLE_CHANNELS = 4.0, 3
"""Guidance of the ``sample/`` entries."""


class PublishedDiT(LabelledImages):
    """The quantities of a file."""

    num_timesteps = GaussianDiffusionConfig().num_train_timesteps

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.process = runtime.to_runtime_device(GaussianDiffusion.from_config(GaussianDiffusionConfig()))
        self.step = OptimizerStep(self.fresh_network, lambda network: self.at.losses(network))

    def table(self, name: str) -> np.ndarray:
        """Return a table of the schedule."""
        table = getattr(self.process.schedule, name, None)
        if not isinstance(table, np.ndarray):
            raise UnknownQuantity("")
        return table

    def timesteps(self, chain: str) -> np.ndarray:
        """Return the training timesteps of respaced sampling."""
        return respaced_steps(len(self.process.schedule), chain)

    @cached_property
    def at(self) -> Point:
        """The samples at their timesteps."""
        x0, t, noise, y = map(self.arrays.tensor, ("x0", "t", "noise", "y"))
        return Point(self.process, x0, (t, noise), y)

    @cached_property
    def output(self) -> Tensor:
        """The network's output there, (B, 2C, H, W)."""
        return self.at.output(self.network)

    def guided(self, scale: str, channels: str) -> Tensor:
        """Return the published batch of two halves, guided."""
        if int(channels) not in (3, self.config.in_channels):
            raise CheckpointError(
                f"rgb{channels} in --reference is guidance on {channels} channels, and must be on 3 or all."
            )
        return self.guided_halves(self.at.x_t, self.at.draws[0], self.arrays["y"], float(scale), int(channels))

    def sample(self, chain: str) -> Tensor:
        """Return the last state of a sampling loop, with the last real class in place of the unconditional one."""
        labels = np.minimum(self.arrays["y"], self.config.num_classes - 1)

        def model_fn(x: Tensor, t: Tensor, timestep: int) -> Tensor:
            half = len(labels)
            return self.guided_halves(x[:half], t[:half], labels, SAMPLE_SCALE, SAMPLE_CHANNELS)

        sampler = ddim if chain.startswith("ddim") else ddpm
        *_, last = sampler(
            self.process.respaced(self.timesteps(chain)),
            model_fn,
            self.arrays.tensor(f"sample/{chain}/start"),
            lambda step: self.arrays.tensor(f"sample/{chain}/noise_draws")[step],
        )
        return last


DIT = FileKind(
    signature=".*",
    inputs=r"config|x0|noise|t|y|sample/[^/]+/(start|noise_draws)",
    program=PublishedDiT,
    rows=(
        Quantity(r"table/(\w+)", PublishedDiT.table, EXACT),
        Quantity("timestep_map/(.+)", PublishedDiT.timesteps),
        Quantity("x_t", lambda file: file.at.x_t),
        Quantity("output", lambda file: file.output),
        Quantity("loss_mse", lambda file: file.process.simple_loss(file.output, file.at.x, *file.at.draws)),
        Quantity(
            "loss_vb", lambda file: file.process.variational_bound(file.output, file.at.x, file.at.x_t, *file.at.draws)
        ),
        Quantity("loss", lambda file: file.at.loss_of(file.output)),
        Quantity(r"cfg_output_scale(\d+(?:\.\d*)?)_rgb(\d+)", PublishedDiT.guided),
        Quantity("sample/([^/]+)/result", PublishedDiT.sample),
        *rows_of_step(lambda file: file.step),
    ),
)
