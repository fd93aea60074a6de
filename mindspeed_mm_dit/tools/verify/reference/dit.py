"""Files of reference values of the published DiT (Peebles & Xie 2023), which learns its variance.

``chain`` in a name is a number of DDPM steps or ``ddim<steps>``. docs/verification.md describes the format.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mindspeed_mm_dit.configs.gaussian_diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion
from mindspeed_mm_dit.objectives.gaussian.samplers import ddim, ddpm
from mindspeed_mm_dit.objectives.gaussian.schedule import respaced_steps
from mindspeed_mm_dit.tools.verify.reference.file import Kind, ReferenceArrays, Tensor, Weights
from mindspeed_mm_dit.tools.verify.reference.images import LabelledImages, Point
from mindspeed_mm_dit.tools.verify.reference.step import Step, rows_of_step
from mindspeed_mm_dit.tools.verify.table import EXACT, NotThere, Quantity

SAMPLE_SCALE, SAMPLE_CHANNELS = 4.0, 3
"""Guidance of the ``sample/`` entries."""


class PublishedDiT(LabelledImages):
    """The quantities of a file."""

    num_timesteps = GaussianDiffusionConfig().num_train_timesteps

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.process = runtime.to_runtime_device(GaussianDiffusion.from_config(GaussianDiffusionConfig()))
        self.step = Step(self.fresh_network, lambda network: self.at.losses(network))

    def table(self, name: str) -> np.ndarray:
        """Return a table of the schedule."""
        table = getattr(self.process.schedule, name, None)
        if not isinstance(table, np.ndarray):
            raise NotThere("")
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
            raise CheckpointError(f"--reference: rgb{channels}", "guidance is on 3 or all channels")
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


DIT = Kind(
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
