"""The quantities of a file of reference values of the published DiT, recomputed by the active framework.

All keys but ``config`` are optional: ``config`` (hidden, depth, heads, patch, input size, channels, classes; learned
variance), inputs ``x0 noise t y``, and results ``x_t output cfg_output_scale<S>_rgb<K> loss_mse loss_vb loss
grad_norm/<parameter> loss_after_one_adamw_step timestep_map/<chain> sample/<chain>/{start,noise_draws,result}
table/<name>``. A chain is a number of DDPM steps or ``ddim<steps>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.gaussian_diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.errors import CheckpointError, nearest
from mindspeed_mm_dit.framework import ops, optim, runtime
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion
from mindspeed_mm_dit.objectives.gaussian.samplers import SAMPLERS
from mindspeed_mm_dit.objectives.gaussian.schedule import respaced_steps
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.verify.reference.file import ADAMW_LR, Reference, unknown_quantity

SAMPLE_GUIDANCE = Guidance(scale=4.0, channels="3")
"""Guidance of the ``sample/`` entries."""


class GaussianParity:
    """The quantities of a reference file as this implementation computes them, each when it is asked for."""

    inputs = re.compile(r"config|x0|noise|t|y|sample/[^/]+/(start|noise_draws)")
    """Names that are given."""
    num_timesteps = GaussianDiffusionConfig().num_train_timesteps
    """Times are whole numbers below it."""

    def __init__(self, reference: Reference) -> None:
        self._given, self._config, self._fresh_model = reference.given, reference.config, reference.fresh_model
        self._diffusion = runtime.to_runtime_device(GaussianDiffusion.from_config(GaussianDiffusionConfig()))
        self._model = reference.fresh_model()

    @staticmethod
    def tolerance(name: str, tolerance: float, table_tolerance: float) -> float:
        """Return the largest relative error of ``name``."""
        return table_tolerance if name.startswith("table/") else tolerance

    def value(self, name: str) -> np.ndarray:
        """Return our value of the result ``name``."""
        kind, _, rest = name.partition("/")
        if kind == "table":
            return self._table(rest)
        if kind == "grad_norm":
            return np.array(np.linalg.norm(self._gradient(rest).astype(np.float64)), np.float32)
        if kind == "timestep_map":
            return self._chain(rest)[1]
        if kind == "sample":
            return self._sample(rest.partition("/")[0])
        guided = re.fullmatch(r"cfg_output_scale(\d+(?:\.\d*)?)_rgb(\d+)", name)
        if guided:
            return self._guided_output(float(guided[1]), int(guided[2]))
        results: dict[str, Callable[[], Any]] = {
            "x_t": lambda: ops.numpy(self._noised),
            "output": lambda: self._output,
            "loss": lambda: ops.numpy(self._loss(ops.tensor(self._output))),
            "loss_mse": lambda: ops.numpy(self._simple_loss()),
            "loss_vb": lambda: ops.numpy(self._bound()),
            "loss_after_one_adamw_step": self._after_one_step,
        }
        if name not in results:
            raise unknown_quantity(name)
        return np.asarray(results[name]())

    def _table(self, name: str) -> np.ndarray:
        table = getattr(self._diffusion.schedule, name, None)
        if not isinstance(table, np.ndarray):
            raise CheckpointError(f"--reference: table/{name}", "is no table of the schedule")
        return table

    def _gradient(self, name: str) -> np.ndarray:
        found = self._gradients[1]
        if name not in found:
            raise CheckpointError(
                f"--reference: grad_norm/{name}", "is no trained parameter of this model", f"{nearest(name, found)}"
            )
        return found[name]

    def _input(self, name: str) -> Any:
        return ops.tensor(self._given[name])

    @cached_property
    def _noised(self) -> Any:
        return self._diffusion.noised(self._input("x0"), self._input("t"), self._input("noise"))

    @cached_property
    def _output(self) -> np.ndarray:
        with ops.no_grad():
            return ops.numpy(self._model(self._noised, self._input("t"), self._input("y")))

    def _bound(self) -> Any:
        x0, t, noise = (self._input(name) for name in ("x0", "t", "noise"))
        return self._diffusion.variational_bound(ops.tensor(self._output), x0, self._noised, t, noise)

    def _simple_loss(self) -> Any:
        x0, t, noise = (self._input(name) for name in ("x0", "t", "noise"))
        return self._diffusion.simple_loss(ops.tensor(self._output), x0, t, noise)

    def _loss(self, output: Any) -> Any:
        x0, t, noise = (self._input(name) for name in ("x0", "t", "noise"))
        return self._diffusion.loss(output, x0, self._noised, t, noise)

    def _loss_function(self, model: Any) -> Callable[[], Any]:
        return lambda: self._loss(model(self._noised, self._input("t"), self._input("y")))

    @cached_property
    def _gradients(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return optim.gradients(self._model, self._loss_function(self._model))

    def _after_one_step(self) -> np.ndarray:
        model = self._fresh_model()
        optim.adamw_step(model, self._loss_function(model), ADAMW_LR)
        with ops.no_grad():
            return ops.numpy(self._loss_function(model)())

    def _guided_output(self, scale: float, channels: int) -> np.ndarray:
        if channels not in (3, self._config.in_channels):
            raise CheckpointError(f"--reference: rgb{channels}", "guidance is on 3 or all channels")
        guidance = Guidance(scale, "3" if channels == 3 else "all")
        with ops.no_grad():
            return ops.numpy(
                self._published_guidance(guidance, self._given["y"])(
                    ops.cat([self._noised, self._noised], 0), ops.cat([self._input("t"), self._input("t")], 0), 0
                )
            )

    def _published_guidance(self, guidance: Guidance, labels: np.ndarray) -> Callable[[Any, Any, int], Any]:
        """The published batch layout: two equal halves, the second without labels, both guided alike.

        The channels that are not guided keep what each half's own network said.
        """
        both = ops.tensor(np.concatenate([labels, self._config.condition.null(len(labels))["labels"]]))

        def predict(x: Any, t: Any, timestep: int) -> Any:
            half = x[: len(labels)]
            labelled, unlabelled = ops.chunk(self._model(ops.cat([half, half], 0), t, both), 2, 0)
            first = guidance.combine(labelled, unlabelled, self._config.in_channels)
            guided = 3 if guidance.channels == "3" else self._config.in_channels
            return ops.cat([first, ops.cat([first[:, :guided], unlabelled[:, guided:]], 1)], 0)

        return predict

    def _chain(self, name: str) -> tuple[str, np.ndarray]:
        sampler = "ddim" if name.startswith("ddim") else "ddpm"
        return sampler, respaced_steps(len(self._diffusion.schedule), name)

    def _sample(self, name: str) -> np.ndarray:
        """Walk down one chain; the null class among the labels stands for the last real one."""
        sampler, steps = self._chain(name)
        labels = np.minimum(self._given["y"], self._config.num_classes - 1)
        states: Iterator[Any] = SAMPLERS[sampler](
            self._diffusion.respaced(steps),
            self._published_guidance(SAMPLE_GUIDANCE, labels),
            self._input(f"sample/{name}/start"),
            lambda step: ops.tensor(self._given[f"sample/{name}/noise_draws"][step]),
        )
        with ops.no_grad():
            *_, last = states
            return ops.numpy(last)
