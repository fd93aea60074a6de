"""Section ``predictor`` of model.json with ``model_id`` "dit".

Peebles & Xie 2023, with the options of later recipes. In this order: the published sizes by name, the settings, and
how weights of a DiT with other classes, patches, channels or input size are adapted to this one (--init-from). NumPy
in float64; no framework.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from einops import rearrange

from mindspeed_mm_dit.configs.condition import ClassLabel, Condition, Conditions, PooledText, TextStates
from mindspeed_mm_dit.configs.limits import DEEP, LARGEST, MOST_LAYERS, check_between, divisors, require_positive
from mindspeed_mm_dit.configs.predictor import (
    AdaptedTensor,
    PredictorConfig,
    Shape,
    SourceTensor,
    check_shareable,
    count_of,
    shape_of,
)
from mindspeed_mm_dit.errors import ConfigError

_SIZES = {
    # name: (num_layers, hidden_size, num_heads)
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "H": (32, 1280, 16),
    "XL": (28, 1152, 16),
    "1p0B": (24, 1536, 24),
    "1p6B": (28, 1792, 28),
}
_LIGHTNING = {"learn_sigma": False, "rms_norm": True, "swiglu": True, "rope": True}
_JIT = {**_LIGHTNING, "qk_norm": True, "in_context_len": 32}
_JIT_SIZES = {"B": (128, 4), "L": (128, 8), "H": (256, 10)}
"""Size -> bottleneck_dim, in_context_start."""


def _sizes(name: str, patch_size: int) -> dict[str, int]:
    num_layers, hidden_size, num_heads = _SIZES[name]
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "patch_size": patch_size,
    }


DIT = {f"DiT-{size}/{patch}": _sizes(size, patch) for size in ("S", "B", "L", "XL") for patch in (2, 4, 8)}
"""The twelve networks of Peebles & Xie 2023, table 1."""
LIGHTNING_DIT = {
    f"LightningDiT-{size}/{patch}": {**_sizes(size, patch), **_LIGHTNING}
    for size in ("B", "L", "XL", "1p0B", "1p6B")
    for patch in (1, 2)
}
"""With the options of the published runs (Yao & Wang 2025); later ones add ``qk_norm``."""
JIT = {
    f"JiT-{size}/{patch}": {**_sizes(size, patch), **_JIT, "bottleneck_dim": bottleneck, "in_context_start": start}
    for size, (bottleneck, start) in _JIT_SIZES.items()
    for patch in (16, 32)
}
"""For pixels, without an autoencoder: patches of 16 for images of 256, of 32 for 512 (Li & He 2025)."""
_SD35_MEDIUM = {"pos_embed_max_size": 384, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13))}
_SD35_LARGE = {"num_layers": 38, "num_attention_heads": 38, "qk_norm": "rms_norm"}
_KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
_KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
JOINT: dict[str, dict[str, Any]] = {
    "FLUX.1-dev": {"model_id": "flux", "guidance_embeds": True},
    "FLUX.1-schnell": {"model_id": "flux", "guidance_embeds": False},
    "FLUX.2-dev": {"model_id": "flux2"},
    "FLUX.2-klein-4B": {"model_id": "flux2", **_KLEIN_4B, "guidance_embeds": False},
    "FLUX.2-klein-9B": {"model_id": "flux2", **_KLEIN_9B, "guidance_embeds": False},
    "SD3-medium": {"model_id": "sd3"},
    "SD3.5-medium": {"model_id": "sd3", **_SD35_MEDIUM},
    "SD3.5-large": {"model_id": "sd3", **_SD35_LARGE},
    "Qwen-Image": {"model_id": "qwen_image"},
    "Z-Image": {"model_id": "z_image"},
}
"""Networks in which text and image attend to each other; other settings have the defaults of their family."""
PRESETS: dict[str, dict[str, Any]] = {**DIT, **LIGHTNING_DIT, **JIT, **JOINT}


OPTIONS = (
    "qk_norm", "rms_norm", "swiglu", "rope", "wo_shift", "bottleneck_dim", "in_context_len", "h_embedder", "text_dim",
    "pooled_dim",
)  # fmt: skip
"""Settings that change the architecture of the published DiT, which has none of them."""


@dataclass(frozen=True)
class DiTSettings(PredictorConfig):
    """Section ``predictor`` with ``model_id`` "dit"; ``configs/dit.py`` derives the network from it."""

    input_size: int
    """Height and width of the (square) latents, in latent pixels; a multiple of ``patch_size``. Positional embeddings
    are made for this size and rescaled to other shapes."""
    num_classes: int = 0
    """Number of classes; label ``num_classes`` is the unconditional class of guidance. 0: condition on text only."""
    in_channels: int = 4
    """Channels of the latents."""
    patch_size: int = 2
    """Height and width of a patch, in latent pixels."""
    hidden_size: int = 1152
    """Width D of a token."""
    num_layers: int = 28
    """Number of transformer blocks."""
    num_heads: int = 16
    """Attention heads; must divide ``hidden_size``."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer, as a multiple of ``hidden_size``."""
    class_dropout_prob: float = 0.1
    """Probability, in [0, 1), that a training label becomes the unconditional class; 0: there is no such class."""
    learn_sigma: bool = True
    """Predict the variance too; this doubles the output channels."""
    qk_norm: bool = False
    """Normalise queries and keys per head: by LayerNorm with weight and bias, or by RMSNorm with ``rms_norm``."""
    rms_norm: bool = False
    """Use RMSNorm with a weight for all norms, instead of LayerNorm without weights."""
    swiglu: bool = False
    """Use SwiGLU (Shazeer 2020) in the MLP, two thirds as wide, so that it has about as many weights."""
    rope: bool = False
    """Use rotary embeddings of the row and column of each patch (Su et al. 2021), in addition to the added positional
    embeddings."""
    wo_shift: bool = False
    """Leave out the adaLN shifts in the blocks, keeping scale and gate; the last layer keeps its shift."""
    bottleneck_dim: int | None = None
    """Width of the bottleneck of the patch embedding (JiT); null: embed directly to ``hidden_size``."""
    in_context_len: int = 0
    """Number of in-context tokens, made from the label, before those of the image (JiT); 0 for none."""
    in_context_start: int = 0
    """Block, counted from 0, before which the in-context tokens join; they are cut off after the last block."""
    h_embedder: bool = False
    """Condition on an interval of times (MeanFlow): its later end and, through its own embedder, its length."""
    text_dim: int | None = None
    """Width of the caption's states, which each block attends to; null: no cross-attention."""
    text_length: int = 77
    """Tokens of a caption with its padding. Only estimates of arithmetic and memory use it; no weight depends on it."""
    pooled_dim: int | None = None
    """Width of the caption's pooled vector, which is added to the timestep embedding; null: no pooled vector."""
    pooled_encoder: int = 0
    """Index, 0 or 1, of the text encoder in model.json that makes the pooled vector; encoder 0 makes the states."""
    z_dims: tuple[int, ...] = ()
    """Width of each teacher's features; a projector per teacher maps the tokens of a block to it (REPA). Empty: no
    teachers."""
    projector_dim: int = 2048
    """Width of the two hidden layers of a projector."""
    encoder_depth: int = 8
    """Block whose tokens the projectors read, counted from 1, at most ``num_layers``."""
    latent_size: tuple[int, ...] | None = None
    """[height, width] of the latents in latent pixels, if they are not a square of ``input_size``; no weight depends on
    it."""
    model_id: str = "dit"

    adaptable = ("num_classes", "class_dropout_prob", "input_size", "patch_size", "in_channels", "learn_sigma",
                 "text_dim", "text_length", "pooled_dim", "pooled_encoder", "latent_size")  # fmt: skip

    def __post_init__(self) -> None:
        labelled = () if self.num_classes == 0 and self.texts else ("num_classes",)
        require_positive(self, "predictor", "input_size", *labelled, "in_channels", "patch_size", "hidden_size",
                          "num_heads", "text_length")  # fmt: skip
        check_between("predictor.num_layers", self.num_layers, 1, MOST_LAYERS, DEEP)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"predictor.num_heads = {self.num_heads}",
                f"does not divide hidden_size: {self.hidden_size} % {self.num_heads} = "
                f"{self.hidden_size % self.num_heads}",
                f"use one of {divisors(self.hidden_size)}",
            )
        if self.hidden_size % 4:
            raise ConfigError(
                f"predictor.hidden_size = {self.hidden_size}", "2-D sin-cos positions need a multiple of 4"
            )
        if self.input_size % self.patch_size:
            raise ConfigError(
                f"predictor.patch_size = {self.patch_size}",
                f"does not divide input_size: {self.input_size} % {self.patch_size} = "
                f"{self.input_size % self.patch_size}",
                f"use one of {divisors(self.input_size)}, or another input_size",
            )
        if not 1 <= self.hidden_size * self.mlp_ratio <= LARGEST or self.mlp_hidden_size < 1:
            raise ConfigError(
                f"predictor.mlp_ratio = {self.mlp_ratio}",
                f"gives the MLP's hidden layer no valid width: hidden_size({self.hidden_size}) * mlp_ratio must be at "
                "least 1, and no more than a tensor can have",
                "the published DiT has 4.0",
            )
        if not 0.0 <= self.class_dropout_prob < 1.0:
            raise ConfigError(f"predictor.class_dropout_prob = {self.class_dropout_prob}", "must lie in [0, 1)")
        if self.latent_size is not None:
            self._check_latent_size(self.latent_size)
        self._check_options()

    def _check_latent_size(self, size: tuple[int, ...]) -> None:
        """Raise ConfigError unless latents of ``size`` can be cut into patches."""
        what = f"predictor.latent_size = {list(size)}"
        if len(size) != 2 or min(size) < 1:
            raise ConfigError(what, "must be two positive whole numbers: height and width")
        for side in size:
            if side % self.patch_size:
                raise ConfigError(
                    what,
                    f"is not a whole number of patches: {side} % {self.patch_size} = {side % self.patch_size}",
                    f"use multiples of {self.patch_size}",
                )
        if self.z_dims and size[0] != size[1]:
            raise ConfigError(
                what, "is not square, but a teacher's features need square latents", "drop z_dims and teacher"
            )

    def _check_options(self) -> None:
        """Raise ConfigError for an option of later recipes that does not fit this network."""
        if self.rope and self.head_dim % 4:
            raise ConfigError(
                "predictor.rope = true",
                f"rotates pairs by row and by column, so the width of a head must be a multiple of 4: "
                f"hidden_size({self.hidden_size}) / num_heads({self.num_heads}) = {self.head_dim}",
                "use another num_heads",
            )
        for name in ("bottleneck_dim", "text_dim", "pooled_dim"):
            if getattr(self, name) is not None:
                require_positive(self, "predictor", name)
        check_between("predictor.pooled_encoder", self.pooled_encoder, 0, 1)
        if self.in_context_len and not self.num_classes:
            raise ConfigError(
                f"predictor.in_context_len = {self.in_context_len}",
                "needs labels, but num_classes is 0",
                "drop it: each block attends to the caption already",
            )
        check_between("predictor.in_context_len", self.in_context_len, 0, LARGEST)
        if not 0 <= self.in_context_start < self.num_layers:
            raise ConfigError(
                f"predictor.in_context_start = {self.in_context_start}",
                f"is not a block of this network: num_layers is {self.num_layers}, and blocks are counted from 0",
            )
        if self.in_context_start and not self.in_context_len:
            raise ConfigError(
                f"predictor.in_context_start = {self.in_context_start}",
                "has no effect where in_context_len is 0",
                "set in_context_len to the number of these tokens, or drop in_context_start",
            )

        if self.z_dims:
            require_positive(self, "predictor", "projector_dim")
            check_between("predictor.encoder_depth", self.encoder_depth, 1, self.num_layers)
            for number, width in enumerate(self.z_dims):
                check_between(f"predictor.z_dims[{number}]", width, 1, LARGEST)

    @property
    def out_channels(self) -> int:
        return self.in_channels * 2 if self.learn_sigma else self.in_channels

    @property
    def num_time_inputs(self) -> int:  # type: ignore[override]
        """Number of times that the network takes per sample: 2 for an interval."""
        return 2 if self.h_embedder else 1

    @property
    def num_tokens(self) -> int:
        return math.prod(side // self.patch_size for side in self.latent_shape[1:])

    @property
    def num_embeddings(self) -> int:
        """Rows of the label table: the classes and, with label dropout, the unconditional one; 0 without classes."""
        if not self.num_classes:
            return 0
        return self.num_classes + (1 if self.class_dropout_prob > 0 else 0)

    @property
    def conditions(self) -> Conditions:
        """The conditions that the settings enable: class label, states of a caption, its pooled vector."""
        label = (ClassLabel(self.num_classes, self.class_dropout_prob),) if self.num_classes else ()
        return Conditions(*label, *self.texts)

    @property
    def texts(self) -> tuple[Condition, ...]:
        """The text conditions, which are dropped together."""
        states = TextStates(self.text_length, self.text_dim) if self.text_dim else None
        dropout_key = states.dropout_key if states else ""
        pooled = (
            PooledText(self.pooled_dim, encoder=self.pooled_encoder, shared_dropout_key=dropout_key)
            if self.pooled_dim
            else None
        )
        return tuple(condition for condition in (states, pooled) if condition is not None)

    @property
    def latent_shape(self) -> Shape:
        return (self.in_channels, *(self.latent_size or (self.input_size, self.input_size)))

    def resized(self, shape: Shape) -> DiTSettings:
        if len(shape) != 3 or shape[0] != self.in_channels:
            return super().resized(shape)  # type: ignore[return-value]
        is_square = shape[1:] == (self.input_size, self.input_size)
        return dataclasses.replace(self, latent_size=None if is_square else shape[1:])

    @property
    def mlp_hidden_size(self) -> int:
        """Width of the MLP's hidden layer; with SwiGLU two thirds of it, rounded down as in the published code."""
        width = int(self.hidden_size * self.mlp_ratio)
        return width * 2 // 3 if self.swiglu else width

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def num_modulations(self) -> int:
        """Number of adaLN vectors per block: shift, scale and gate of both branches."""
        return 4 if self.wo_shift else 6


_TABLE = "y_embedder.embedding_table.weight"


@dataclass(frozen=True)
class DiTConfig(DiTSettings):
    """Section ``predictor`` with ``model_id`` "dit"."""

    network = "mindspeed_mm_dit.models.dit:DiT"

    def check_context_parallel(self, ranks: int) -> None:
        """Raise ConfigError unless the ranks can split heads and tokens evenly, and the loss needs only gradients."""
        if ranks > 1 and self.h_embedder:
            reason = (
                "is not supported with h_embedder (MeanFlow): its derivative in time needs the whole sample on one rank"
            )
            raise ConfigError(f"--context-parallel-size = {ranks}", reason, "use 1")
        tokens = {
            "tokens of an image": self.num_tokens,
            "tokens of an image and in context": self.num_tokens + self.in_context_len,
        }
        check_shareable(ranks, {"predictor.num_heads": self.num_heads, **tokens})

    def reduced_width(self) -> DiTConfig:
        """Return the same network with at most 4 heads, of the same width, and at most 4 blocks."""
        heads, layers = min(self.num_heads, 4), min(self.num_layers, 4)
        start = self.in_context_start * layers // self.num_layers
        return replace(
            self, hidden_size=self.head_dim * heads, num_heads=heads, num_layers=layers, in_context_start=start,
            encoder_depth=min(self.encoder_depth, layers), projector_dim=min(self.projector_dim, 256),
        )  # fmt: skip

    def adapt_weight(self, name: str, source: SourceTensor) -> AdaptedTensor | None:
        """Return the initial ``name``, adapted from a DiT of other classes, size, patches, channels or variance."""
        rule = RULES.get(name)
        if rule is None:
            return super().adapt_weight(name, source)
        assert isinstance(source.there, DiTConfig)
        return rule(self, source.there, source) if source.there.hidden_size == self.hidden_size else None

    def is_optional(self, name: str) -> bool:
        """Return whether ``name`` belongs to a condition or teacher, in which DiTs may differ."""
        others = ("y_embedder.", "text_embedder.", "pooled_embedder.", "projectors.")
        return name.startswith(others) or ".cross_attn." in name

    def settings_of_size(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "hidden_size": {"hidden_size": 1152, "num_heads": 16},
            "num_layers": {"num_layers": max(28, self.in_context_start + 1)},
            "num_classes": {"num_classes": self.num_classes and 1000},
            "input_size": {"input_size": 16 * self.patch_size},
            "mlp_ratio": {"mlp_ratio": min(4.0, self.mlp_ratio)},
            "in_channels": {"in_channels": 4},
            "bottleneck_dim": {"bottleneck_dim": self.bottleneck_dim and 128},
            "in_context_len": {"in_context_len": min(self.in_context_len, 32)},
            "text_length": {"text_length": min(self.text_length, 120)},
            "text_dim": {"text_dim": self.text_dim and 4096},
            "pooled_dim": {"pooled_dim": self.pooled_dim and 1280},
        }

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> DiTConfig | None:
        """Return the architecture that ``shapes`` imply; settings that do not change shapes get a value that fits.

        Those are the number of heads without QK-norm, ``rope``, and the block before which in-context tokens join.
        Raises CheckpointError for a DiT without a tensor that decides the sizes.
        """
        if not any(name.startswith(("x_embedder.proj.", "x_embedder.proj1.")) for name in shapes):
            return None
        is_narrow = "x_embedder.proj1.weight" in shapes
        first, C, P, _ = shape_of(shapes, f"x_embedder.{'proj1' if is_narrow else 'proj'}.weight", 4)
        tokens, D = shape_of(shapes, "pos_embed", 3)[1:]
        widths = {name: shapes.get(f"{name}_embedder.linear_1.weight", (0, None))[1] for name in ("text", "pooled")}
        rows = 0 if any(widths.values()) and _TABLE not in shapes else shape_of(shapes, _TABLE, 2)[0]
        outputs = shape_of(shapes, "final_layer.linear.weight", 2)[0]
        swiglu, qk_norm = "blocks.0.mlp.w12.weight" in shapes, "blocks.0.attn.q_norm.weight" in shapes
        hidden = shape_of(shapes, f"blocks.0.mlp.{'w12' if swiglu else 'fc1'}.weight", 2)[0] // (2 if swiglu else 1)
        return cls(
            input_size=P * math.isqrt(tokens), num_classes=max(0, rows - 1), in_channels=C, patch_size=P, hidden_size=D,
            num_layers=count_of(shapes, "blocks"), mlp_ratio=_mlp_ratio(hidden, D, swiglu),
            num_heads=D // max(1, shape_of(shapes, "blocks.0.attn.q_norm.weight", 1)[0]) if qk_norm else 1,
            learn_sigma=outputs == 2 * C * P * P, qk_norm=qk_norm, rms_norm="blocks.0.norm1.weight" in shapes,
            swiglu=swiglu, wo_shift=shapes.get("blocks.0.adaLN_modulation.1.weight") == (4 * D, D),
            bottleneck_dim=first if is_narrow else None,
            in_context_len=shape_of(shapes, "in_context_posemb", 3)[1] if "in_context_posemb" in shapes else 0,
            h_embedder="h_embedder.mlp.0.weight" in shapes, text_dim=widths["text"], pooled_dim=widths["pooled"],
            **_projectors_of(shapes),
        )  # fmt: skip


def _projectors_of(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the sizes of the projectors; shapes do not show which block's tokens they read."""
    widths = tuple(shape_of(shapes, f"projectors.{n}.4.weight", 2)[0] for n in range(count_of(shapes, "projectors")))
    hidden = shape_of(shapes, "projectors.0.0.weight", 2)[0] if widths else 0
    return {"z_dims": widths, "projector_dim": hidden, "encoder_depth": 1} if widths else {}


def _mlp_ratio(hidden: int, width: int, swiglu: bool) -> float:
    """Return a ratio that gives an MLP of width ``hidden``; the published 4 if it does."""
    full = -(-hidden * 3 // 2) if swiglu else hidden
    if swiglu and 4 * width * 2 // 3 == hidden:
        return 4.0
    ratio = full / width
    return ratio if int(width * ratio) == full else math.nextafter(ratio, math.inf)


def resize_matrix(before: int, after: int) -> np.ndarray:
    """Return b (after, before) float64, which resizes a row of ``before`` pixels; b x b^T resizes a patch x."""
    if after < before:
        return np.linalg.pinv(resize_matrix(after, before))
    centres = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)  # half-pixel, edges repeated
    left = np.minimum(centres.astype(int), max(before - 2, 0))
    fraction = centres - left
    matrix = np.zeros((after, before))
    matrix[np.arange(after), left] += 1 - fraction
    matrix[np.arange(after), np.minimum(left + 1, before - 1)] += fraction
    return matrix


def resized_input(weight: np.ndarray, after: int) -> np.ndarray:
    """Resize the weights (..., P, P) of a layer from patches to tokens to patches of ``after`` pixels."""
    matrix = np.linalg.pinv(resize_matrix(weight.shape[-1], after).T)  # (after, P)
    return matrix @ weight.astype(np.float64) @ matrix.T


def resized_output(weight: np.ndarray, after: int) -> np.ndarray:
    """Resize the weights (P, P, ...) of a layer from tokens to patches to patches of ``after`` pixels."""
    matrix = resize_matrix(weight.shape[0], after)  # (after, P)
    return np.einsum("ip,jq,pq...->ij...", matrix, matrix, weight.astype(np.float64))


def _positions(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    if source.value.shape == source.shape:
        return AdaptedTensor(source.value)
    side = here.input_size // here.patch_size
    return AdaptedTensor(source.draw(), f"computed for {side}x{side} patches")


def _class_table(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    """Keep the rows of the classes that both networks have, and of the unconditional class."""
    if source.value.shape == source.shape and list(source.labels.items()) == [(i, i) for i in range(source.shape[0])]:
        return AdaptedTensor(source.value)
    table = source.draw()
    for label, other in source.labels.items():
        table[label] = source.value[other]
    num_kept = sum(label < here.num_classes for label in source.labels)
    done = []
    if num_kept:
        done.append(f"{num_kept} of {here.num_classes} classes kept")
    if num_kept < here.num_classes:
        done.append(f"{here.num_classes - num_kept} of {here.num_classes} classes randomly initialised")
    if here.conditions.has_unconditional:
        state = "kept" if here.num_classes in source.labels else "randomly initialised"
        done.append(f"the unconditional class {state}")
    return AdaptedTensor(table, ", ".join(done))


def _patch_embedding(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    """Resample patches; from grey to colour, split each weight over three equal channels; from colour to grey, sum."""
    value = source.value  # (D, C, P, P)
    channels = (there.in_channels, here.in_channels)
    if _are_foreign(*channels):
        return AdaptedTensor(source.draw(), _FOREIGN.format(*channels))
    if channels == (1, 3):
        value = np.repeat(value / 3, 3, axis=1)
    elif channels == (3, 1):
        value = value.sum(axis=1, keepdims=True)
    if there.patch_size != here.patch_size:
        value = resized_input(value, here.patch_size)
    return AdaptedTensor(value, _resampling(here, there))


def _last_layer(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    """Resample patches, copy grey to each colour or average colours to grey, and drop or add the variance."""
    channels = (there.in_channels, here.in_channels)
    if _are_foreign(*channels):
        return AdaptedTensor(source.draw(), _FOREIGN.format(*channels))
    P, parts = there.patch_size, 2 if there.learn_sigma else 1
    # The parts are the prediction and, if it is learned, the variance; the last axis is D, or 1 for the bias.
    value = rearrange(source.value, "(p q parts c) ... -> p q parts c (...)", p=P, q=P, parts=parts)
    done = [_resampling(here, there)]
    if there.learn_sigma and not here.learn_sigma:
        value, done = value[:, :, :1], [*done, "variance dropped"]
    if here.learn_sigma and not there.learn_sigma:
        value, done = np.concatenate([value, np.zeros_like(value)], 2), [*done, "variance added, with zeros"]
    if channels == (1, 3):
        value = np.repeat(value, 3, axis=3)
    elif channels == (3, 1):
        value = value.mean(axis=3, keepdims=True)
    if there.patch_size != here.patch_size:
        value = resized_output(value, here.patch_size)
    return AdaptedTensor(value.reshape(source.shape), ", ".join(filter(None, done)))


def _text_embedding(here: DiTSettings, there: DiTSettings, source: SourceTensor) -> AdaptedTensor:
    if source.value.shape == source.shape:
        return AdaptedTensor(source.value)
    return AdaptedTensor(source.draw(), f"randomly initialised for texts of width {source.shape[1]}")


_FOREIGN = "randomly initialised: weights for latents of {0} channels do not convert to {1} channels"


def _are_foreign(there: int, here: int) -> bool:
    """Return whether channels cannot be converted: only those of grey and colour images can."""
    return there != here and {there, here} != {1, 3}


def _resampling(here: DiTSettings, there: DiTSettings) -> str:
    done = []
    if there.in_channels != here.in_channels:
        done.append("from grey to colour" if there.in_channels == 1 else "from colour to grey")
    if there.patch_size != here.patch_size:
        done.append(f"resampled from patches of {there.patch_size} to {here.patch_size}")
    return ", ".join(done)


RULES: dict[str, Callable[[DiTSettings, DiTSettings, SourceTensor], AdaptedTensor]] = {
    "pos_embed": _positions,
    "x_embedder.proj.weight": _patch_embedding,
    "x_embedder.proj1.weight": _patch_embedding,
    "y_embedder.embedding_table.weight": _class_table,
    "text_embedder.linear_1.weight": _text_embedding,
    "pooled_embedder.linear_1.weight": _text_embedding,
    "final_layer.linear.weight": _last_layer,
    "final_layer.linear.bias": _last_layer,
}
"""How to adapt the tensors that are not simply copied."""
