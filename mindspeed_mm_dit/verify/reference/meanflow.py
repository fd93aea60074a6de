"""Files of reference values of MeanFlow (Geng et al. 2025). t = 0 is data, t = 1 noise, r <= t."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.mean_flow import MeanFlowConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.mean_flow.draws import interval, with_equal
from mindspeed_mm_dit.objectives.mean_flow.objective import even_times, walk
from mindspeed_mm_dit.objectives.mean_flow.process import MeanFlow
from mindspeed_mm_dit.verify.reference.contract import Kind
from mindspeed_mm_dit.verify.reference.file import Given, Tensor, Weights, answer
from mindspeed_mm_dit.verify.reference.recipe import RecipeFile
from mindspeed_mm_dit.verify.step import Step, norm
from mindspeed_mm_dit.verify.table import GRADIENTS, NotThere, Quantity

_N = r"\d+(?:\.\d*)?"
_GUIDED = rf"omega({_N})_kappa({_N})(?:_t({_N})_({_N}))?"
_CASE = rf"((?:plain|no_guidance|{re.sub('[(](?![?])', '(?:', _GUIDED)})(?:_p{_N})?(?:_eps{_N})?)"


class MeanFlowFile(RecipeFile):
    """The quantities of a file."""

    sizes = ("hidden_size", "num_layers", "num_heads", "patch_size", "input_size", "in_channels", "num_classes")

    def __init__(self, given: Given, weights: Weights) -> None:
        super().__init__(given, weights)
        self.step_of = cache(self._step_of)

    @property
    def flags(self) -> Mapping[str, Any]:
        """Settings of the network beside its sizes."""
        return {"learn_sigma": False, "h_embedder": True}

    @property
    def adamw(self) -> tuple[float, tuple[float, float]]:
        """No file holds a step."""
        return 0.0, (0.9, 0.999)

    @property
    def shapes(self) -> Mapping[str, tuple[int | None, ...]]:
        """Shape of each input."""
        return {**super().shapes, "time/z": (2, None)}

    def losses(self, network: DiT) -> Tensor:
        """Return the loss of each sample without guidance."""
        return self._losses(network, "plain")

    def process(self, case: str) -> MeanFlow:
        """Return what is learned in a case."""
        settings = {"omega": 1.0, "kappa": 0.0}
        if found := re.match(_GUIDED, case):
            names = ("omega", "kappa", "t_start", "t_end")
            settings |= {name: float(value) for name, value in zip(names, found.groups()) if value is not None}
        for name, mark in (("norm_p", "_p"), ("norm_eps", "_eps")):
            asked = re.search(rf"{mark}({_N})", case)
            settings[name] = float(asked[1]) if asked else self.number("args", name)
        return MeanFlow(MeanFlowConfig(**settings))  # type: ignore[arg-type]

    # --- one evaluation --------------------------------------------------------------------------------------------

    def _draws(self) -> tuple[Tensor, Tensor, Tensor]:
        times = np.stack([self.given["t"], self.given["r"]], 1).astype(np.float32)
        return ops.tensor(times), self.given.tensor("e"), ops.tensor(np.zeros(len(times), np.float32))

    def _labels(self) -> Tensor:
        """Return the labels, as many of the first dropped as ``drop_u`` says, which the published code counts."""
        labels, null = self.given["y"].astype(np.int64), self.config.num_classes
        dropped = int((self.given["drop_u"] < self.number("args", "class_dropout_prob")).sum())
        return ops.tensor(np.where(np.arange(len(labels)) < dropped, null, labels))

    def z_t(self) -> Tensor:
        """Return the noised latents."""
        return self.process("plain").noised(self.given.tensor("x"), *self._draws())

    def output(self, null: str | None) -> Tensor:
        """Return the average velocity there, with or without labels."""
        labels = self.given.tensor("y") * 0 + self.config.num_classes if null else self.given.tensor("y")
        return answer(self.network, self.z_t(), self._draws()[0], labels)

    def _losses(self, network: DiT, case: str) -> Tensor:
        x, null = self.given.tensor("x"), self.config.num_classes
        return self.process(case).losses(network, null, x, self._labels(), *self._draws())

    def _step_of(self, case: str) -> Step:
        return Step(self.fresh_network, lambda network: self._losses(network, case))

    def guided(self, case: str) -> Tensor:
        """Return the velocity that the target begins with."""
        v = self.given.tensor("e") - self.given.tensor("x")
        with ops.no_grad():
            return self.process(case).guided(
                self.network, self.z_t(), v, self._draws()[0], self._labels(), self.config.num_classes
            )

    def u(self, case: str) -> Tensor:
        """Return the average velocity that is trained."""
        return answer(self.network, self.z_t(), self._draws()[0], self._labels())

    def rate(self, case: str) -> Tensor:
        """Return the derivative of the network along the path."""
        process, labels = self.process(case), self._labels()
        return process.derivative(self.network, self.z_t(), self.guided(case), self._draws()[0], labels)

    def target(self, case: str) -> Tensor:
        """Return what it is to be."""
        v, null = self.given.tensor("e") - self.given.tensor("x"), self.config.num_classes
        return self.process(case).target(self.network, self.z_t(), v, self._draws()[0], self._labels(), null)

    def loss(self, case: str) -> np.ndarray:
        """Return the mean of the weighted losses."""
        with ops.no_grad():
            return np.asarray(ops.numpy(self._losses(self.network, case)).mean())

    def v_loss(self, case: str) -> Tensor:
        """Return the squared distance of the network from the path's own velocity, summed, (B,)."""
        return self.process(case).squared(self.u(case) - (self.given.tensor("e") - self.given.tensor("x")))

    def denominator(self, case: str) -> Tensor:
        """Return what the squared errors are divided by, (B,)."""
        process = self.process(case)
        return process.denominator(process.squared(self.u(case) - self.target(case)))

    def gradient(self, case: str, parameter: str) -> np.ndarray:
        """Return the norm of a parameter's gradient."""
        gradients = self.step_of(case).gradients
        if parameter not in gradients:
            raise NotThere("it is no parameter that is trained")
        return norm(gradients[parameter])

    # --- times and chains --------------------------------------------------------------------------------------------

    def times(self, name: str) -> np.ndarray:
        """Return the later or the earlier times of the file's draws."""
        config = MeanFlowConfig(self.number("args", "P_mean"), self.number("args", "P_std"))
        ends = interval(config, self.given["time/z"].astype(np.float64))
        alike = np.arange(len(ends)) < int(self.number("args", "data_proportion") * len(ends))
        return with_equal(ends, alike).astype(np.float32)[:, "tr".index(name)]

    def chain(self, steps: str) -> Tensor:
        """Return the last state of a chain, over the file's times or even ones."""
        times = self.given.get(f"sample/steps{steps}/t_grid", even_times(int(steps)))
        labels = self.given.tensor("sample/y")
        with ops.no_grad():
            ask = lambda x, ends, noise: self.network(x, ends, labels)  # noqa: E731
            *_, last = walk(ask, self.given.tensor("sample/start"), times)
        return last


MEAN_FLOW = Kind(
    signature=r"r|output_null|time/r|train/.+|sample/steps\d+/.+|grad_norm/h_embedder\..+",
    inputs=r"config|x|e|t|r|y|drop_u|time/z|sample/(start|y)|sample/steps\d+/t_grid",
    program=MeanFlowFile,
    rows=(
        Quantity("z_t", MeanFlowFile.z_t),
        Quantity("output(_null)?", MeanFlowFile.output),
        Quantity("time/(t|r)", MeanFlowFile.times),
        Quantity(f"train/{_CASE}/v_g", MeanFlowFile.guided),
        Quantity(f"train/{_CASE}/u", MeanFlowFile.u),
        Quantity(f"train/{_CASE}/dudt", MeanFlowFile.rate),
        Quantity(f"train/{_CASE}/u_target", MeanFlowFile.target),
        Quantity(f"train/{_CASE}/weight_denominator", MeanFlowFile.denominator),
        Quantity(f"train/{_CASE}/loss", MeanFlowFile.loss),
        Quantity(f"train/{_CASE}/v_loss", MeanFlowFile.v_loss),
        Quantity(f"train/{_CASE}/grad_norm/(.+)", MeanFlowFile.gradient, GRADIENTS),
        Quantity(r"sample/steps([1-9]\d*)/result", MeanFlowFile.chain),
    ),
)
