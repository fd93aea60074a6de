"""Files of reference values of text-to-video models: their networks, and the rows of a group of names.

The first part of a name is its group: ``dit/output`` is in the group ``dit``. Each group is one class, created when its
first quantity is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.checkpoint.formats import read_weights, select_tree
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.configs.diffusion import WanFlowConfig
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.video_transformer import CustomDiTConfig, WanConfig
from mindspeed_mm_dit.data.clip_reader import covering_size_of_mindspeed_mm, fit_frames, resize_levels
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.integrations.formats.single_files import extract_trees
from mindspeed_mm_dit.models.video_transformer import CustomDiT, Wan
from mindspeed_mm_dit.objectives.wan_flow.objective import batch
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow
from mindspeed_mm_dit.tools.verify.reference.file import (
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    config_of,
    evaluate,
    loaded,
    rows_of_step,
)
from mindspeed_mm_dit.tools.verify.table import Bound, Quantity, Rows

NETWORKS: dict[str, tuple[str, type, Callable[[Any], Any]]] = {
    "dit": ("--checkpoint", CustomDiTConfig, CustomDiT),
    "wan": ("--wan", WanConfig, Wan),
}
"""Group -> flag of its weights, config, network."""
NUM_TRAIN_TIMESTEPS = 1000
"""Number of rows in the training tables, if a file has none."""
_PATCH = ("frames", "height", "width")
_SIZES = (
    *("num_layers", "num_heads", "head_dim", *(f"patch_size ({side})" for side in _PATCH), "in_channels"),
    *("out_channels", "text_dim", "freq_dim", "ffn_dim", "rope_max_seq_len"),
)
_DIFFUSERS = {"num_heads": "num_attention_heads", "head_dim": "attention_head_dim"}
"""Key of ``dit`` -> the same key of ``wan``."""


class TextToVideo:
    """The arrays of a file, and networks with the weights of each flag; groups compute its quantities."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        self.arrays, self.weights = arrays, weights
        self.network = cache(self.fresh_network)
        self.group = cache(lambda group: group(self))

    @cached_property
    def autoencoder(self) -> Any:
        """Wan's autoencoder, from --vae, with the sizes in its own config.json."""
        from mindspeed_mm_dit.configs.autoencoder import WanVAEConfig
        from mindspeed_mm_dit.models.pytorch_encoders import AutoencoderKLWan

        with _named("--vae"):
            folder = {"from_pretrained": str(self.weights["--vae"])}
            return AutoencoderKLWan(WanVAEConfig(**WanVAEConfig.spelled_out(folder)))

    @cached_property
    def text_encoder(self) -> Any:
        """UMT5, from --text-encoder, in float32."""
        from mindspeed_mm_dit.configs.text_encoder import UMT5Config
        from mindspeed_mm_dit.models.text_encoders import UMT5

        with _named("--text-encoder"):
            return UMT5.build(UMT5Config(str(self.weights["--text-encoder"]), dtype="fp32"))

    def fresh_network(self, kind: str) -> Any:
        """Return a new network of NETWORKS, with its config as ``.config``; the one in :attr:`network` never changes.

        Raises CheckpointError for invalid sizes, and for weights of another network.
        """
        flag, config_class, network = NETWORKS[kind]
        with _named(flag):
            weights, stored = _read(find_checkpoint(self.weights[flag], flag))
        sizes, what = stored or self._sizes(kind), f"{flag}: config" if stored else "--reference: config"
        # (latents of one patch are a placeholder: the caller checks those of the file)
        config = config_of(config_class, {**sizes, "latent_size": sizes.get("patch_size")}, what)
        return loaded(network, config, weights, flag)

    def checked_network(self, kind: str) -> Any:
        """Return a network, and check the inputs ``dit/`` and ``sample/`` of the file against it.

        Raises CheckpointError, naming the array, for inputs that do not fit the network or each other.
        """
        network = self.network(kind)
        _check_inputs(self.arrays, network.config)
        return network

    def _sizes(self, kind: str) -> dict[str, Any]:
        """Return the sizes in the file's ``config`` by the keys of the section ``predictor``."""
        sizes: dict[str, Any] = self.arrays.sizes(_SIZES)
        sizes["patch_size"] = [sizes.pop(f"patch_size ({side})") for side in _PATCH]
        return {_DIFFUSERS.get(key, key): value for key, value in sizes.items()} if kind == "wan" else sizes


def rows_of_group(prefix: str, group: Callable[[TextToVideo], Any], needs: str | None, *rows: Quantity) -> Rows:
    """Return rows whose names start with ``prefix``, computed by one ``group`` of the file.

    needs: flag of the weights, for rows that name none.
    """

    def of_file(row: Quantity) -> Quantity:
        return dataclasses.replace(
            row,
            names=f"{prefix}/{row.names}",
            needs=row.needs or needs,
            compute=lambda file, *groups: row.compute(file.group(group), *groups),
        )

    return tuple(map(of_file, rows))


def tutorial_flow(shift: float, rows: int = NUM_TRAIN_TIMESTEPS) -> WanFlow:
    """Return the objective with the tutorial's constants."""
    config = WanFlowConfig(num_train_timesteps=rows, shift=shift, sigma_min=0.0, extra_one_step=True)
    return WanFlow(config)


def draws_at(process: WanFlow, row: int, noise: np.ndarray) -> list[Tensor]:
    """Return the draws of a batch whose samples are all at ``row`` of the table of times."""
    values = batch(process.config, np.full(len(noise), row), noise)
    return [ops.tensor(values[name]) for name in process.draw_names]


def check_latents(config: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError, naming the array, for latents (B, C, F, H, W) that do not fit a network."""
    try:
        config.check_latents(shape[1:])
    except ConfigError as error:
        raise CheckpointError(f"{name} in --reference does not fit the network: {error}") from None


def _check_inputs(arrays: ReferenceArrays, config: Any) -> None:
    latents = [name for name in ("dit/x", "sample/start") if name in arrays]
    for name in latents:
        check_latents(config, name, arrays[name].shape)
        arrays.check_shape(name, arrays[latents[0]].shape)
    x, text = arrays[latents[0] if latents else "dit/x"], arrays["dit/text"]
    B, L = len(x), text.shape[-2] if text.ndim > 2 else 0
    expected = {
        "dit/text": (B, 1, L, config.text_dim) if text.ndim == 4 else (B, L, config.text_dim),
        "dit/t": (B,),
        "dit/t_shared": (1,),
        "dit/target": (B, config.out_channels, *x.shape[2:]),
        "sample/negative_text": text.shape,
    }
    for name, shape in expected.items():
        if name in arrays:
            arrays.check_shape(name, shape)


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """Prefix errors with the flag that named a part, because the part only knows its file."""
    try:
        yield
    except UserError as error:
        if str(error).startswith(flag):
            raise
        raise type(error)(f"{flag}: {error}") from None


def _read(path: Path) -> tuple[Mapping[str, np.ndarray], dict[str, Any]]:
    """Return weights and, from a .pt, its ``config`` without the private keys of diffusers (leading underscore)."""
    if path.suffix not in (".pt", ".pth", ".bin"):
        return read_weights(path, use_ema=False), {}
    content = read_torch_file(path)
    config = content.get("config")
    settings = {k: v for k, v in config.items() if not str(k).startswith("_")} if isinstance(config, Mapping) else {}
    return select_tree(extract_trees(content, path), use_ema=False), settings


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
        self.step = OptimizerStep(lambda: file.fresh_network("dit"), self._losses, STEP_LR)

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
            raise CheckpointError(
                f"--text-encoder has states of width {states.shape[-1]}, and --checkpoint takes {width}. Name the text "
                "encoder of this network."
            )
        return states

    @cached_property
    def _draws(self) -> list[Tensor]:
        self.arrays.check_shape("step/t_index", ())
        self.arrays.check_range("step/t_index", NUM_TRAIN_TIMESTEPS - 1)
        return draws_at(self._process, int(self.arrays["step/t_index"]), self.arrays["step/noise"])

    @cached_property
    def x_t(self) -> Tensor:
        """Noised latents."""
        return self._process.add_noise(self.latents, *self._draws)

    def output(self) -> Tensor:
        """Return the network's output before the step."""
        return evaluate(self.file.network("dit"), self.x_t, self._draws[0], self.text)

    def _losses(self, network: CustomDiT) -> Tensor:
        output = network(self.x_t, self._draws[0], self.text)
        return self._process.loss(output, self.latents, self.x_t, *self._draws)


ROWS = (
    *rows_of_group(
        "step",
        VideoStep,
        "--checkpoint",
        Quantity("latents", lambda group: group.latents, needs="--vae"),
        Quantity("prompt_embeds", lambda group: ops.numpy(group.text)[:, None], needs="--text-encoder"),
        Quantity("x_t", lambda group: group.x_t),
        Quantity("model_output", VideoStep.output),
        Quantity("loss", lambda group: group.step.losses.mean()),
        Quantity("loss_after_one_adamw_step", lambda group: group.step.losses_after.mean()),
        *rows_of_step(lambda group: group.step),
    ),
    *rows_of_group(
        "vae",
        Autoencoder,
        "--vae",
        Quantity("mean", lambda group: group.moments[0]),
        Quantity("logvar", lambda group: 2 * ops.log(group.moments[1])),
        Quantity("mm_latents", Autoencoder.latents),
        Quantity("decoded", Autoencoder.decoded),
    ),
    *rows_of_group(
        "umt5",
        Text,
        "--text-encoder",
        Quantity("last_hidden_state", lambda group: group.states),
        Quantity("mm_embeds", lambda group: group.states[:, None]),
    ),
    *rows_of_group(
        "prep",
        Frames,
        None,
        Quantity("([^/]+)/resized", Frames.resized, PIXEL_LEVEL),
        Quantity("([^/]+)/output", Frames.output),
    ),
)
