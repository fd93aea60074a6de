"""Files of reference values of MeanFlow (Geng et al. 2025). t = 0 is data, t = 1 noise, r <= t."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.diffusion import MeanFlowConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.mean_flow.objective import even_times, integrate, interval, set_equal_times
from mindspeed_mm_dit.objectives.mean_flow.process import MeanFlow
from mindspeed_mm_dit.tools.verify.reference.file import (
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    evaluate,
)
from mindspeed_mm_dit.tools.verify.reference.images import RecipeFile
from mindspeed_mm_dit.tools.verify.table import GRADIENTS, Quantity

_N = r"\d+(?:\.\d*)?"
_GUIDED = rf"omega({_N})_kappa({_N})(?:_t({_N})_({_N}))?"
_CASE = rf"((?:plain|no_guidance|{re.sub('[(](?![?])', '(?:', _GUIDED)})(?:_p{_N})?(?:_eps{_N})?)"


class MeanFlowFile(RecipeFile):
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.case = cache(lambda name: Case(self, name))

    @property
    def flags(self) -> Mapping[str, Any]:
        return {"learn_sigma": False, "h_embedder": True}

    @property
    def shapes(self) -> Mapping[str, tuple[int | None, ...]]:
        return {**super().shapes, "time/z": (2, None)}

    def process(self, case: str) -> MeanFlow:
        """Return the objective of a case."""
        settings = {"omega": 1.0, "kappa": 0.0}
        if guided := re.match(_GUIDED, case):
            names = ("omega", "kappa", "t_start", "t_end")
            settings |= {name: float(value) for name, value in zip(names, guided.groups()) if value is not None}
        for name, mark in (("norm_p", "_p"), ("norm_eps", "_eps")):
            match = re.search(rf"{mark}({_N})", case)
            settings[name] = float(match[1]) if match else self.number("args", name)
        return MeanFlow(MeanFlowConfig(**settings))  # type: ignore[arg-type]

    def labels(self) -> Tensor:
        """Return the labels; as in the published code, ``drop_u`` only sets how many of the first are dropped."""
        labels, unconditional = self.arrays["y"].astype(np.int64), self.config.num_classes
        dropped = int((self.arrays["drop_u"] < self.number("args", "class_dropout_prob")).sum())
        return ops.tensor(np.where(np.arange(len(labels)) < dropped, unconditional, labels))

    def output(self, unconditional: str | None) -> Tensor:
        """Return the average velocity at the samples, with or without labels."""
        labels, at = self.arrays.tensor("y"), self.case("plain")
        return evaluate(
            self.network, at.z_t, at.draws[0], labels * 0 + self.config.num_classes if unconditional else labels
        )

    # --- times and sampling ------------------------------------------------------------------------------------------

    def times(self, name: str) -> np.ndarray:
        """Return the later or the earlier times of the file's draws."""
        config = MeanFlowConfig(self.number("args", "P_mean"), self.number("args", "P_std"))
        ends = interval(config, self.arrays["time/z"].astype(np.float64))
        alike = np.arange(len(ends)) < int(self.number("args", "data_proportion") * len(ends))
        return set_equal_times(ends, alike).astype(np.float32)[:, "tr".index(name)]

    def chain(self, steps: str) -> Tensor:
        """Return the last state of a sampling loop, over the file's times or even ones."""
        times = self.arrays.get(f"sample/steps{steps}/t_grid", even_times(int(steps)))
        labels = self.arrays.tensor("sample/y")
        with ops.no_grad():
            model_fn = lambda x, ends, noise: self.network(x, ends, labels)  # noqa: E731
            *_, last = integrate(model_fn, self.arrays.tensor("sample/start"), times)
        return last


class Case:
    """The objective of one case, at the samples of a file."""

    def __init__(self, file: MeanFlowFile, name: str) -> None:
        x, e = map(file.arrays.tensor, "xe")
        self._file, self._x, self.process, self._unconditional = file, x, file.process(name), file.config.num_classes
        times = np.stack([file.arrays["t"], file.arrays["r"]], 1).astype(np.float32)
        self.draws = ops.tensor(times), e, ops.tensor(np.zeros(len(times), np.float32))
        self.z_t, self.v = self.process.noised(x, *self.draws), e - x
        self.step = OptimizerStep(file.fresh_network, self.losses)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the file, some of them dropped."""
        return self._file.labels()

    @property
    def _at(self) -> tuple[Any, ...]:
        return self._file.network, self.z_t, self.v, self.draws[0], self.labels, self._unconditional

    def losses(self, network: DiT | None = None) -> Tensor:
        """Return the weighted loss of each sample, (B,)."""
        return self.process.losses(
            network or self._file.network, self._unconditional, self._x, self.labels, *self.draws
        )

    def loss(self) -> np.ndarray:
        """Return the mean of the weighted losses."""
        with ops.no_grad():
            return np.asarray(ops.numpy(self.losses()).mean())

    @cached_property
    def u(self) -> Tensor:
        """The average velocity that is trained."""
        return evaluate(self._file.network, self.z_t, self.draws[0], self.labels)

    @cached_property
    def guided(self) -> Tensor:
        """The velocity term of the target."""
        with ops.no_grad():
            return self.process.guided(*self._at)

    def rate(self) -> Tensor:
        """Return the derivative of the network along the path."""
        return self.process.derivative(self._file.network, self.z_t, self.guided, self.draws[0], self.labels)

    @cached_property
    def target(self) -> Tensor:
        """The target of the average velocity."""
        return self.process.target(*self._at)

    def denominator(self) -> Tensor:
        """Return the divisors of the squared errors, (B,)."""
        return self.process.denominator(self.process.squared(self.u - self.target))


MEAN_FLOW = FileKind(
    signature=r"r|output_null|time/r|train/.+|sample/steps\d+/.+|grad_norm/h_embedder\..+",
    inputs=r"config|x|e|t|r|y|drop_u|time/z|sample/(start|y)|sample/steps\d+/t_grid",
    program=MeanFlowFile,
    rows=(
        Quantity("z_t", lambda file: file.case("plain").z_t),
        Quantity("output(_null)?", MeanFlowFile.output),
        Quantity("time/(t|r)", MeanFlowFile.times),
        Quantity(f"train/{_CASE}/v_g", lambda file, case: file.case(case).guided),
        Quantity(f"train/{_CASE}/u", lambda file, case: file.case(case).u),
        Quantity(f"train/{_CASE}/dudt", lambda file, case: file.case(case).rate()),
        Quantity(f"train/{_CASE}/u_target", lambda file, case: file.case(case).target),
        Quantity(f"train/{_CASE}/weight_denominator", lambda file, case: file.case(case).denominator()),
        Quantity(f"train/{_CASE}/loss", lambda file, case: file.case(case).loss()),
        Quantity(f"train/{_CASE}/v_loss", lambda file, case: (at := file.case(case)).process.squared(at.u - at.v)),
        Quantity(
            f"train/{_CASE}/grad_norm/(.+)", lambda file, case, p: file.case(case).step.gradient_norm(p), GRADIENTS
        ),
        Quantity(r"sample/steps([1-9]\d*)/result", MeanFlowFile.chain),
    ),
)
