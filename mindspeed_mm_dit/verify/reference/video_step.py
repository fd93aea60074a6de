"""Group ``step/`` of a file of text to video: one step of training, from video and tokens; all samples share one time.

Latents and states of the text are the file's where the parts that make them are not given.
"""

from __future__ import annotations

from functools import cached_property

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.custom_dit import CustomDiT
from mindspeed_mm_dit.verify.reference.file import Tensor, answer, check_range, check_shape
from mindspeed_mm_dit.verify.reference.video_encoders import VIDEO, states_of
from mindspeed_mm_dit.verify.reference.video_program import (
    NUM_TRAIN_TIMESTEPS,
    TextToVideo,
    check_latents,
    draws_at,
    rows_of_group,
    tutorial_flow,
)
from mindspeed_mm_dit.verify.step import Step, rows_of_step
from mindspeed_mm_dit.verify.table import Quantity

STEP_LR = 1e-3


class VideoStep:
    """One step of training of the tutorial's network."""

    def __init__(self, file: TextToVideo) -> None:
        self.file, self.given = file, file.given
        check_shape(self.given, "step/shift", ())
        check_between("--reference: step/shift", float(self.given["step/shift"]), 1e-3, 1e3)
        self._process = tutorial_flow(float(self.given["step/shift"]))
        self._config = file.network("dit").config
        self.step = Step(lambda: file.fresh_network("dit"), self._losses, STEP_LR)

    @cached_property
    def latents(self) -> Tensor:
        """(B, C, f, h, w), of the autoencoder or the file's."""
        if "--vae" not in self.file.weights:
            latents = self.given.tensor("step/latents")
        else:
            check_shape(self.given, "step/video", VIDEO)
            latents = answer(self.file.autoencoder.encode, self.given.tensor("step/video"))
        check_latents(self._config, "step/latents", tuple(latents.shape))
        check_shape(self.given, "step/noise", tuple(latents.shape))
        return latents

    @cached_property
    def text(self) -> Tensor:
        """States (B, L, D), of the text encoder or the file's."""
        B, width = int(self.latents.shape[0]), self._config.text_dim
        if "--text-encoder" not in self.file.weights:
            check_shape(self.given, "step/prompt_embeds", (B, 1, None, width))
            return self.given.tensor("step/prompt_embeds")[:, 0]
        check_shape(self.given, "step/prompt_ids", (B, 1, None))
        states = states_of(self.file, "step/prompt_ids", "step/prompt_mask")
        if states.shape[-1] != width:
            reason = f"its states have width {states.shape[-1]}, and --checkpoint takes {width}"
            raise CheckpointError("--text-encoder", reason, "name the text encoder of this network")
        return states

    @cached_property
    def _draws(self) -> list[Tensor]:
        check_shape(self.given, "step/t_index", ())
        check_range(self.given, "step/t_index", NUM_TRAIN_TIMESTEPS - 1)
        return draws_at(self._process, int(self.given["step/t_index"]), self.given["step/noise"])

    @cached_property
    def x_t(self) -> Tensor:
        """Noised latents."""
        return self._process.noised(self.latents, *self._draws)

    def output(self) -> Tensor:
        """Return the network before the step."""
        return answer(self.file.network("dit"), self.x_t, self._draws[0], self.text)

    def _losses(self, network: CustomDiT) -> Tensor:
        output = network(self.x_t, self._draws[0], self.text)
        return self._process.loss(output, self.latents, self.x_t, *self._draws)


ROWS = rows_of_group(
    "step", VideoStep, "--checkpoint",
    Quantity("latents", lambda group: group.latents, needs="--vae"),
    Quantity("prompt_embeds", lambda group: ops.numpy(group.text)[:, None], needs="--text-encoder"),
    Quantity("x_t", lambda group: group.x_t),
    Quantity("model_output", VideoStep.output),
    Quantity("loss", lambda group: group.step.losses.mean()),
    Quantity("loss_after_one_adamw_step", lambda group: group.step.losses_after.mean()),
    *rows_of_step(lambda group: group.step),
)  # fmt: skip
