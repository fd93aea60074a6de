"""The quantities of a file of reference values of flow matching (SiT), recomputed by the active framework.

Names in the file: P is Linear, GVP or VP; Q velocity, noise or score. docs/parity.md has the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.framework import ops, optim, runtime
from mindspeed_mm_dit.objectives.flow import ode, sde
from mindspeed_mm_dit.objectives.flow.diffusion import Diffusion
from mindspeed_mm_dit.objectives.flow.path import PATHS, PathPoint
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.timesteps import logit_normal, shifted
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.verify.reference.file import ADAMW_LR, Reference, unknown_quantity

Tensor = Any
Output = Callable[[Tensor, np.ndarray], Tensor]
"""The network, guided or not: (x, times (B,)) -> output."""

_PATHS = {"Linear": "linear", "GVP": "gvp", "VP": "vp"}
_TABLES: dict[str, Callable[[PathPoint], np.ndarray]] = {
    "alpha": lambda point: point.alpha,
    "d_alpha": lambda point: point.d_alpha,
    "sigma": lambda point: point.sigma,
    "d_sigma": lambda point: point.d_sigma,
    "alpha_ratio": lambda point: point.alpha_ratio,
    "drift_var": lambda point: point.score_gain,
}
_ODE_STEPS = {"euler": ode.euler, "heun2": ode.heun}
_SDE_STEPS = {"Euler": sde.euler_maruyama, "Heun": sde.heun}
_TOLERANCES = {"dopri5": (1e-3, 1e-6), "dopri5_tight": (1e-6, 1e-7)}
"""Relative and absolute, as the file's chains were run."""
STEPS = 7
"""Even steps of a chain, where the file has no noise for them that tells."""
LAST_STEP = 0.04


_P, _Q = "(Linear|GVP|VP)", "(velocity|noise|score)"
_P_, _Q_ = _P.replace("(", "(?:"), _Q.replace("(", "(?:")
_FORMS = "constant|SBDM|sigma|linear|decreasing|increasing-decreasing"
_LAST = "(?:Mean|Euler|Tweedie|None)"
_N = r"\d+(?:\.\d*)?"
_CFG = rf"cfg{_N}/(?:result|norms)"
_GRID = r"(?:euler|heun2)(?:_reverse)?"
_FREE = r"dopri5(?:_tight)?"
_QUANTITIES = {
    rf"table/{_P}/({'|'.join(_TABLES)})": "_table",
    rf"table/{_P}/diffusion/({_FORMS})": "_diffusion_table",
    rf"time/logit_normal/mean(-?{_N})_std({_N})": "_logit_normal",
    rf"time/shift({_N})(_towards_noise)?": "_shifted",
    rf"eps/{_P}/{_Q}": "_eps",
    rf"interval/{_P}/{_Q}/(train|ode|ode_reverse|sde_(?:{_FORMS})_{_LAST})": "_interval",
    "t_embedding": "_t_embedding",
    rf"path/{_P}/(x_t|u_t|output)": "_path",
    rf"loss(?:64)?/{_P}/(velocity)/(None)": "_loss",
    rf"loss(?:64)?/{_P}/(noise|score)/(None|velocity|likelihood)": "_loss",
    r"grad_norm/(.+)": "_gradient_norm",
    r"param_norm_after_one_adamw_step/(.+)": "_norm_after_one_step",
    "loss_after_one_adamw_step": "_loss_after_one_step",
    rf"cfg_output_scale({_N})_rgb(\d+)": "_guided_output",
    rf"(ode/{_P_}/{_Q_}/(?:{_GRID}|{_FREE})(?:_eps{_N})?/{_CFG})": "_chain",
    rf"(sde/{_P_}/{_Q_}/(?:{'|'.join(_SDE_STEPS)})/(?:{_FORMS})(?:_(?:norm|eps){_N})?/{_LAST}/{_CFG})": "_chain",
}
"""What a key means to us: its form, and the method that recomputes it."""
_OF_FLOW = re.compile(
    rf"x1|t_embedding|sample/(y|brownian)|table/(t|{_P}/.+)|(path|loss|loss64|eps|interval|time|ode|sde)/.+"
)
"""Keys that no file of a DiT has."""


def is_flow(names: Iterable[str]) -> bool:
    """Return whether a reference file with the keys ``names`` is one of flow matching."""
    return any(map(_OF_FLOW.fullmatch, names))


class FlowParity:
    """The quantities of a reference file as this implementation computes them, each when it is asked for."""

    inputs = re.compile(r"config|x0|x1|t|y|table/t|time/[uz]|sample/(start|y|brownian)|.*/(accepted|calls)")
    """Names that are given, or kept for information."""
    num_timesteps = None
    """Times are real numbers."""

    def __init__(self, reference: Reference) -> None:
        self._given, self._config, self._fresh_model = reference.given, reference.config, reference.fresh_model
        self._model = runtime.compiled(reference.fresh_model())
        self._chains: dict[str, list[np.ndarray]] = {}
        self._steps = len(self._given.get("sample/brownian", range(STEPS)))

    @staticmethod
    def tolerance(name: str, tolerance: float, table_tolerance: float) -> float:
        """Return the largest relative error of ``name``: wider where the published float32 itself is less exact.

        The reasons stand in docs/parity.md.
        """
        if name.startswith(("table/", "time/", "eps/", "interval/")):
            return table_tolerance
        if re.match(rf"ode/.*/dopri5(_eps{_N})?/|path/VP/u_t|loss/VP/", name):
            return max(tolerance, 5e-4)
        if name.startswith("param_norm") and name.endswith("attn.qkv.bias"):
            return max(tolerance, 1e-4)
        return tolerance

    def value(self, name: str) -> np.ndarray:
        """Return our value of the result ``name``."""
        for pattern, method in _QUANTITIES.items():
            if found := re.fullmatch(pattern, name):
                self._check_parameter(name)
                return np.asarray(getattr(self, method)(*found.groups()))
        raise unknown_quantity(name)

    def _check_parameter(self, name: str) -> None:
        """Raise CheckpointError for a result ``name`` of a parameter that the network does not train."""
        kind, _, parameter = name.partition("/")
        trained = self._config.parameters().shapes(trained_only=kind == "grad_norm")
        if kind in ("grad_norm", "param_norm_after_one_adamw_step") and parameter not in trained:
            raise unknown_quantity(name)

    # --- tables and laws -----------------------------------------------------------------------------------

    def _table(self, path: str, name: str) -> np.ndarray:
        return _TABLES[name](PATHS[_PATHS[path]](self._given["table/t"]))

    def _diffusion_table(self, path: str, form: str) -> np.ndarray:
        t = self._given["table/t"]
        return Diffusion(form).at(t, PATHS[_PATHS[path]](t))  # type: ignore[arg-type]

    def _logit_normal(self, mean: str, std: str) -> np.ndarray:
        return logit_normal(self._given["time/z"], float(mean), float(std))

    def _shifted(self, number: str, towards_noise: str | None) -> np.ndarray:
        if float(number) == 0:
            raise unknown_quantity(f"time/shift{number}{towards_noise or ''}")
        return shifted(self._given["time/u"], float(number) if towards_noise else 1 / float(number))

    def _eps(self, path: str, prediction: str) -> np.ndarray:
        return np.array(_config(path, prediction).eps)

    def _interval(self, path: str, prediction: str, use: str) -> np.ndarray:
        config = _config(path, prediction)
        if use == "train":
            return np.array(config.train_interval())
        if use == "ode_reverse":
            return np.array(config.reversed_interval())
        return np.array(config.sample_interval(LAST_STEP if use.startswith("sde") and not use.endswith("None") else 0))

    # --- one evaluation ------------------------------------------------------------------------------------

    def _input(self, name: str) -> Tensor:
        return ops.tensor(self._given[name])

    def _noised(self, process: FlowMatching) -> Tensor:
        return process.noised(self._input("x1"), *self._draws(process))

    def _draws(self, process: FlowMatching) -> tuple[Tensor, Tensor, Tensor]:
        return self._input("t"), self._input("x0"), ops.tensor(process.coefficients(self._given["t"]))

    def _losses(self, process: FlowMatching, model: Any) -> Tensor:
        noised = self._noised(process)
        output = model(noised, self._input("t"), self._input("y"))
        return process.loss(output, self._input("x1"), noised, *self._draws(process))

    def _path(self, path: str, name: str) -> np.ndarray:
        process = FlowMatching(_config(path))
        if name == "u_t":
            coefficients = ops.tensor(process.coefficients(self._given["t"]))
            return ops.numpy(process.target(self._input("x1"), self._input("x0"), coefficients))
        if name == "x_t":
            return ops.numpy(self._noised(process))
        with ops.no_grad():
            output = self._model(self._noised(process), self._input("t"), self._input("y"))
            return ops.numpy(output)[:, : self._config.in_channels]

    def _loss(self, path: str, prediction: str, weight: str) -> np.ndarray:
        with ops.no_grad():
            return ops.numpy(self._losses(FlowMatching(_config(path, prediction, weight)), self._model))

    @cached_property
    def _gradients(self) -> dict[str, np.ndarray]:
        process = FlowMatching(_config("Linear"))
        return optim.gradients(self._model, lambda: self._losses(process, self._model))[1]

    def _gradient_norm(self, parameter: str) -> np.ndarray:
        return np.asarray(np.linalg.norm(self._gradients[parameter].astype(np.float64)))

    def _norm_after_one_step(self, parameter: str) -> np.ndarray:
        return np.asarray(np.linalg.norm(self._after_one_step[1][parameter]))

    def _loss_after_one_step(self) -> np.ndarray:
        return self._after_one_step[0]

    @cached_property
    def _after_one_step(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        model, process = self._fresh_model(), FlowMatching(_config("Linear"))
        optim.adamw_step(model, lambda: self._losses(process, model), ADAMW_LR)
        with ops.no_grad():
            weights = {name: ops.numpy(p).astype(np.float64) for name, p in model.named_parameters()}
            return ops.numpy(self._losses(process, model)), weights

    def _t_embedding(self) -> np.ndarray:
        return ops.numpy(self._model.t_embedder.code(self._input("t")))

    def _guided_output(self, scale: str, channels: str) -> np.ndarray:
        """Both halves of the published batch: each guided alike, each with its own last channels."""
        process, y = FlowMatching(_config("Linear")), self._given["y"]
        guidance, null = Guidance(float(scale)), self._config.condition.null(len(y))["labels"]
        guided = min(int(channels), self._config.in_channels)
        with ops.no_grad():
            x, t = self._noised(process), self._input("t")
            asked = [self._model(x, t, ops.tensor(labels)) for labels in (y, null)]
            labelled, unlabelled = (output[:, : self._config.in_channels] for output in asked)
            first = guidance.combine(labelled[:, :guided], unlabelled[:, :guided], guided)
            halves = [ops.cat([first, half[:, guided:]], 1) for half in (labelled, unlabelled)]
            return ops.numpy(ops.cat(halves, 0))

    # --- chains --------------------------------------------------------------------------------------------

    def _chain(self, name: str) -> np.ndarray:
        """Return the last state of a chain, or the norms of its states; each chain is walked once."""
        chain, _, result = name.rpartition("/")
        if chain not in self._chains:
            kind, path, prediction, *rest, guidance = chain.split("/")
            eps = _number_after("_eps", chain)
            process = FlowMatching(_config(path, prediction, sample_eps=eps))
            walk = self._ode if kind == "ode" else self._sde
            with ops.no_grad():
                self._chains[chain] = walk(process, self._network(guidance), *rest)
        states = self._chains[chain]
        return states[-1] if result == "result" else np.array([np.linalg.norm(x.astype(np.float64)) for x in states])

    def _ode(self, process: FlowMatching, output: Output, method: str) -> list[np.ndarray]:
        config, is_reverse = process.config, "_reverse" in method
        times = np.linspace(*(config.reversed_interval() if is_reverse else config.sample_interval()), self._steps + 1)
        start = self._given["x1"][: len(self._given["sample/y"])] if is_reverse else self._given["sample/start"]

        def velocity(x: Tensor, t: np.ndarray) -> Tensor:
            return process.velocity(output(x, t), x, t)

        if (solver := method.partition("_eps")[0]) in _TOLERANCES:
            states = ode.dopri5(velocity, ops.tensor(start), times, *_TOLERANCES[solver])
        else:
            states = ode.walk(_ODE_STEPS[method.partition("_")[0]], velocity, ops.tensor(start), times)
        return [start, *map(ops.numpy, states)]

    def _sde(self, process: FlowMatching, output: Output, method: str, form: str, last: str) -> list[np.ndarray]:
        norm, last_step = _number_after("_norm", form), (None if last == "None" else last)
        times = np.linspace(*process.config.sample_interval(LAST_STEP if last_step else 0.0), self._steps + 1)

        def fields(x: Tensor, t: np.ndarray) -> tuple[Tensor, Tensor]:
            asked = output(x, t)
            return process.velocity(asked, x, t), process.score(asked, x, t)

        diffusion = Diffusion(form.partition("_")[0], 1.0 if norm is None else norm, last_step)  # type: ignore[arg-type]
        equation = sde.Sde(fields, PATHS[process.config.path], diffusion)
        brownian, start = self._given["sample/brownian"], self._input("sample/start")
        walked = sde.walk(_SDE_STEPS[method], equation, start, times, lambda step: ops.tensor(brownian[step]))
        states = list(map(ops.numpy, walked))
        return states if last_step else [*states, states[-1]]

    def _network(self, guidance: str) -> Output:
        """Return the network with or without guidance, for the labels of the chains."""
        labels = self._given["sample/y"]
        null = self._config.condition.null(len(labels))["labels"]

        def ask(x: Tensor, t: np.ndarray, y: np.ndarray) -> Tensor:
            return self._model(x, ops.tensor(t.astype(np.float32)), ops.tensor(y))

        def output(x: Tensor, t: np.ndarray) -> Tensor:
            if guidance == "cfg1":
                return ask(x, t, labels)
            guided = Guidance(float(guidance.removeprefix("cfg")), "3")
            return guided.combine(ask(x, t, labels), ask(x, t, null), self._config.in_channels)

        return output


def _config(
    path: str, prediction: str = "velocity", weight: str = "None", sample_eps: float | None = None
) -> FlowMatchingConfig:
    """Return the section of model.json that the file's names stand for."""
    chosen = None if weight == "None" else weight
    return FlowMatchingConfig(_PATHS[path], prediction, chosen, sample_eps=sample_eps)  # type: ignore[arg-type]


def _number_after(mark: str, text: str) -> float | None:
    found = re.search(rf"{mark}([\d.]+)", text)
    return float(found[1]) if found else None
