"""Files of reference values of three recipes of training.

These are LightningDiT (Yao & Wang 2025), JiT (Li & He 2025) and MeanFlow (Geng et al. 2025). For MeanFlow, t = 0 is
data, t = 1 noise, and r <= t.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig, MeanFlowConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import ode_trajectory
from mindspeed_mm_dit.objectives.flow.timesteps import logit_normal, sampling_times
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.objectives.mean_flow.objective import even_times, integrate, interval, set_equal_times
from mindspeed_mm_dit.objectives.mean_flow.process import MeanFlow
from mindspeed_mm_dit.tools.verify.reference.file import (
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    evaluate,
    rows_of_step,
)
from mindspeed_mm_dit.tools.verify.reference.images import Point, RecipeFile, rows_of_chain
from mindspeed_mm_dit.tools.verify.table import GRADIENTS, Quantity, UnknownQuantity

_FLAGS = {
    **{"use_qknorm": "qk_norm", "use_swiglu": "swiglu", "use_rope": "rope", "use_rmsnorm": "rms_norm"},
    **{"wo_shift": "wo_shift", "learn_sigma": "learn_sigma"},
}
"""Option of the network in LightningDiT -> its name here."""
STEPS = 7
"""Sampling steps, if the file does not give them."""


class LightningDiT(RecipeFile):
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.states = cache(self._states)
        betas = (0.9, self.number("config", "optimizer", "beta2"))
        self.step = OptimizerStep(self.fresh_network, self.losses, self.number("config", "optimizer", "lr"), betas)

    @property
    def flags(self) -> Mapping[str, Any]:
        return _options(self.setting("config", "model"))

    @cached_property
    def at(self) -> dict[str, Point]:
        """The samples, with the squared error alone (``loss``), and with the cosine loss (``both``)."""
        x, noise, y = map(self.arrays.tensor, ("x1", "x0", "y"))
        processes = {name: FlowMatching(FlowMatchingConfig(cosine_loss=name == "both")) for name in ("loss", "both")}
        return {name: Point.of_flow(each, x, noise, self.arrays["t"], y) for name, each in processes.items()}

    def losses(self, network: DiT) -> Tensor:
        """Return the loss of each sample, with the cosine loss if the run had it."""
        with_angle = self.setting("config", "transport", "use_cosine_loss")
        return self.at["both" if with_angle else "loss"].losses(network)

    def option(self, name: str) -> Tensor:
        """Return the first C channels of the output at x_t, from the network with the options ``name``."""
        options = self.setting("options")
        if name not in options:
            raise UnknownQuantity(f"--checkpoint has the options {', '.join(options)}.")
        network = self.fresh_network(self.network_of(_options(options[name]["flags"])), options[name]["model"])
        return self.at["loss"].output(network)[:, : self.config.in_channels]

    def loss(self, name: str, after: str | None) -> np.ndarray:
        """Return a loss of each sample, or the mean of both together, before or after the optimizer step."""
        network = self.step.network_after if after else self.network
        with ops.no_grad():
            if name == "loss_total":
                return np.asarray(ops.numpy(self.losses(network)).mean())
            squared = ops.numpy(self.at["loss"].losses(network))
            return squared if name == "loss" else ops.numpy(self.at["both"].losses(network)) - squared

    def _states(self, method: str, shift: str, guidance: str) -> list[np.ndarray]:
        """Return the states of a sampling loop; cached by ``states``."""
        run = f"sample/{method}_shift{shift}/{guidance}/norms"
        steps = len(self.arrays[run]) - 1 if run in self.arrays else STEPS
        model_fn, start = self.guided_model(self._guidance(guidance)), self.arrays.tensor("sample/start")
        with ops.no_grad():
            states = ode_trajectory(method.removesuffix("2"), FlowMatching(_shifted(shift)), model_fn, start, steps)
            return [self.arrays["sample/start"], *map(ops.numpy, states)]

    def _guidance(self, name: str) -> Guidance:
        if name == "cfg1":
            return Guidance()
        cfg_start = float(self.arrays["sample/cfg_interval_start"]) if name == "cfg_interval" else 0.0
        return Guidance(float(self.arrays["sample/cfg_scale"]), "3", (0.0, 1.0 - cfg_start))


def _options(flags: Mapping[str, Any]) -> dict[str, bool]:
    """Return our network's options for the flags in a file."""
    return {"learn_sigma": False, **{ours: bool(flags[theirs]) for theirs, ours in _FLAGS.items() if theirs in flags}}


def _shifted(shift: str) -> FlowMatchingConfig:
    """Return the objective with LightningDiT's time shift: below 1 towards noise, and 0 for none."""
    return FlowMatchingConfig(sample_shift=1 / float(shift) if float(shift) else 1.0)


_N = r"\d+(?:\.\d*)?"
_LIGHTNING_CHAIN = rf"sample/(euler|heun2)_shift({_N})/(cfg1|cfg_interval|cfg_no_interval)"

LIGHTNING_DIT = FileKind(
    signature=rf"option/.+|u_t|cos_loss(_.+)?|time/t_lognorm.*|sample/t_grid_.+|{_LIGHTNING_CHAIN}/.+",
    inputs=r"config|x0|x1|t|y|time/z|sample/(start|y|cfg_scale|cfg_interval_start)",
    program=LightningDiT,
    rows=(
        Quantity("x_t", lambda file: file.at["loss"].x_t),
        Quantity("u_t", lambda file: file.at["loss"].target()),
        Quantity("option/([^/]+)/output", LightningDiT.option),
        Quantity("(loss|cos_loss|loss_total)(_after_one_adamw_step)?", LightningDiT.loss),
        Quantity(
            rf"time/t_lognorm(?:_mu(-?{_N}))?(?:_sigma({_N}))?",
            lambda file, mean, std: logit_normal(file.arrays["time/z"], float(mean or 0), float(std or 1)),
        ),
        Quantity(
            rf"sample/t_grid_shift({_N})",
            lambda file, shift: sampling_times(_shifted(shift), len(file.arrays[f"sample/t_grid_shift{shift}"]) - 1),
        ),
        *rows_of_chain(_LIGHTNING_CHAIN),
        *rows_of_step(lambda file: file.step),
    ),
)


_ALWAYS = ("qk_norm", "rms_norm", "swiglu", "rope")
FIRST_TIME = 0.25
"""Time of ``first_velocity``, at the initial noise of sampling."""


class JiT(RecipeFile):
    """The quantities of a file."""

    sizes = (
        *("hidden_size", "num_layers", "num_heads", "patch_size", "input_size", "num_classes"),
        *("bottleneck_dim", "in_context_len", "in_context_start"),
    )

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        super().__init__(arrays, weights)
        self.step = OptimizerStep(
            self.fresh_network, lambda net: self.at.losses(net), self.number("args", "lr"), (0.9, 0.95)
        )

    @property
    def flags(self) -> Mapping[str, Any]:
        channels = self.arrays["x" if "x" in self.arrays else "sample/start"].shape[1:2]
        return {**dict.fromkeys(_ALWAYS, True), "learn_sigma": False, "in_channels": channels[0] if channels else 0}

    def process(self, other_noise: bool = False) -> FlowMatching:
        """Return the objective, with the noise scale of the file or with the other one that it has values of."""
        noise_scale = float(self.arrays["noise_scale"])
        noise_scale = 3.0 - noise_scale if other_noise else noise_scale
        t_eps = self.number("args", "t_eps")
        return FlowMatching(FlowMatchingConfig(prediction_type="data", noise_scale=noise_scale, t_eps=t_eps))

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


_JIT_CHAIN = rf"sample/(euler|heun)([1-9]\d*)/(cfg|cfg1|cfg_other_noise_scale|cfg_interval_{_N}_{_N})/result"
_FIRST = r"sample/(?:euler|heun)\d+/first_velocity"

JIT = FileKind(
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
        self.z_t, self.v = self.process.add_noise(x, *self.draws), e - x
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
