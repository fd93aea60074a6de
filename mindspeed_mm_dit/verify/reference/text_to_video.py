"""Files of reference values of MindSpeed-MM's text-to-video tutorial and of Wan 2.1, group by group.

The networks' groups ``dit/`` and ``wan/`` stand here: one evaluation, its parts and gradients.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.verify.reference import video_step, video_times
from mindspeed_mm_dit.verify.reference.contract import Kind
from mindspeed_mm_dit.verify.reference.file import Tensor, answer
from mindspeed_mm_dit.verify.reference.video import NETWORKS, TextToVideo, rows_of_group
from mindspeed_mm_dit.verify.step import Step, rows_of_step
from mindspeed_mm_dit.verify.table import NotThere, Quantity, Rows


class Network:
    """One of NETWORKS on the inputs of ``dit/``."""

    def __init__(self, file: TextToVideo, kind: str) -> None:
        self.given, self.network = file.given, file.asked_network(kind)
        self.step = Step(lambda: file.fresh_network(kind), self._losses)

    def _losses(self, network: object) -> Tensor:
        return ops.mean_per_sample(self._ask(network, "dit/t") * self.given.tensor("dit/target"))

    def _ask(self, network: object, t: str) -> Tensor:
        return network(*map(self.given.tensor, ("dit/x", t, "dit/text")))  # type: ignore[operator]

    def output(self, t: str) -> Tensor:
        """Return the network at the times ``t``, or at ``t_shared`` for all."""
        with ops.no_grad():
            return self._ask(self.network, f"dit/{t}")

    @cached_property
    def condition(self) -> tuple[Tensor, Tensor, Tensor]:
        """Code of the time, its projection, and the text as the blocks take it."""
        return answer(self.network.condition_embedder, *map(self.given.tensor, ("dit/t", "dit/text")))

    @property
    def _grid(self) -> tuple[int, int, int]:
        (_, _, F, H, W), (p, q, r) = self.given["dit/x"].shape, self.network.config.patch_size
        return F // p, H // q, W // r

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor]:
        return self.network.rope(*self._grid)

    def rope(self, number: int) -> np.ndarray:
        """Return the cosines (0) or sines (1) of the positions, each twice."""
        return ops.numpy(self._positions[number]).repeat(2, 1)

    def _tokens(self) -> Tensor:
        return answer(self.network.patch_embedding, self.given.tensor("dit/x"))

    def after_patch_embedding(self) -> np.ndarray:
        """Return the tokens as an image, (B, D, F, H, W)."""
        F, H, W = self._grid
        return rearrange(ops.numpy(self._tokens()), "b (f h w) d -> b d f h w", f=F, h=H, w=W)

    def after_block(self, number: str) -> Tensor:
        """Return the tokens (B, N, D) behind a block."""
        if int(number) >= len(self.network.blocks):
            raise NotThere("")
        _, modulation, text = self.condition
        modulation, x = ops.reshape(modulation, (modulation.shape[0], 6, -1)), self._tokens()
        for block in list(self.network.blocks)[: int(number) + 1]:
            x = answer(block, x, text, modulation, *self._positions)
        return x


def network_rows(kind: str) -> Rows:
    """Return the rows of one of NETWORKS."""
    return rows_of_group(
        kind, partial(Network, kind=kind), NETWORKS[kind][0],
        Quantity("output", lambda group: group.output("t")),
        Quantity("output_shared_t", lambda group: group.output("t_shared")),
        Quantity("loss", lambda group: group.step.losses.astype(np.float64).mean()),
        Quantity("temb", lambda group: group.condition[0]),
        Quantity("timestep_proj", lambda group: group.condition[1]),
        Quantity("text_context", lambda group: group.condition[2]),
        Quantity("rope_cos", lambda group: group.rope(0)),
        Quantity("rope_sin", lambda group: group.rope(1)),
        Quantity("after_patch_embedding", Network.after_patch_embedding),
        Quantity(r"after_block(\d+)", Network.after_block),
        *rows_of_step(lambda group: group.step),
    )  # fmt: skip


_GIVEN = {
    "(dit|wan)": "x|t|t_shared|text|text_len|target", "sched": "x0|noise|model_output|index",
    "sample": "start|negative_text|shift|steps", "step": "video|prompt_ids|prompt_mask|noise|t|t_index|shift",
    "vae": "video|latents_mean|latents_std", "umt5": "ids|mask|mm_mask", "prep": "[^/]+/(frames|size)",
}  # fmt: skip

TEXT_TO_VIDEO = Kind(
    signature="(dit|wan|sched|step|vae|umt5|prep|diffusers_euler)/.+",
    inputs="|".join(["config", *(f"{group}/({names})" for group, names in _GIVEN.items())]),
    program=TextToVideo,
    rows=(*network_rows("dit"), *network_rows("wan"), *video_times.ROWS, *video_step.ROWS),
    not_checked={"diffusers_euler/.+": "another table than MindSpeed-MM's, kept for information"},
)
