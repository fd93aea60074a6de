"""The group ``step/`` of a file of reference values of text to video: one step of training, from video and tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework import ops, optim
from mindspeed_mm_dit.objectives.wan_flow.draws import batch
from mindspeed_mm_dit.verify.reference.video import (
    NUM_TRAIN_TIMESTEPS,
    Group,
    VideoReference,
    check_shape,
    check_whole,
    tutorial_flow,
)
from mindspeed_mm_dit.verify.reference.video_encoders import VIDEO, states_of

Tensor = Any

STEP_LR = 1e-3
"""Of the AdamW step in ``step/``."""


class _Step(NamedTuple):
    """What one step of AdamW finds."""

    output: np.ndarray
    """Of the network before the step."""
    loss: np.ndarray
    """Mean over the samples, before the step."""
    gradients: dict[str, np.ndarray]
    loss_after: np.ndarray


class StepGroup(Group):
    """``step/``: one whole step of training, from video and tokens; all samples share one time.

    Latents and states of the text are the file's where the parts that make them are not given.
    """

    part = "--checkpoint"
    inputs = re.compile("video|prompt_ids|prompt_mask|noise|t|t_index|shift")

    def __init__(self, reference: VideoReference) -> None:
        super().__init__(reference)
        self._process = tutorial_flow(self._shift())
        self._model = reference.fresh_network("dit")

    @classmethod
    def needs(cls, name: str) -> str | None:
        """Return the flag of the weights that ``name`` needs."""
        return {"latents": "--vae", "prompt_embeds": "--text-encoder"}.get(name, cls.part)

    def value(self, name: str) -> np.ndarray | None:
        """Return our value of ``name``."""
        if found := re.fullmatch(r"grad_norm/(.+)", name):
            return self._norms.get(found[1])
        known: dict[str, Callable[[], np.ndarray]] = {
            "latents": lambda: ops.numpy(self._latents),
            "prompt_embeds": lambda: ops.numpy(self._text)[:, None],
            "x_t": lambda: ops.numpy(self._x_t),
            "model_output": lambda: self._step.output,
            "loss": lambda: self._step.loss,
            "grad_norm_total": lambda: np.sqrt(sum(norm**2 for norm in self._norms.values())),
            "loss_after_one_adamw_step": lambda: self._step.loss_after,
        }
        return known[name]() if name in known else None

    def _shift(self) -> float:
        check_shape(self._given, "step/shift", ())
        check_between("--reference: step/shift", float(self._given["step/shift"]), 1e-3, 1e3)
        return float(self._given["step/shift"])

    @property
    def _samples(self) -> int:
        return int(self._latents.shape[0])

    def _check_latents(self, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError for latents (B, C, f, h, w) that the network cannot be given, or noise of others."""
        try:
            self._model.config.check_latents(shape[1:])
        except ConfigError as error:
            raise CheckpointError(f"--reference: step/latents: {error.what}", error.reason, error.cure) from None
        check_shape(self._given, "step/noise", shape)

    @cached_property
    def _latents(self) -> Tensor:
        reference = self._reference
        if "--vae" not in reference.parts:
            latents = reference.input("step/latents")
        else:
            check_shape(self._given, "step/video", VIDEO)
            with ops.no_grad():
                latents = reference.autoencoder.encode(reference.input("step/video"))
        self._check_latents(tuple(latents.shape))
        return latents

    @cached_property
    def _text(self) -> Tensor:
        reference = self._reference
        if "--text-encoder" not in reference.parts:
            check_shape(self._given, "step/prompt_embeds", (self._samples, 1, None, self._model.config.text_dim))
            return reference.input("step/prompt_embeds")[:, 0]
        check_shape(self._given, "step/prompt_ids", (self._samples, 1, None))
        states = states_of(reference, "step/prompt_ids", "step/prompt_mask")
        if states.shape[-1] != self._model.config.text_dim:
            reason = f"its states have width {states.shape[-1]}, and --checkpoint takes {self._model.config.text_dim}"
            raise CheckpointError("--text-encoder", reason, "name the text encoder of this network")
        return states

    @cached_property
    def _draws(self) -> list[Tensor]:
        check_shape(self._given, "step/t_index", ())
        check_whole(self._given, "step/t_index", NUM_TRAIN_TIMESTEPS - 1)
        noise = self._given["step/noise"]
        drawn = batch(self._process.config, np.full(len(noise), int(self._given["step/t_index"])), noise)
        return [ops.tensor(drawn[name]) for name in self._process.draw_names]

    @cached_property
    def _x_t(self) -> Tensor:
        return self._process.noised(self._latents, *self._draws)

    def _losses(self) -> Tensor:
        output = self._model(self._x_t, self._draws[0], self._text)
        return self._process.loss(output, self._latents, self._x_t, *self._draws)

    @cached_property
    def _step(self) -> _Step:
        with ops.no_grad():
            output = ops.numpy(self._model(self._x_t, self._draws[0], self._text))
        losses, gradients = optim.gradients(self._model, self._losses)
        optim.adamw_step(self._model, self._losses, STEP_LR)
        with ops.no_grad():
            after = ops.numpy(self._losses()).mean()
        return _Step(output, losses.mean(), gradients, after)

    @cached_property
    def _norms(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(np.linalg.norm(g.astype(np.float64))) for name, g in self._step.gradients.items()}
