"""Files of reference values of SiT (Ma et al. 2024), and of REPA (Yu et al. 2024), which aligns it with an encoder.

In the names of a file of SiT, P is Linear, GVP or VP; Q velocity, noise or score. In a file of REPA, and for its
network, t = 0 is data and t = 1 noise; here it is 1 - t. docs/verification.md describes both formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.flow import solvers
from mindspeed_mm_dit.objectives.flow.path import PATHS, DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import dopri5_trajectory, ode_trajectory, sde_trajectory
from mindspeed_mm_dit.objectives.flow.timesteps import logit_normal, network_time, shifted
from mindspeed_mm_dit.objectives.guidance import Guidance, projection_loss
from mindspeed_mm_dit.objectives.registry import ModelFn
from mindspeed_mm_dit.tools.verify.reference.file import (
    ZERO,
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    rows_of_step,
)
from mindspeed_mm_dit.tools.verify.reference.images import LabelledImages, Point, RecipeFile, rows_of_chain
from mindspeed_mm_dit.tools.verify.table import EXACT, GRADIENTS, Bound, Quantity, UnknownQuantity

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


_REPA_PATHS = {"linear": "linear", "cosine": "gvp"}
_STEPS = {"euler": solvers.euler, "heun": solvers.heun}
_LOW_INTERVAL = (0.25, 1.0)
"""Guidance interval of ``cfg_interval_low``."""
REPA_STEPS = 8
"""Sampling steps, the last one included, if the file has no noise from which to count them."""


class Repa(RecipeFile):
    """The quantities of a file."""

    sizes = (*LabelledImages.sizes, "encoder_depth", "projector_dim")

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.steps = len(arrays["sample/brownian"]) + 1 if "sample/brownian" in arrays else REPA_STEPS
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
        return {name: FlowMatching(FlowMatchingConfig(path=path, data_time=0)) for name, path in _REPA_PATHS.items()}  # type: ignore[arg-type]

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
            raise UnknownQuantity(f"The network has {len(self.config.z_dims)} projectors (z_dims).")
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
