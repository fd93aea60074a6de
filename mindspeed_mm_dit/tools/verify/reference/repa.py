"""Files of reference values of REPA (Yu et al. 2024): projectors and their loss, times and sampling.

In the file and for the network, t = 0 is data and t = 1 noise; here it is 1 - t.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.flow import solvers
from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import sde_trajectory
from mindspeed_mm_dit.objectives.flow.timesteps import logit_normal, network_time
from mindspeed_mm_dit.objectives.guidance import Guidance, projection_loss
from mindspeed_mm_dit.tools.verify.reference.file import (
    ZERO,
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    rows_of_step,
)
from mindspeed_mm_dit.tools.verify.reference.images import LabelledImages, Point, RecipeFile
from mindspeed_mm_dit.tools.verify.table import GRADIENTS, Quantity, UnknownQuantity

_PATHS = {"linear": "linear", "cosine": "gvp"}
_STEPS = {"euler": solvers.euler, "heun": solvers.heun}
_LOW_INTERVAL = (0.25, 1.0)
"""Guidance interval of ``cfg_interval_low``."""
STEPS = 8
"""Sampling steps, the last one included, if the file has no noise from which to count them."""


class Repa(RecipeFile):
    """The quantities of a file."""

    sizes = (*LabelledImages.sizes, "encoder_depth", "projector_dim")

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.steps = len(arrays["sample/brownian"]) + 1 if "sample/brownian" in arrays else STEPS
        lr, *betas = (self.number("args", name) for name in ("learning_rate", "adam_beta1", "adam_beta2"))
        self.step = OptimizerStep(self.fresh_network, self._losses, lr, (betas[0], betas[1]))
        self.step_of_projection = OptimizerStep(self.fresh_network, lambda network: self._both(network)[1])

    @property
    def flags(self) -> Mapping[str, Any]:
        self.arrays.check_shape("z_dims", (None,))
        return {
            "learn_sigma": False,
            "z_dims": self.arrays["z_dims"].tolist(),
            "qk_norm": self.setting("args", "qk_norm"),
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int | None, ...]]:
        B, tokens = len(self.arrays["y"]) if "y" in self.arrays else None, self.config.num_tokens
        return {**super().shapes, **{f"zs{n}": (B, tokens, width) for n, width in enumerate(self.config.z_dims)}}

    # --- one evaluation ----------------------------------------------------------------------------------------------

    def times(self, path: str, law: str) -> np.ndarray:
        """Return the times of the samples, (B,) float64, with the direction of the file."""
        if law == "uniform":
            return self.arrays["time_u"].astype(np.float64)
        z = self.arrays["time_z"].astype(np.float64)
        return logit_normal(z, 0, 1) if path == "linear" else np.arctan(np.exp(z)) * 2 / np.pi

    @cached_property
    def _processes(self) -> dict[str, FlowMatching]:
        return {name: FlowMatching(FlowMatchingConfig(path=path, data_time=0)) for name, path in _PATHS.items()}  # type: ignore[arg-type]

    def at(self, path: str, law: str) -> Point:
        """Return the samples at their times."""
        x, e, y = map(self.arrays.tensor, ("x", "e", "y"))
        return Point.of_flow(self._processes[path], x, e, 1 - self.times(path, law), y)

    def _project(self, network: DiT, path: str, law: str) -> tuple[Tensor, list[Tensor]]:
        at = self.at(path, law)
        outputs: tuple[Tensor, list[Tensor]] = network(at.x_t, at.draws[0], *at.condition, project=True)
        return outputs

    def projected(self, path: str, law: str, number: str) -> Tensor:
        """Return the tokens after a projector."""
        if int(number) >= len(self.config.z_dims):
            raise UnknownQuantity(f"z_dims has {len(self.config.z_dims)} projectors")
        with ops.no_grad():
            return self._project(self.network, path, law)[1][int(number)]

    # --- losses ------------------------------------------------------------------------------------------------------

    def _both(self, network: DiT, path: str = "linear", law: str = "uniform") -> tuple[Tensor, Tensor]:
        """Return the loss of the velocity and the loss of the projections, each (B,)."""
        output, projected = self._project(network, path, law)
        features = [self.arrays.tensor(f"zs{number}") for number in range(len(projected))]
        return self.at(path, law).loss_of(output), projection_loss(projected, features, [1.0] * len(features))

    def _losses(self, network: DiT) -> Tensor:
        denoising, projection = self._both(network)
        return denoising + float(self.arrays["proj_coeff"]) * projection

    def loss(self, *case: str, network: DiT | None = None) -> np.ndarray:
        """Return the loss of the velocity (B,), or the mean loss of the projections."""
        *point, name = case
        with ops.no_grad():
            denoising, projection = map(ops.numpy, self._both(network or self.network, *point))
        return denoising if name == "denoising" else np.asarray(projection.mean(dtype=np.float64))

    # --- sampling ----------------------------------------------------------------------------------------------------

    def chain(self, method: str, guidance: str) -> Tensor:
        """Return the last state of a sampling loop on the linear path."""
        scale, *interval = self.arrays["sample/cfg"].tolist()
        low, high = _LOW_INTERVAL if guidance == "cfg_interval_low" else interval
        guided = Guidance(1.0 if guidance == "cfg1" else scale, interval=(low, high))
        start = self.arrays.tensor("sample/start")
        with ops.no_grad():
            if method != "sde":
                return self._ode(method, start, guided)
            model_fn, noise = self.guided_model(guided), self.arrays.tensor("sample/brownian")
            process, form = self._processes["linear"], DiffusionCoefficient("linear")
            trajectory = sde_trajectory("sde-euler", process, model_fn, start, noise.__getitem__, self.steps, form)
            return list(trajectory)[-1]

    def _ode(self, method: str, x: Tensor, guidance: Guidance) -> Tensor:
        """Return the last state of a sampling loop with guidance according to the time at which each step starts."""
        process, model_fn = self._processes["linear"], self.guided_model(guidance)
        for t, following in pairwise(np.linspace(1.0, 0.0, self.steps + 1).tolist()):
            step = solvers.euler if following == 0 else _STEPS[method]

            def velocity(x: Tensor, now: np.ndarray, noise: float = t) -> Tensor:
                return process.velocity(model_fn(x, ops.tensor(network_time(process.config, now)), noise), x, now)

            x = step(velocity, x, np.full(x.shape[0], 1 - t), t - following)
        return x


_CASE = "(linear|cosine)/(uniform|lognormal)"
_CHAIN = "sample/(euler|heun|sde)/(cfg1|cfg_interval|cfg_interval_low)/result"

REPA = FileKind(
    signature=rf"zs\d+|time_[uz]|{_CASE}/.+|grad_norm(_of_proj_loss)?/projectors\..+|{_CHAIN}",
    inputs=r"config|z_dims|proj_coeff|x|e|y|zs\d+|time_[uz]|sample/(start|y|brownian|cfg)",
    program=Repa,
    rows=(
        Quantity(f"{_CASE}/x_t", lambda file, *case: file.at(*case).x_t),
        Quantity(f"{_CASE}/t", Repa.times),
        Quantity(f"{_CASE}/output", lambda file, *case: file.at(*case).output(file.network)),
        Quantity(rf"{_CASE}/projected(\d+)", Repa.projected),
        Quantity(f"{_CASE}/(denoising|proj)_loss", Repa.loss),
        Quantity(
            "(denoising|proj)_loss_after_one_adamw_step",
            lambda file, name: file.loss(name, network=file.step.network_after),
        ),
        Quantity("loss_total", lambda file: file.step.losses.mean(dtype=np.float64)),
        *(
            Quantity(f"grad_norm_of_proj_loss/{name}", lambda file, p: file.step_of_projection.gradient_norm(p), bound)
            for name, bound in ((r"(.+attn\.k_norm\.bias)", ZERO), ("(.+)", GRADIENTS))
        ),
        Quantity(_CHAIN, Repa.chain),
        *rows_of_step(lambda file: file.step),
    ),
)
