"""Files of reference values of flow matching as published in SiT (Ma et al. 2024).

Names in the file: P is Linear, GVP or VP; Q velocity, noise or score. docs/verification.md describes the format.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.flow import solvers
from mindspeed_mm_dit.objectives.flow.path import PATHS, DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import dopri5_trajectory, ode_trajectory, sde_trajectory
from mindspeed_mm_dit.objectives.flow.timesteps import logit_normal, shifted
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.objectives.registry import ModelFn
from mindspeed_mm_dit.tools.verify.reference.file import (
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    rows_of_step,
)
from mindspeed_mm_dit.tools.verify.reference.images import LabelledImages, Point, rows_of_chain
from mindspeed_mm_dit.tools.verify.table import EXACT, Bound, Quantity

_PATHS = {"Linear": "linear", "GVP": "gvp", "VP": "vp"}
_TABLES = {name: name for name in ("alpha", "d_alpha", "sigma", "d_sigma", "alpha_ratio")} | {"drift_var": "score_gain"}
_TOLERANCES = {"dopri5": (1e-3, 1e-6), "dopri5_tight": (1e-6, 1e-7)}
"""Relative and absolute tolerance of the file's solvers."""
STEPS = 7
"""Even sampling steps, if the file has no noise from which to count them."""
LAST_STEP = 0.04


class SiT(LabelledImages):
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.steps = len(arrays.get("sample/brownian", range(STEPS)))
        self.at, self.states = cache(self._at), cache(self._states)
        self.step = OptimizerStep(self.fresh_network, lambda network: self.at("Linear").losses(network))

    # --- one evaluation ------------------------------------------------------------------------------------

    def _at(self, path: str, prediction: str = "velocity", weight: str = "None") -> Point:
        x, noise, y = map(self.arrays.tensor, ("x1", "x0", "y"))
        return Point.of_flow(FlowMatching(_config(path, prediction, weight)), x, noise, self.arrays["t"], y)

    def loss(self, *case: str) -> Tensor:
        """Return the weighted loss of each sample, (B,)."""
        with ops.no_grad():
            return self.at(*case).losses(self.network)

    def guided(self, scale: str, channels: str) -> Tensor:
        """Return the published batch of two halves, guided."""
        C, at = self.config.in_channels, self.at("Linear")
        return self.guided_halves(at.x_t, at.draws[0], self.arrays["y"], float(scale), int(channels))[:, :C]

    # --- sampling ------------------------------------------------------------------------------------------

    def _states(self, kind: str, path: str, prediction: str, rest: str, guidance: str) -> list[np.ndarray]:
        """Return the states of a sampling loop; cached by ``states``."""
        process = FlowMatching(_config(path, prediction, sample_eps=_number_after("_eps", rest)))
        model_fn, start = self.guided_model(Guidance(float(guidance), "3")), self.arrays.tensor("sample/start")
        method, *rest_of = rest.split("/")
        if kind == "sde":
            return self._sde(process, model_fn, start, method, *rest_of)
        solver = method.partition("_eps")[0]
        if solver in _TOLERANCES:
            trajectory = dopri5_trajectory(process, model_fn, start, self.steps, *_TOLERANCES[solver])
        elif solver.endswith("_reverse"):
            start = self.arrays.tensor("x1")[: len(self.arrays["sample/y"])]
            times = np.linspace(*process.config.reversed_interval(), self.steps + 1)
            step = solvers.euler if solver.startswith("euler") else solvers.heun
            trajectory = solvers.integrate(step, self.velocity(process, model_fn), start, times)
        else:
            trajectory = ode_trajectory(solver.removesuffix("2"), process, model_fn, start, self.steps)
        return [ops.numpy(start), *map(ops.numpy, trajectory)]

    def _sde(
        self, process: FlowMatching, model_fn: ModelFn, start: Tensor, method: str, *rest: str
    ) -> list[np.ndarray]:
        form, last = rest
        size, last_step = _number_after("_norm", form), (None if last == "None" else last)
        form, size = form.partition("_")[0], 1.0 if size is None else size
        diffusion = DiffusionCoefficient(form, size, last_step)  # type: ignore[arg-type]
        brownian, steps = self.arrays.tensor("sample/brownian"), self.steps + (last_step is not None)
        trajectory = sde_trajectory(
            f"sde-{method.lower()}", process, model_fn, start, lambda step: brownian[step], steps, diffusion
        )
        states = list(map(ops.numpy, trajectory))
        return states if last_step else [*states, states[-1]]


def _config(
    path: str, prediction: str = "velocity", weight: str = "None", sample_eps: float | None = None
) -> FlowMatchingConfig:
    """Return the config of the objective for names in the file."""
    chosen = None if weight == "None" else weight
    return FlowMatchingConfig(_PATHS[path], prediction, chosen, sample_eps=sample_eps)  # type: ignore[arg-type]


def _interval(path: str, prediction: str, use: str) -> tuple[float, float]:
    config = _config(path, prediction)
    if use == "train":
        return config.train_interval()
    if use == "ode_reverse":
        return config.reversed_interval()
    return config.sample_interval(LAST_STEP if use.startswith("sde") and not use.endswith("None") else 0)


def _number_after(mark: str, text: str) -> float | None:
    match = re.search(rf"{mark}([\d.]+)", text)
    return float(match[1]) if match else None


NEAR_DATA = Bound(
    "1 - exp(2 l) cancels near t = 1: the published float32 itself is no more exact.", least=lambda reference: 5e-4
)
ADAPTIVE_STEPS = Bound(
    "dopri5 chooses steps by an error norm, ours of each sample and the published of the whole batch.",
    least=lambda reference: 5e-4,
)
_P, _Q, _N = "(Linear|GVP|VP)", "(velocity|noise|score)", r"\d+(?:\.\d*)?"
_FORMS = "constant|SBDM|sigma|linear|decreasing|increasing-decreasing"
_LAST = "(?:Mean|Euler|Tweedie|None)"


def _shifted_times(u: np.ndarray, number: str, towards_noise: str | None) -> np.ndarray:
    return shifted(u, float(number) if towards_noise else 1 / float(number))


SIT = FileKind(
    signature=rf"x1|t_embedding|sample/(y|brownian)|table/(t|{_P}/.+)|(path|loss|loss64|eps|interval|time|ode|sde)/.+",
    inputs=r"config|x0|x1|t|y|table/t|time/[uz]|sample/(start|y|brownian)|.*/(accepted|calls)",
    program=SiT,
    rows=(
        Quantity(
            rf"table/{_P}/({'|'.join(_TABLES)})",
            lambda file, path, name: getattr(PATHS[_PATHS[path]](file.arrays["table/t"]), _TABLES[name]),
            EXACT,
        ),
        Quantity(
            rf"table/{_P}/diffusion/({_FORMS})",
            lambda file, path, form: DiffusionCoefficient(form).at(t := file.arrays["table/t"], PATHS[_PATHS[path]](t)),
            EXACT,
        ),
        Quantity(
            rf"time/logit_normal/mean(-?{_N})_std({_N})",
            lambda file, mean, std: logit_normal(file.arrays["time/z"], float(mean), float(std)),
            EXACT,
        ),
        Quantity(
            rf"time/shift((?=.*[1-9]){_N})(_towards_noise)?",
            lambda file, *shift: _shifted_times(file.arrays["time/u"], *shift),
            EXACT,
        ),
        Quantity(rf"eps/{_P}/{_Q}", lambda file, *names: np.array(_config(*names).eps), EXACT),
        Quantity(
            rf"interval/{_P}/{_Q}/(train|ode|ode_reverse|sde_(?:{_FORMS})_{_LAST})",
            lambda file, *names: np.array(_interval(*names)),
            EXACT,
        ),
        Quantity("t_embedding", lambda file: file.network.t_embedder.code(file.arrays.tensor("t"))),
        Quantity(f"path/{_P}/x_t", lambda file, path: file.at(path).x_t),
        Quantity("path/(VP)/u_t", lambda file, path: file.at(path).target(), NEAR_DATA),
        Quantity(f"path/{_P}/u_t", lambda file, path: file.at(path).target()),
        Quantity(
            f"path/{_P}/output", lambda file, path: file.at(path).output(file.network)[:, : file.config.in_channels]
        ),
        Quantity(r"loss/(VP)/(velocity)/(None)", SiT.loss, NEAR_DATA),
        Quantity(r"loss/(VP)/(noise|score)/(None|velocity|likelihood)", SiT.loss, NEAR_DATA),
        Quantity(rf"loss(?:64)?/{_P}/(velocity)/(None)", SiT.loss),
        Quantity(rf"loss(?:64)?/{_P}/(noise|score)/(None|velocity|likelihood)", SiT.loss),
        Quantity(rf"cfg_output_scale({_N})_rgb(\d+)", SiT.guided),
        *rows_of_chain(rf"(ode)/{_P}/{_Q}/(dopri5(?:_eps{_N})?)/cfg({_N})", ADAPTIVE_STEPS),
        *rows_of_chain(rf"(ode)/{_P}/{_Q}/((?:(?:euler|heun2)(?:_reverse)?|dopri5_tight)(?:_eps{_N})?)/cfg({_N})"),
        *rows_of_chain(rf"(sde)/{_P}/{_Q}/((?:Euler|Heun)/(?:{_FORMS})(?:_(?:norm|eps){_N})?/{_LAST})/cfg({_N})"),
        *rows_of_step(lambda file: file.step),
    ),
)
