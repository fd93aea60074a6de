"""Files of reference values of JiT (Li & He 2025): a network that predicts the image, in pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import ode_trajectory
from mindspeed_mm_dit.objectives.flow.timesteps import logit_normal
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.tools.verify.reference.file import Kind, ReferenceArrays, Tensor, Weights
from mindspeed_mm_dit.tools.verify.reference.images import Point, RecipeFile
from mindspeed_mm_dit.tools.verify.reference.step import Step, rows_of_step
from mindspeed_mm_dit.tools.verify.table import Quantity

_ALWAYS = ("qk_norm", "rms_norm", "swiglu", "rope")
FIRST_TIME = 0.25
"""Time of ``first_velocity``, at the initial noise of sampling."""


class JiT(RecipeFile):
    """The quantities of a file."""

    sizes = ("hidden_size", "num_layers", "num_heads", "patch_size", "input_size", "num_classes", "bottleneck_dim",
             "in_context_len", "in_context_start")  # fmt: skip

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.step = Step(self.fresh_network, lambda net: self.at.losses(net), self.number("args", "lr"), (0.9, 0.95))

    @property
    def flags(self) -> Mapping[str, Any]:
        channels = self.arrays["x" if "x" in self.arrays else "sample/start"].shape[1:2]
        return {**dict.fromkeys(_ALWAYS, True), "learn_sigma": False, "in_channels": channels[0] if channels else 0}

    def process(self, other_noise: bool = False) -> FlowMatching:
        """Return the objective, with the noise scale of the file or with the other one that it has values of."""
        noise_scale = float(self.arrays["noise_scale"])
        return FlowMatching(
            FlowMatchingConfig(
                prediction_type="data", noise_scale=3.0 - noise_scale if other_noise else noise_scale,
                t_eps=self.number("args", "t_eps"),
            )
        )  # fmt: skip

    def times(self) -> np.ndarray:
        """Return the times of the samples, (B,) float32."""
        z = self.arrays["z_normal"].astype(np.float64)
        return logit_normal(z, self.number("args", "P_mean"), self.number("args", "P_std")).astype(np.float32)

    @cached_property
    def at(self) -> Point:
        """The samples at their times."""
        return self._at(self.process(), self.arrays.tensor("y"))

    def _at(self, process: FlowMatching, labels: Tensor) -> Point:
        return Point.of_flow(process, self.arrays.tensor("x"), self.arrays.tensor("e"), self.times(), labels)

    def loss_mean(self, variant: str | None) -> np.ndarray:
        """Return the mean loss: plain, with the other noise scale, with labels dropped, or after the optimizer step."""
        process = self.process()
        network = self.step.network_after if variant == "after_one_adamw_step" else self.network
        labels = self.arrays["y"].astype(np.int64)
        if variant == "labels_dropped":
            drops = self.arrays["drop_u"] < self.number("args", "label_drop_prob")
            labels = np.where(drops, self.unconditional(len(labels)), labels)
        elif variant == "other_noise_scale":
            process = self.process(other_noise=True)
        with ops.no_grad():
            return np.asarray(ops.numpy(self._at(process, ops.tensor(labels)).losses(network)).mean())

    # --- sampling ----------------------------------------------------------------------------------------------------

    def chain(self, method: str, steps: str, guidance: str) -> Tensor:
        """Return the last state of a sampling loop."""
        process = self.process(guidance == "cfg_other_noise_scale")
        with ops.no_grad():
            *_, last = ode_trajectory(
                method, process, self._model_fn(guidance), self.arrays.tensor("sample/start"), int(steps)
            )
        return last

    def first_velocity(self) -> Tensor:
        """Return the guided velocity at the initial noise of sampling."""
        process, t = self.process(), np.full(len(self.arrays["sample/start"]), FIRST_TIME)
        x = process.config.noise_scale * self.arrays.tensor("sample/start")
        with ops.no_grad():
            return process.velocity(self._model_fn("cfg")(x, ops.tensor(t.astype(np.float32)), 1 - t), x, t)

    def _model_fn(self, name: str) -> Callable[[Tensor, Tensor, Any], Tensor]:
        """Return the network, guided where the published code guides: low < t < high, compared in float32."""
        scale, low, high = self.arrays["sample/cfg"].tolist()
        if name.startswith("cfg_interval_"):
            low, high = map(float, name.removeprefix("cfg_interval_").split("_"))
        labels = self.arrays.tensor("sample/y")
        unconditional = ops.tensor(self.unconditional(len(self.arrays["sample/y"])))
        guidance = Guidance(1.0 if name == "cfg1" else scale)

        def model_fn(x: Tensor, t: Tensor, noise: Any) -> Tensor:
            labelled, now = self.network(x, t, labels), np.float32(1 - np.atleast_1d(noise)[0])
            if not (now < np.float32(high) and (low == 0 or now > np.float32(low))):
                return labelled
            return guidance.combine(labelled, self.network(x, t, unconditional), self.config.in_channels)

        return model_fn


_N = r"\d+(?:\.\d*)?"
_JIT_CHAIN = rf"sample/(euler|heun)([1-9]\d*)/(cfg|cfg1|cfg_other_noise_scale|cfg_interval_{_N}_{_N})/result"
_FIRST = r"sample/(?:euler|heun)\d+/first_velocity"

JIT = Kind(
    signature=rf"x_pred|z_normal|loss_mean(_.+)?|grad_norm/net\..+|{_JIT_CHAIN}|{_FIRST}",
    inputs=r"config|x|e|z_normal|y|drop_u|noise_scale|sample/(start|y|cfg)",
    program=JiT,
    rows=(
        Quantity("t", JiT.times),
        Quantity("z_t", lambda file: file.at.x_t),
        Quantity("x_pred", lambda file: file.at.output(file.network)),
        Quantity("loss", lambda file: file.step.losses),
        Quantity("loss_mean(?:_(labels_dropped|other_noise_scale|after_one_adamw_step))?", JiT.loss_mean),
        Quantity(_JIT_CHAIN, JiT.chain),
        Quantity(_FIRST, JiT.first_velocity),
        *rows_of_step(lambda file: file.step, prefix=r"net\."),
    ),
)
