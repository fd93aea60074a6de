"""Files of reference values of MindSpeed-MM's text-to-video tutorial and of Wan 2.1, group by group.

Here are the networks' groups ``dit/`` and ``wan/``, with one evaluation, its parts and gradients; and the groups
``sched/`` and ``sample/``, with tables of times, noising, loss, steps and sampling.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.diffusion import table_sigmas
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.objectives.flow.solvers import euler, integrate
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network
from mindspeed_mm_dit.objectives.wan_flow.objective import euler_sigmas, training_table
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow, euler_trajectory
from mindspeed_mm_dit.tools.verify.reference import video
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    evaluate,
    rows_of_step,
    watched,
)
from mindspeed_mm_dit.tools.verify.reference.video import (
    NETWORKS,
    NUM_TRAIN_TIMESTEPS,
    TextToVideo,
    draws_at,
    rows_of_group,
    tutorial_flow,
)
from mindspeed_mm_dit.tools.verify.table import Quantity, Rows, UnknownQuantity

SAMPLE_SHIFT, SAMPLE_STEPS = 5.0, 10
"""Defaults of sampling, if a file has no ``sample/shift`` and ``sample/steps``."""
_N = r"\d+(?:\.\d+)?"


class Times:
    """Quantities of the tutorial's objective, which need no weights."""

    def __init__(self, file: TextToVideo) -> None:
        self.arrays = file.arrays

    def target(self) -> Tensor:
        """Return the network's target."""
        self._check()
        return tutorial_flow(1.0).target(*map(self.arrays.tensor, ("sched/x0", "sched/noise")))

    def table(self, shift: str, name: str) -> np.ndarray:
        """Return a table of the training times."""
        config = self._process(shift).config
        table = training_table(config)
        return config.num_train_timesteps * table.sigmas if name == "timesteps" else getattr(table, name)

    def at_rows(self, shift: str, name: str) -> np.ndarray:
        """Return noised latents, or the weighted loss, at the rows ``index`` of the table."""
        process = self._process(shift)
        self._check()
        self.arrays.check_shape("sched/index", (None,))
        self.arrays.check_range("sched/index", process.config.num_train_timesteps - 1)
        compute = self._x_t if name == "x_t" else self._loss
        return np.stack([compute(process, index) for index in self.arrays["sched/index"].tolist()])

    def steps(self, shift: str, count: str, name: str) -> np.ndarray:
        """Return a table of ``count`` steps, or the Euler step from each of its rows."""
        process = self._process(shift)
        sigmas = table_sigmas(process.config, int(count))
        if name != "euler":
            return sigmas if name == "sigmas" else process.config.num_train_timesteps * sigmas
        self._check()
        x, velocity = (ops.tensor(self.arrays[f"sched/{key}"][:1, :, :1]) for key in ("x0", "model_output"))
        grid = euler_sigmas(process.config, int(count))
        ends = [next(integrate(euler, lambda x, t: velocity, x, grid[i : i + 2])) for i in range(int(count))]
        return np.stack([ops.numpy(end) for end in ends])

    def _process(self, shift: str) -> WanFlow:
        """Return the objective with the number of times in the file's training tables."""
        names = (f"sched/shift{shift}/{table}" for table in ("sigmas", "timesteps", "weights"))
        rows = next((self.arrays[name].size for name in names if name in self.arrays), NUM_TRAIN_TIMESTEPS)
        return tutorial_flow(float(shift), rows)

    def _check(self) -> None:
        """Raise CheckpointError for latents of different shapes."""
        self.arrays.check_shape("sched/x0", (None,) * max(3, self.arrays["sched/x0"].ndim))
        for name in {"sched/noise", "sched/model_output"} & self.arrays.keys():
            self.arrays.check_shape(name, self.arrays["sched/x0"].shape)

    def _x_t(self, process: WanFlow, row: int) -> np.ndarray:
        draws = draws_at(process, row, self.arrays["sched/noise"])
        return ops.numpy(process.add_noise(self.arrays.tensor("sched/x0"), *draws))

    def _loss(self, process: WanFlow, row: int) -> np.ndarray:
        output, x = self.arrays.tensor("sched/model_output"), self.arrays.tensor("sched/x0")
        return ops.numpy(process.loss(output, x, x, *draws_at(process, row, self.arrays["sched/noise"]))).mean()


class Sampling:
    """Sampling with the tutorial's network, without and with guidance."""

    def __init__(self, file: TextToVideo) -> None:
        self.arrays, self.network = file.arrays, file.checked_network("dit")

    def end(self, scale: str | None) -> Tensor:
        """Return the last state."""
        shift, steps = self._number("shift", SAMPLE_SHIFT), int(self._number("steps", SAMPLE_STEPS))
        start, text, negative = map(self.arrays.tensor, ("sample/start", "dit/text", "sample/negative_text"))
        with ops.no_grad():
            model_fn = guided_network(self.network, [text], [negative], Guidance(float(scale or 1)))
            *_, last = euler_trajectory(tutorial_flow(shift), model_fn, start, steps)
            return last

    def _number(self, name: str, default: float) -> float:
        if f"sample/{name}" not in self.arrays:
            return default
        self.arrays.check_shape(f"sample/{name}", ())
        check_between(f"--reference: sample/{name}", float(self.arrays[f"sample/{name}"]), 1, 1000)
        return float(self.arrays[f"sample/{name}"])


TIMES = (
    *rows_of_group(
        "sched",
        Times,
        None,
        Quantity("target", Times.target),
        Quantity(rf"shift({_N})/(timesteps|sigmas|weights)", Times.table),
        Quantity(rf"shift({_N})/(x_t|loss)", Times.at_rows),
        Quantity(rf"shift({_N})/infer([1-9]\d{{0,4}})/(timesteps|sigmas|euler)", Times.steps),
    ),
    *rows_of_group("sample", Sampling, "--checkpoint", Quantity(rf"result(?:_cfg({_N}))?", Sampling.end)),
)


class Network:
    """Quantities of one of NETWORKS on the inputs of ``dit/``."""

    def __init__(self, file: TextToVideo, kind: str) -> None:
        self.arrays, self.network = file.arrays, file.checked_network(kind)
        self.step = OptimizerStep(lambda: file.fresh_network(kind), self._losses)

    def _losses(self, network: object) -> Tensor:
        return ops.mean_per_sample(self._call(network, "dit/t") * self.arrays.tensor("dit/target"))

    def _call(self, network: object, t: str) -> Tensor:
        return network(*map(self.arrays.tensor, ("dit/x", t, "dit/text")))  # type: ignore[operator]

    def output(self, t: str) -> Tensor:
        """Return the network at the times ``t``, or at ``t_shared`` for all."""
        with ops.no_grad():
            return self._call(self.network, f"dit/{t}")

    @cached_property
    def condition(self) -> tuple[Tensor, Tensor, Tensor]:
        """Embedding of the time (B, D), its projection (B, 1, 6 D), and the text as the blocks take it."""
        t, text = map(self.arrays.tensor, ("dit/t", "dit/text"))
        time, modulation, text = evaluate(self.network.condition_embedder, t[:, None], text)
        return time[:, 0], modulation, text

    @property
    def _grid(self) -> tuple[int, int, int]:
        (_, _, F, H, W), (p, q, r) = self.arrays["dit/x"].shape, self.network.config.patch_size
        return F // p, H // q, W // r

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.network.rope(*self._grid)

    def rope(self, number: int) -> np.ndarray:
        """Return the cosines (0) or sines (1) of the positions, each twice."""
        return ops.numpy(self._positions[number]).repeat(2, 1)

    def _tokens(self) -> Tensor:
        return evaluate(self.network.patch_embedding, self.arrays.tensor("dit/x"))

    def after_patch_embedding(self) -> np.ndarray:
        """Return the tokens as an image, (B, D, F, H, W)."""
        F, H, W = self._grid
        return rearrange(ops.numpy(self._tokens()), "b (f h w) d -> b d f h w", f=F, h=H, w=W)

    def after_block(self, number: str) -> Tensor:
        """Return the tokens (B, N, D) after a block."""
        if int(number) >= len(self.network.blocks):
            raise UnknownQuantity("")
        (_, modulation, text), x = self.condition, self._tokens()
        for block in list(self.network.blocks)[: int(number) + 1]:
            x = evaluate(block, x, text, modulation, *self._positions)
        return x


def network_rows(kind: str) -> Rows:
    """Return the rows of one of NETWORKS."""
    return rows_of_group(
        kind,
        partial(Network, kind=kind),
        NETWORKS[kind][0],
        Quantity("output", lambda group: group.output("t")),
        Quantity("output_shared_t", lambda group: group.output("t_shared")),
        Quantity("loss", lambda group: group.step.losses.astype(np.float64).mean()),
        Quantity("temb", lambda group: group.condition[0]),
        Quantity("timestep_proj", lambda group: group.condition[1][:, 0]),
        Quantity("text_context", lambda group: group.condition[2]),
        Quantity("rope_cos", lambda group: group.rope(0)),
        Quantity("rope_sin", lambda group: group.rope(1)),
        Quantity("after_patch_embedding", Network.after_patch_embedding),
        Quantity(r"after_block(\d+)", Network.after_block),
        *rows_of_step(lambda group: group.step),
    )


_INPUTS = {
    "(dit|wan)": "x|t|t_shared|text|text_len|target",
    "sched": "x0|noise|model_output|index",
    "sample": "start|negative_text|shift|steps",
    "step": "video|prompt_ids|prompt_mask|noise|t|t_index|shift",
    "vae": "video|latents_mean|latents_std",
    "umt5": "ids|mask|mm_mask",
    "prep": "[^/]+/(frames|size)",
}

TEXT_TO_VIDEO = FileKind(
    signature="(dit|wan|sched|step|vae|umt5|prep|diffusers_euler)/.+",
    inputs="|".join(["config", *(f"{group}/({names})" for group, names in _INPUTS.items())]),
    program=TextToVideo,
    rows=(*network_rows("dit"), *network_rows("wan"), *TIMES, *video.ROWS),
    not_checked={"diffusers_euler/.+": "another table than MindSpeed-MM's, in the file for information"},
)


class WanVAE:
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        self.arrays = arrays
        folder = weights.get("--vae", weights.get("--checkpoint"))
        if folder is None:
            raise CheckpointError(
                f"--vae is required, because the values of the file are those of an autoencoder. {FORMAT}"
            )
        if "torch" not in runtime.versions():
            raise PlatformError(
                "--vae runs on PyTorch alone, because mint.nn.functional.conv3d of MindSpore is for Ascend. Add "
                "--ai-framework pytorch."
            )
        self.autoencoder: Any = TextToVideo(arrays, {"--vae": folder}).autoencoder

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the posterior."""
        return evaluate(self.autoencoder.moments, self.arrays.tensor("video"))

    def normalised(self) -> Tensor:
        """Return the normalised mean."""
        return evaluate(self.autoencoder.scaled, self.moments[0])

    def decoded(self, source: str) -> Tensor:
        """Return what the mean, or the file's normalised latents, decode to."""
        scaled = self.normalised() if source == "mean" else self.arrays.tensor(source)
        return evaluate(self.autoencoder.decode, scaled)

    def mean_of_first_frame(self) -> Tensor:
        """Return the mean of the first frame alone."""
        return evaluate(self.autoencoder.moments, self.arrays.tensor("video")[:, :, :1])[0]

    def statistic(self, name: str) -> np.ndarray:
        """Return the mean or the standard deviation of each channel, from config.json."""
        scale = self.autoencoder.config.scale()
        return np.array(scale.shift if name == "mean" else scale.std)

    def patchified(self) -> np.ndarray:
        """Return the first frame with the pixels of each patch as channels: colour, then column, then row."""
        p, first = self.autoencoder.module.config.patch_size, self.arrays["video"][:, :, :1]
        B, C, _, H, W = first.shape
        cut = first.reshape(B, C, 1, H // p, p, W // p, p)  # (B, C, 1, h, row, w, column)
        return cut.transpose(0, 1, 6, 4, 2, 3, 5).reshape(B, -1, 1, H // p, W // p)

    @cached_property
    def first_chunk(self) -> dict[str, Tensor]:
        """Output of each module when it first ran, while the video was encoded and its mean decoded."""

        def run() -> None:
            mean = evaluate(self.autoencoder.moments, self.arrays.tensor("video"))[0]
            evaluate(self.autoencoder.decode, self.autoencoder.scaled(mean))

        return watched(self.autoencoder.module, run)

    def tap(self, module: str) -> Tensor:
        """Return the output of a module for the first frame."""
        if module not in self.first_chunk:
            raise UnknownQuantity("")
        return self.first_chunk[module]


WAN_VAE = FileKind(
    signature="latents_normalised|mean_normalised|decoded_from_.+",
    inputs="video|latents_normalised",
    program=WanVAE,
    has_network=False,
    rows=(
        Quantity("mean|mode", lambda file: file.moments[0]),
        Quantity("logvar", lambda file: 2 * ops.log(file.moments[1])),
        Quantity("mean_normalised", WanVAE.normalised),
        Quantity("decoded_from_(mean|latents_normalised)", WanVAE.decoded),
        Quantity("mean_of_first_frame_alone", WanVAE.mean_of_first_frame),
        Quantity("latents_(mean|std)", WanVAE.statistic),
        Quantity("patchified", WanVAE.patchified),
        Quantity("tap_first_chunk/(.+)", WanVAE.tap),
    ),
)
