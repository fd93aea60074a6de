"""Groups ``sched/`` and ``sample/`` of a file of text to video: tables of times, noising, loss, steps, chains."""

from __future__ import annotations

import numpy as np

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.objectives.flow import ode
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow
from mindspeed_mm_dit.objectives.wan_flow.samplers import euler_chain
from mindspeed_mm_dit.objectives.wan_flow.schedule import euler_sigmas, table_sigmas, training_table
from mindspeed_mm_dit.verify.reference.file import Tensor
from mindspeed_mm_dit.verify.reference.video import (
    NUM_TRAIN_TIMESTEPS,
    TextToVideo,
    draws_at,
    rows_of_group,
    tutorial_flow,
)
from mindspeed_mm_dit.verify.table import Quantity

SAMPLE_SHIFT, SAMPLE_STEPS = 5.0, 10
"""Of the chains, where a file does not say ``sample/shift`` and ``sample/steps``."""
_N = r"\d+(?:\.\d+)?"


class Times:
    """What the objective of the tutorial computes; without weights."""

    def __init__(self, file: TextToVideo) -> None:
        self.given = file.given

    def target(self) -> Tensor:
        """Return what the network is to say."""
        self._check()
        return tutorial_flow(1.0).target(*map(self.given.tensor, ("sched/x0", "sched/noise")))

    def table(self, shift: str, name: str) -> np.ndarray:
        """Return a table of the training times."""
        config = self._process(shift).config
        table = training_table(config)
        return config.num_train_timesteps * table.sigmas if name == "timesteps" else getattr(table, name)

    def at_rows(self, shift: str, name: str) -> np.ndarray:
        """Return noised latents, or the weighted loss, at the rows ``index`` of the table."""
        process = self._process(shift)
        self._check()
        self.given.check_shape("sched/index", (None,))
        self.given.check_range("sched/index", process.config.num_train_timesteps - 1)
        compute = self._x_t if name == "x_t" else self._loss
        return np.stack([compute(process, index) for index in self.given["sched/index"].tolist()])

    def steps(self, shift: str, count: str, name: str) -> np.ndarray:
        """Return a table of ``count`` steps, or the Euler step from each of its rows."""
        process = self._process(shift)
        sigmas = table_sigmas(process.config, int(count))
        if name != "euler":
            return sigmas if name == "sigmas" else process.config.num_train_timesteps * sigmas
        self._check()
        x, velocity = (ops.tensor(self.given[f"sched/{key}"][:1, :, :1]) for key in ("x0", "model_output"))
        grid = euler_sigmas(process.config, int(count))
        ends = [next(ode.walk(ode.euler, lambda x, t: velocity, x, grid[i : i + 2])) for i in range(int(count))]
        return np.stack([ops.numpy(end) for end in ends])

    def _process(self, shift: str) -> WanFlow:
        """The objective with as many times as the training tables of the file have rows."""
        names = (f"sched/shift{shift}/{table}" for table in ("sigmas", "timesteps", "weights"))
        rows = next((self.given[name].size for name in names if name in self.given), NUM_TRAIN_TIMESTEPS)
        return tutorial_flow(float(shift), rows)

    def _check(self) -> None:
        """Raise CheckpointError for latents of different shapes."""
        self.given.check_shape("sched/x0", (None,) * max(3, self.given["sched/x0"].ndim))
        for name in {"sched/noise", "sched/model_output"} & self.given.keys():
            self.given.check_shape(name, self.given["sched/x0"].shape)

    def _x_t(self, process: WanFlow, row: int) -> np.ndarray:
        draws = draws_at(process, row, self.given["sched/noise"])
        return ops.numpy(process.noised(self.given.tensor("sched/x0"), *draws))

    def _loss(self, process: WanFlow, row: int) -> np.ndarray:
        output, x = self.given.tensor("sched/model_output"), self.given.tensor("sched/x0")
        return ops.numpy(process.loss(output, x, x, *draws_at(process, row, self.given["sched/noise"]))).mean()


class Chains:
    """Whole chains of the tutorial's network, without and with guidance."""

    def __init__(self, file: TextToVideo) -> None:
        self.given, self.network = file.given, file.asked_network("dit")

    def end(self, scale: str | None) -> Tensor:
        """Return the last state."""
        shift, steps = self._number("shift", SAMPLE_SHIFT), int(self._number("steps", SAMPLE_STEPS))
        start, text, negative = map(self.given.tensor, ("sample/start", "dit/text", "sample/negative_text"))
        with ops.no_grad():
            ask = guided_network(self.network, [text], [negative], Guidance(float(scale or 1)))
            *_, last = euler_chain(tutorial_flow(shift), ask, start, steps)
            return last

    def _number(self, name: str, default: float) -> float:
        if f"sample/{name}" not in self.given:
            return default
        self.given.check_shape(f"sample/{name}", ())
        check_between(f"--reference: sample/{name}", float(self.given[f"sample/{name}"]), 1, 1000)
        return float(self.given[f"sample/{name}"])


ROWS = (
    *rows_of_group(
        "sched", Times, None,
        Quantity("target", Times.target),
        Quantity(rf"shift({_N})/(timesteps|sigmas|weights)", Times.table),
        Quantity(rf"shift({_N})/(x_t|loss)", Times.at_rows),
        Quantity(rf"shift({_N})/infer([1-9]\d{{0,4}})/(timesteps|sigmas|euler)", Times.steps),
    ),
    *rows_of_group("sample", Chains, "--checkpoint", Quantity(rf"result(?:_cfg({_N}))?", Chains.end)),
)  # fmt: skip
