"""The quantities of a file of reference values of flow matching (SiT), recomputed by the active framework.

Names in the file: P is Linear, GVP or VP; Q velocity, noise or score. docs/parity.md has the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.model import DiTConfig
from mindspeed_mm_dit.diffusion.guidance import Guidance
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops, optim
from mindspeed_mm_dit.objectives.flow import ode, sde
from mindspeed_mm_dit.objectives.flow.config import FlowMatchingConfig
from mindspeed_mm_dit.objectives.flow.path import PATHS, PathPoint
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.timesteps import logit_normal, shifted

Tensor = Any
Output = Callable[[Tensor, np.ndarray], Tensor]
"""The network, guided or not: (x, times (B,)) -> output."""

INPUTS = re.compile(r"config|x0|x1|t|y|table/t|time/[uz]|sample/(start|y|brownian)|.*/(accepted|calls)|float64/.*")
"""Names that are given, or kept for information."""
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
GUIDED = Guidance(scale=1.5, channels="3")
ADAMW_LR = 1e-4
GRID = 8
"""Times of a chain, both ends included."""
LAST_STEP = 0.04


def is_flow(names: list[str]) -> bool:
    """Return whether a reference file with the keys ``names`` is one of flow matching."""
    return any(name.startswith("path/") for name in names)


def tolerance(name: str, tolerance: float, table_tolerance: float) -> float:
    """Return the largest relative error of ``name``: wider where the published float32 itself is less exact.

    The reasons stand in docs/parity.md.
    """
    if name.startswith(("table/", "time/", "eps/", "interval/")):
        return table_tolerance
    if re.match(r"ode/.*/dopri5/", name):
        return max(tolerance, 5e-4)
    if name.startswith("param_norm") and name.endswith("attn.qkv.bias"):
        return max(tolerance, 1e-4)
    if re.match(r"(path/VP/u_t|loss/VP/)", name):
        return max(tolerance, 5e-4)
    return tolerance


class RecomputedFlow:
    """The quantities of a reference file as this implementation computes them, each when it is asked for.

    fresh_model: () -> a DiT of ``config`` with the weights the file was computed with.
    """

    def __init__(self, given: dict[str, np.ndarray], config: DiTConfig, fresh_model: Callable[[], Any]) -> None:
        self._given, self._config, self._fresh_model = given, config, fresh_model
        self._model = fresh_model()
        self._chains: dict[str, list[np.ndarray]] = {}

    def value(self, name: str) -> np.ndarray:
        """Return our value of the result ``name``."""
        kind, *rest = name.split("/")
        known: dict[str, Callable[..., Any]] = {
            "table": self._table, "time": self._time, "eps": self._eps, "interval": self._interval,
            "path": self._path, "loss": self._loss, "loss64": self._loss, "grad_norm": self._gradient_norm,
            "t_embedding": self._t_embedding, "loss_after_one_adamw_step": lambda: self._after_one_step[0],
            "param_norm_after_one_adamw_step": lambda parameter: np.linalg.norm(self._after_one_step[1][parameter]),
            "cfg_output_scale1.5_rgb3": self._guided_output, "ode": self._chain, "sde": self._chain,
        }  # fmt: skip
        if kind not in known:
            raise CheckpointError(
                f"--reference: {name}", "is no quantity this command knows", "see docs/parity.md for the format"
            )
        return np.asarray(known[kind](name) if kind in ("ode", "sde") else known[kind](*rest))

    # --- tables and laws -----------------------------------------------------------------------------------

    def _table(self, path: str, name: str, form: str = "") -> np.ndarray:
        t = self._given["table/t"]
        point = PATHS[_PATHS[path]](t)
        return sde.Diffusion(form).at(t, point) if name == "diffusion" else _TABLES[name](point)  # type: ignore[arg-type]

    def _time(self, law: str, parameters: str = "") -> np.ndarray:
        if law == "logit_normal":
            mean, std = re.fullmatch(r"mean(-?[\d.]+)_std([\d.]+)", parameters).groups()  # type: ignore[union-attr]
            return logit_normal(self._given["time/z"], float(mean), float(std))
        number, towards_noise = re.fullmatch(r"shift([\d.]+)(_towards_noise)?", law).groups()  # type: ignore[union-attr]
        return shifted(self._given["time/u"], float(number) if towards_noise else 1 / float(number))

    def _eps(self, path: str, prediction: str) -> np.ndarray:
        return np.array(FlowMatchingConfig(_PATHS[path], prediction).eps)  # type: ignore[arg-type]

    def _interval(self, path: str, prediction: str, use: str) -> np.ndarray:
        config = FlowMatchingConfig(_PATHS[path], prediction)  # type: ignore[arg-type]
        if use == "train":
            return np.array(config.train_interval())
        if use == "ode_reverse":
            return np.array(config.reversed_interval())
        return np.array(config.sample_interval(LAST_STEP if use.startswith("sde") and not use.endswith("None") else 0))

    # --- one evaluation ------------------------------------------------------------------------------------

    def _input(self, name: str) -> Tensor:
        return ops.tensor(self._given[name])

    def _process(self, path: str, prediction: str = "velocity", weight: str = "None") -> FlowMatching:
        chosen = None if weight == "None" else weight
        return FlowMatching(FlowMatchingConfig(_PATHS[path], prediction, chosen))  # type: ignore[arg-type]

    def _noised(self, process: FlowMatching) -> Tensor:
        return process.noised(self._input("x1"), self._input("x0"), ops.tensor(process.coefficients(self._given["t"])))

    def _losses(self, process: FlowMatching, model: Any) -> Tensor:
        output = model(self._noised(process), self._input("t"), self._input("y"))
        coefficients = ops.tensor(process.coefficients(self._given["t"]))
        return process.loss(output, self._input("x1"), self._input("x0"), coefficients)

    def _path(self, path: str, name: str) -> np.ndarray:
        process = self._process(path)
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
            return ops.numpy(self._losses(self._process(path, prediction, weight), self._model))

    @cached_property
    def _gradients(self) -> dict[str, np.ndarray]:
        process = self._process("Linear")
        return optim.gradients(self._model, lambda: self._losses(process, self._model))[1]

    def _gradient_norm(self, parameter: str) -> np.ndarray:
        return np.asarray(np.linalg.norm(self._gradients[parameter].astype(np.float64)))

    @cached_property
    def _after_one_step(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        model, process = self._fresh_model(), self._process("Linear")
        optim.adamw_step(model, lambda: self._losses(process, model), ADAMW_LR)
        with ops.no_grad():
            weights = {name: ops.numpy(p).astype(np.float64) for name, p in model.named_parameters()}
            return ops.numpy(self._losses(process, model)), weights

    def _t_embedding(self) -> np.ndarray:
        return ops.numpy(self._model.t_embedder.code(self._input("t")))

    def _guided_output(self) -> np.ndarray:
        """Both halves of the published batch: each guided alike, each with its own last channels."""
        process, y = self._process("Linear"), self._given["y"]
        with ops.no_grad():
            x, t = self._noised(process), self._input("t")
            null = np.full_like(y, self._config.null_label)
            asked = [self._model(x, t, ops.tensor(labels)) for labels in (y, null)]
            labelled, unlabelled = (output[:, : self._config.in_channels] for output in asked)
            first = GUIDED.combine(labelled, unlabelled, self._config.in_channels)
            return ops.numpy(ops.cat([first, ops.cat([first[:, :3], unlabelled[:, 3:]], 1)], 0))

    # --- chains --------------------------------------------------------------------------------------------

    def _chain(self, name: str) -> np.ndarray:
        """Return the last state of a chain, or the norms of its states; each chain is walked once."""
        chain, _, result = name.rpartition("/")
        if chain not in self._chains:
            kind, path, prediction, *rest, guidance = chain.split("/")
            variant = rest[0 if kind == "ode" else 1].partition("_")[2]
            eps = float(variant[3:]) if variant.startswith("eps") else None
            process = FlowMatching(FlowMatchingConfig(_PATHS[path], prediction, sample_eps=eps))  # type: ignore[arg-type]
            walk = self._ode if kind == "ode" else self._sde
            with ops.no_grad():
                self._chains[chain] = walk(process, self._network(guidance), *rest)
        states = self._chains[chain]
        return states[-1] if result == "result" else np.array([np.linalg.norm(x.astype(np.float64)) for x in states])

    def _ode(self, process: FlowMatching, output: Output, method: str) -> list[np.ndarray]:
        config, is_reverse = process.config, method.endswith("reverse")
        times = np.linspace(*(config.reversed_interval() if is_reverse else config.sample_interval()), GRID)
        start = self._given["x1"][: len(self._given["sample/y"])] if is_reverse else self._given["sample/start"]

        def velocity(x: Tensor, t: np.ndarray) -> Tensor:
            return process.velocity(output(x, t), x, t)

        if method in _TOLERANCES:
            states = ode.dopri5(velocity, ops.tensor(start), times, *_TOLERANCES[method])
        else:
            states = ode.walk(_ODE_STEPS[method.partition("_")[0]], velocity, ops.tensor(start), times)
        return [start, *map(ops.numpy, states)]

    def _sde(self, process: FlowMatching, output: Output, method: str, form: str, last: str) -> list[np.ndarray]:
        form, _, variant = form.partition("_")
        norm, last_step = (0.5 if variant == "norm0.5" else 1.0), (None if last == "None" else last)
        times = np.linspace(*process.config.sample_interval(LAST_STEP if last_step else 0.0), GRID)

        def fields(x: Tensor, t: np.ndarray) -> tuple[Tensor, Tensor]:
            asked = output(x, t)
            return process.velocity(asked, x, t), process.score(asked, x, t)

        equation = sde.Sde(fields, PATHS[process.config.path], sde.Diffusion(form, norm, last_step))  # type: ignore[arg-type]
        brownian, start = self._given["sample/brownian"], self._input("sample/start")
        walked = sde.walk(_SDE_STEPS[method], equation, start, times, lambda step: ops.tensor(brownian[step]))
        states = list(map(ops.numpy, walked))
        return states if last_step else [*states, states[-1]]

    def _network(self, guidance: str) -> Output:
        """Return the network with or without guidance, for the labels of the chains."""
        labels = self._given["sample/y"]
        null = np.full_like(labels, self._config.null_label)

        def ask(x: Tensor, t: np.ndarray, y: np.ndarray) -> Tensor:
            return self._model(x, ops.tensor(t.astype(np.float32)), ops.tensor(y))

        def output(x: Tensor, t: np.ndarray) -> Tensor:
            if guidance == "cfg1":
                return ask(x, t, labels)
            return GUIDED.combine(ask(x, t, labels), ask(x, t, null), self._config.in_channels)

        return output
