"""Groups ``step/``, ``vae/``, ``umt5/`` and ``prep/`` of a text-to-video file.

They cover a training step from video and tokens, with all samples at one time, and the parts that make latents, states
and frames. Without an autoencoder or text encoder, the step takes the file's latents or states.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.data.frames import covering_size_of_mindspeed_mm, fit_frames, resize_levels
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.video_transformer import CustomDiT
from mindspeed_mm_dit.tools.verify.reference.file import Tensor, evaluate
from mindspeed_mm_dit.tools.verify.reference.step import Step, rows_of_step
from mindspeed_mm_dit.tools.verify.reference.video import (
    NUM_TRAIN_TIMESTEPS,
    TextToVideo,
    check_latents,
    draws_at,
    rows_of_group,
    tutorial_flow,
)
from mindspeed_mm_dit.tools.verify.table import Bound, Quantity

STEP_LR = 1e-3
VIDEO = (None, 3, None, None, None)
"""(B, 3, F, H, W)."""
PIXEL_LEVEL = Bound(
    "Pillow and PyTorch round weights differently: one level of 255.",
    least=lambda levels: float(np.sqrt(levels.size) / np.linalg.norm(levels.astype(np.float64))),
)


def states_of(file: TextToVideo, ids: str, mask: str) -> Tensor:
    """Return the states (B, L, D) of the tokens ``ids`` and ``mask`` in a file, each (B, L) or (B, 1, L).

    Raises CheckpointError for tokens that are not in the text encoder's vocabulary.
    """
    arrays, encoder = file.arrays, file.text_encoder
    arrays.check_shape(mask, arrays[ids].shape)
    arrays.check_range(ids, encoder.vocabulary_size - 1)
    arrays.check_range(mask, 1)
    length = arrays[ids].shape[-1]
    return encoder(*(ops.tensor(arrays[name].astype(np.int64).reshape(-1, length)) for name in (ids, mask))).states


class Autoencoder:
    """Posterior, normalised latents, and the decoded mean."""

    def __init__(self, file: TextToVideo) -> None:
        file.arrays.check_shape("vae/video", VIDEO)
        self.autoencoder, self.video = file.autoencoder, file.arrays.tensor("vae/video")

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the posterior."""
        return evaluate(self.autoencoder.moments, self.video)

    def latents(self) -> Tensor:
        """Return the normalised mean."""
        return evaluate(self.autoencoder.scaled, self.moments[0])

    def decoded(self) -> Tensor:
        """Return the decoded mean."""
        return evaluate(self.autoencoder.decode, self.latents())


class Text:
    """The states of the text encoder, padded positions included."""

    def __init__(self, file: TextToVideo) -> None:
        file.arrays.check_shape("umt5/ids", (None, None))
        self.states = ops.numpy(states_of(file, "umt5/ids", "umt5/mask"))


class Frames:
    """Compute ``resized`` from ``frames``, and ``output``, the network's input, from ``resized``."""

    def __init__(self, file: TextToVideo) -> None:
        self.arrays = file.arrays

    def _frames(self, video: str, kind: str) -> tuple[np.ndarray, tuple[int, int]]:
        height, width = self.arrays[f"prep/{video}/size"].tolist()
        return rearrange(self.arrays[f"prep/{video}/{kind}"], "t c h w -> t h w c"), (height, width)

    def resized(self, video: str) -> np.ndarray:
        """Return frames that cover the target size, (T, C, h, w) uint8."""
        frames, target = self._frames(video, "frames")
        size = covering_size_of_mindspeed_mm((frames.shape[1], frames.shape[2]), target)
        return rearrange(resize_levels(frames, size), "t h w c -> t c h w")

    def output(self, video: str) -> np.ndarray:
        """Return images (C, T, H, W) in [-1, 1]."""
        return fit_frames(*self._frames(video, "resized"), "mindspeed_mm") / np.float32(127.5) - 1


class VideoStep:
    """One training step of the tutorial's network."""

    def __init__(self, file: TextToVideo) -> None:
        self.file, self.arrays = file, file.arrays
        self.arrays.check_shape("step/shift", ())
        check_between("--reference: step/shift", float(self.arrays["step/shift"]), 1e-3, 1e3)
        self._process = tutorial_flow(float(self.arrays["step/shift"]))
        self._config = file.network("dit").config
        self.step = Step(lambda: file.fresh_network("dit"), self._losses, STEP_LR)

    @cached_property
    def latents(self) -> Tensor:
        """Latents (B, C, f, h, w), from the autoencoder or from the file."""
        if "--vae" not in self.file.weights:
            latents = self.arrays.tensor("step/latents")
        else:
            self.arrays.check_shape("step/video", VIDEO)
            latents = evaluate(self.file.autoencoder.encode, self.arrays.tensor("step/video"))
        check_latents(self._config, "step/latents", tuple(latents.shape))
        self.arrays.check_shape("step/noise", tuple(latents.shape))
        return latents

    @cached_property
    def text(self) -> Tensor:
        """States (B, L, D), from the text encoder or from the file."""
        B, width = int(self.latents.shape[0]), self._config.text_dim
        if "--text-encoder" not in self.file.weights:
            self.arrays.check_shape("step/prompt_embeds", (B, 1, None, width))
            return self.arrays.tensor("step/prompt_embeds")[:, 0]
        self.arrays.check_shape("step/prompt_ids", (B, 1, None))
        states = states_of(self.file, "step/prompt_ids", "step/prompt_mask")
        if states.shape[-1] != width:
            reason = f"its states have width {states.shape[-1]}, and --checkpoint takes {width}"
            raise CheckpointError("--text-encoder", reason, "name the text encoder of this network")
        return states

    @cached_property
    def _draws(self) -> list[Tensor]:
        self.arrays.check_shape("step/t_index", ())
        self.arrays.check_range("step/t_index", NUM_TRAIN_TIMESTEPS - 1)
        return draws_at(self._process, int(self.arrays["step/t_index"]), self.arrays["step/noise"])

    @cached_property
    def x_t(self) -> Tensor:
        """Noised latents."""
        return self._process.noised(self.latents, *self._draws)

    def output(self) -> Tensor:
        """Return the network's output before the step."""
        return evaluate(self.file.network("dit"), self.x_t, self._draws[0], self.text)

    def _losses(self, network: CustomDiT) -> Tensor:
        output = network(self.x_t, self._draws[0], self.text)
        return self._process.loss(output, self.latents, self.x_t, *self._draws)


ROWS = (
    *rows_of_group(
        "step", VideoStep, "--checkpoint",
        Quantity("latents", lambda group: group.latents, needs="--vae"),
        Quantity("prompt_embeds", lambda group: ops.numpy(group.text)[:, None], needs="--text-encoder"),
        Quantity("x_t", lambda group: group.x_t),
        Quantity("model_output", VideoStep.output),
        Quantity("loss", lambda group: group.step.losses.mean()),
        Quantity("loss_after_one_adamw_step", lambda group: group.step.losses_after.mean()),
        *rows_of_step(lambda group: group.step),
    ),
    *rows_of_group(
        "vae", Autoencoder, "--vae",
        Quantity("mean", lambda group: group.moments[0]),
        Quantity("logvar", lambda group: 2 * ops.log(group.moments[1])),
        Quantity("mm_latents", Autoencoder.latents),
        Quantity("decoded", Autoencoder.decoded),
    ),
    *rows_of_group(
        "umt5", Text, "--text-encoder",
        Quantity("last_hidden_state", lambda group: group.states),
        Quantity("mm_embeds", lambda group: group.states[:, None]),
    ),
    *rows_of_group(
        "prep", Frames, None,
        Quantity("([^/]+)/resized", Frames.resized, PIXEL_LEVEL),
        Quantity("([^/]+)/output", Frames.output),
    ),
)  # fmt: skip
