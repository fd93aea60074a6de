"""The quantities of a file of reference values of text to video, recomputed by the active framework.

Each group of names is one class (:class:`Group`): the networks, the tables of times with the loss, and chains. To add
one: write its class and name it in ``GROUPS``. docs/parity.md has the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import CheckpointError, nearest
from mindspeed_mm_dit.framework import ops, optim
from mindspeed_mm_dit.objectives.flow import ode
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network
from mindspeed_mm_dit.objectives.wan_flow.draws import batch
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow
from mindspeed_mm_dit.objectives.wan_flow.samplers import euler_chain
from mindspeed_mm_dit.objectives.wan_flow.schedule import euler_sigmas, table_sigmas, training_table
from mindspeed_mm_dit.verify.reference.file import Given, unknown_quantity
from mindspeed_mm_dit.verify.reference.video import (
    NUM_TRAIN_TIMESTEPS,
    Group,
    Parts,
    VideoReference,
    check_shape,
    check_whole,
    tutorial_flow,
)
from mindspeed_mm_dit.verify.reference.video_encoders import AutoencoderGroup, FramesGroup, TextGroup
from mindspeed_mm_dit.verify.reference.video_step import StepGroup

Tensor = Any

SAMPLE_SHIFT, SAMPLE_STEPS = 5.0, 10
"""Of the chains, where a file does not say ``sample/shift`` and ``sample/steps``."""


class NetworkGroup(Group):
    """One evaluation of a network, and its gradients."""

    kind: str
    inputs = re.compile("x|t|t_shared|text|text_len|target")

    def __init__(self, reference: VideoReference) -> None:
        super().__init__(reference)
        self._model = reference.network(self.kind)

    def value(self, name: str) -> np.ndarray | None:
        """Return our value of ``name``."""
        if found := re.fullmatch(r"grad_norm/(.+)", name):
            return self._gradient_norm(found[1])
        if found := re.fullmatch(r"after_block(\d+)", name):
            return self._after_block(int(found[1]))
        known: dict[str, Callable[[], np.ndarray]] = {
            "output": lambda: self._output("dit/t"),
            "output_shared_t": lambda: self._output("dit/t_shared"),
            "loss": lambda: self._gradients[0].astype(np.float64).mean(),
            "temb": lambda: ops.numpy(self._condition[0]),
            "timestep_proj": lambda: ops.numpy(self._condition[1]),
            "text_context": lambda: ops.numpy(self._condition[2]),
            "rope_cos": lambda: ops.numpy(self._positions[0]).repeat(2, 1),
            "rope_sin": lambda: ops.numpy(self._positions[1]).repeat(2, 1),
            "after_patch_embedding": self._after_patch_embedding,
        }
        return known[name]() if name in known else None

    @property
    def _grid(self) -> tuple[int, int, int]:
        (_, _, F, H, W), (p, q, r) = self._given["dit/x"].shape, self._model.config.patch_size
        return F // p, H // q, W // r

    def _ask(self, t: str) -> Tensor:
        reference = self._reference
        return self._model(reference.input("dit/x"), reference.input(t), reference.input("dit/text"))

    def _output(self, t: str) -> np.ndarray:
        with ops.no_grad():
            return ops.numpy(self._ask(t))

    @cached_property
    def _gradients(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        target = self._reference.input("dit/target")
        return optim.gradients(self._model, lambda: ops.mean_per_sample(self._ask("dit/t") * target))

    def _gradient_norm(self, parameter: str) -> np.ndarray:
        found = self._gradients[1]
        if parameter not in found:
            raise CheckpointError(
                f"--reference: {self.kind}/grad_norm/{parameter}",
                "is no parameter of this network",
                nearest(parameter, found),
            )
        return np.asarray(np.linalg.norm(found[parameter].astype(np.float64)))

    @cached_property
    def _condition(self) -> tuple[Tensor, Tensor, Tensor]:
        with ops.no_grad():
            return self._model.condition_embedder(self._reference.input("dit/t"), self._reference.input("dit/text"))

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        return self._model.rope(*self._grid)

    def _tokens(self) -> Tensor:
        return self._model.patch_embedding(self._reference.input("dit/x"))

    def _after_patch_embedding(self) -> np.ndarray:
        with ops.no_grad():
            tokens = ops.numpy(self._tokens())  # (B, N, D)
        return tokens.transpose(0, 2, 1).reshape(len(tokens), -1, *self._grid)

    def _after_block(self, number: int) -> np.ndarray | None:
        if number >= len(self._model.blocks):
            return None
        _, modulation, text = self._condition
        modulation = ops.reshape(modulation, (modulation.shape[0], 6, -1))
        with ops.no_grad():
            x = self._tokens()
            for block in list(self._model.blocks)[: number + 1]:
                x = block(x, text, modulation, *self._positions)
            return ops.numpy(x)


class CustomDiTGroup(NetworkGroup):
    """``dit/``: the tutorial's network."""

    kind, part = "dit", "--checkpoint"


class WanGroup(NetworkGroup):
    """``wan/``: Wan's, on the inputs of ``dit/``."""

    kind, part = "wan", "--wan"


class ScheduleGroup(Group):
    """``sched/``: tables of times, noising, loss, and single steps; without weights."""

    part = None
    inputs = re.compile("x0|noise|model_output|index")

    def value(self, name: str) -> np.ndarray | None:
        """Return our value of ``name``."""
        if name == "target":
            self._check()
            return ops.numpy(tutorial_flow(1.0).target(*map(self._reference.input, ("sched/x0", "sched/noise"))))
        if found := re.fullmatch(r"shift(\d+(?:\.\d+)?)/(timesteps|sigmas|weights|x_t|loss)", name):
            return self._training(tutorial_flow(float(found[1]), self._rows(found[1])), found[2])
        if found := re.fullmatch(r"shift(\d+(?:\.\d+)?)/infer([1-9]\d{0,4})/(timesteps|sigmas|euler)", name):
            return self._inference(tutorial_flow(float(found[1]), self._rows(found[1])), int(found[2]), found[3])
        return None

    def _rows(self, shift: str) -> int:
        """T of the file: the length of its training tables."""
        names = (f"sched/shift{shift}/{table}" for table in ("sigmas", "timesteps", "weights"))
        return next((self._given[name].size for name in names if name in self._given), NUM_TRAIN_TIMESTEPS)

    def _training(self, process: WanFlow, name: str) -> np.ndarray:
        table, rows = training_table(process.config), process.config.num_train_timesteps
        tables = {"timesteps": rows * table.sigmas, "sigmas": table.sigmas, "weights": table.weights}
        if name in tables:
            return tables[name]
        self._check()
        check_shape(self._given, "sched/index", (None,))
        check_whole(self._given, "sched/index", rows - 1)
        compute = self._x_t if name == "x_t" else self._loss
        return np.stack([compute(process, index) for index in self._given["sched/index"].tolist()])

    def _check(self) -> None:
        """Raise CheckpointError for latents of different shapes."""
        check_shape(self._given, "sched/x0", (None,) * max(3, self._given["sched/x0"].ndim))
        for name in {"sched/noise", "sched/model_output"} & self._given.keys():
            check_shape(self._given, name, self._given["sched/x0"].shape)

    def _draws(self, process: WanFlow, index: int) -> list[Tensor]:
        noise = self._given["sched/noise"]
        drawn = batch(process.config, np.full(len(noise), index), noise)
        return [ops.tensor(drawn[name]) for name in process.draw_names]

    def _x_t(self, process: WanFlow, index: int) -> np.ndarray:
        return ops.numpy(process.noised(self._reference.input("sched/x0"), *self._draws(process, index)))

    def _loss(self, process: WanFlow, index: int) -> np.ndarray:
        output, x = self._reference.input("sched/model_output"), self._reference.input("sched/x0")
        return ops.numpy(process.loss(output, x, x, *self._draws(process, index))).mean()

    def _inference(self, process: WanFlow, steps: int, name: str) -> np.ndarray:
        sigmas = table_sigmas(process.config, steps)
        if name != "euler":
            return sigmas if name == "sigmas" else process.config.num_train_timesteps * sigmas
        self._check()
        x, velocity = (ops.tensor(self._given[f"sched/{key}"][:1, :, :1]) for key in ("x0", "model_output"))
        grid = euler_sigmas(process.config, steps)
        ends = [next(ode.walk(ode.euler, lambda x, t: velocity, x, grid[i : i + 2])) for i in range(steps)]
        return np.stack([ops.numpy(end) for end in ends])


class SampleGroup(Group):
    """``sample/``: whole chains of the tutorial's network, without and with guidance."""

    part = "--checkpoint"
    inputs = re.compile("start|negative_text|shift|steps")

    def value(self, name: str) -> np.ndarray | None:
        """Return our value of ``name``."""
        found = re.fullmatch(r"result(?:_cfg(\d+(?:\.\d+)?))?", name)
        return self._chain(float(found[1] or 1)) if found else None

    def _chain(self, scale: float) -> np.ndarray:
        shift, steps = (self._number(*given) for given in (("shift", SAMPLE_SHIFT), ("steps", SAMPLE_STEPS)))
        network = self._reference.network("dit")
        start, text, negative = map(self._reference.input, ("sample/start", "dit/text", "sample/negative_text"))
        with ops.no_grad():
            ask = guided_network(network, [text], [negative], Guidance(scale))
            *_, last = euler_chain(tutorial_flow(shift), ask, start, int(steps))
            return ops.numpy(last)

    def _number(self, name: str, default: float) -> float:
        if f"sample/{name}" not in self._given:
            return default
        check_shape(self._given, f"sample/{name}", ())
        check_between(f"--reference: sample/{name}", float(self._given[f"sample/{name}"]), 1, 1000)
        return float(self._given[f"sample/{name}"])


GROUPS: dict[str, type[Group]] = {
    "dit": CustomDiTGroup, "wan": WanGroup, "sched": ScheduleGroup, "sample": SampleGroup, "step": StepGroup,
    "vae": AutoencoderGroup, "umt5": TextGroup, "prep": FramesGroup,
}  # fmt: skip
"""By the beginning of their names."""
NOT_CHECKED = {"diffusers_euler": "another table than MindSpeed-MM's, kept for information"}
"""Groups of the format that nothing here recomputes, and why."""


def is_video(names: Iterable[str]) -> bool:
    """Return whether a reference file with the keys ``names`` is one of text to video."""
    return any(_group(name) in (GROUPS.keys() | NOT_CHECKED) - {"sample"} for name in names)


class VideoParity:
    """The quantities of a reference file as this implementation computes them, each when it is asked for."""

    def __init__(self, given: Given, parts: Parts) -> None:
        self._reference = VideoReference(given, parts)
        self._groups: dict[str, Group] = {}

    def left_out(self, names: Iterable[str]) -> dict[str, str]:
        """Return the groups among ``names`` that are not checked, or single results of one, and why."""
        found = {}
        for name in names:
            group, _, rest = name.partition("/")
            if group in NOT_CHECKED:
                found[group] = NOT_CHECKED[group]
            elif (flag := self._lacks(name)) and not _is_given(name):
                found[group if flag == GROUPS[group].part else f"{group}/{rest}"] = f"needs {flag}"
        return found

    def _lacks(self, name: str) -> str | None:
        """Return the flag of weights that are not given, and that ``name`` needs."""
        group, _, rest = name.partition("/")
        flag = GROUPS[group].needs(rest) if group in GROUPS else None
        return flag if flag not in self._reference.parts else None

    def results(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are to be recomputed."""
        return [
            name for name in names if _group(name) not in NOT_CHECKED and not self._lacks(name) and not _is_given(name)
        ]

    def tolerance(self, name: str, tolerance: float, table_tolerance: float) -> float:
        """Return the largest relative error of ``name``; the tables of a file are in float32 too."""
        return self._known(name).tolerance(name.partition("/")[2], tolerance)

    def value(self, name: str) -> np.ndarray:
        """Return our value of the result ``name``."""
        found = self._known(name).value(name.partition("/")[2])
        if found is None:
            raise unknown_quantity(name)
        return np.asarray(found)

    def _known(self, name: str) -> Group:
        group = _group(name)
        if group not in GROUPS:
            raise unknown_quantity(name)
        if group not in self._groups:
            self._groups[group] = GROUPS[group](self._reference)
        return self._groups[group]


def _group(name: str) -> str:
    return name.partition("/")[0]


def _is_given(name: str) -> bool:
    group, _, rest = name.partition("/")
    return name == "config" or (group in GROUPS and GROUPS[group].inputs.fullmatch(rest) is not None)
