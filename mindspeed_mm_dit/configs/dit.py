"""A DiT (Peebles & Xie 2023) and its published sizes. Options of later recipes:

- LightningDiT (Yao & Wang 2025): ``qk_norm``, ``rms_norm``, ``swiglu``, ``rope`` and ``wo_shift``.
- JiT (Li & He 2025): ``bottleneck_dim`` and the in-context tokens.
- PixArt-alpha (Chen et al. 2023): ``text_dim``, cross-attention of each block to the states of a caption.
- Stable Diffusion 3 (Esser et al. 2024): ``pooled_dim``, a vector of the whole caption added to the timestep.
- REPA (Yu et al. 2024): ``z_dims``, projectors trained to predict a teacher's features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from mindspeed_mm_dit.configs.condition import ClassLabel, Condition, Conditions, PooledText, TextStates
from mindspeed_mm_dit.configs.limits import MAX_INT64, Between, Count, Fraction, NumLayers, Positive, check_between
from mindspeed_mm_dit.configs.predictor import PredictorConfig, Shape, check_shareable
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
    return {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads, "patch_size": patch_size}


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

OPTIONS: tuple[str, ...] = ("qk_norm", "rms_norm", "swiglu", "rope", "wo_shift", "bottleneck_dim", "in_context_len")
OPTIONS += ("h_embedder", "text_dim", "pooled_dim")
"""Settings that change the architecture of the published DiT, which has none of them."""


@dataclass(frozen=True)
class DiTConfig(PredictorConfig):
    """Section ``predictor`` with ``model_id`` "dit"."""

    input_size: Positive
    """Height and width of the (square) latents, in latent pixels; a multiple of ``patch_size``. Positional embeddings
    are made for this size and rescaled to other shapes."""
    num_classes: Count = 0
    """Number of classes; label ``num_classes`` is the unconditional class of guidance. 0: condition on text only."""
    in_channels: Positive = 4
    """Channels of the latents."""
    patch_size: Positive = 2
    """Height and width of a patch, in latent pixels."""
    hidden_size: Positive = 1152
    """Width D of a token."""
    num_layers: NumLayers = 28
    """Number of transformer blocks."""
    num_heads: Positive = 16
    """Attention heads; must divide ``hidden_size``."""
    mlp_ratio: float = 4.0
    """Width of the MLP's hidden layer, as a multiple of ``hidden_size``."""
    class_dropout_prob: Fraction = 0.1
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
    bottleneck_dim: Positive | None = None
    """Width of the bottleneck of the patch embedding (JiT); null: embed directly to ``hidden_size``."""
    in_context_len: Count = 0
    """Number of in-context tokens, made from the label, before those of the image (JiT); 0 for none."""
    in_context_start: Count = 0
    """Block, counted from 0, before which the in-context tokens join; they are cut off after the last block."""
    h_embedder: bool = False
    """Condition on an interval of times (MeanFlow): its later end and, through its own embedder, its length."""
    text_dim: Positive | None = None
    """Width of the caption's states, which each block attends to; null: no cross-attention."""
    text_length: Positive = 77
    """Tokens of a caption with its padding. Only estimates of arithmetic and memory use it; no weight depends on it."""
    pooled_dim: Positive | None = None
    """Width of the caption's pooled vector, which is added to the timestep embedding; null: no pooled vector."""
    pooled_encoder: Annotated[int, Between(0, 1)] = 0
    """Index, 0 or 1, of the text encoder in model.json that makes the pooled vector; encoder 0 makes the states."""
    z_dims: tuple[Positive, ...] = ()
    """Width of each teacher's features; a projector per teacher maps the tokens of a block to it (REPA). Empty: no
    teachers."""
    projector_dim: int = 2048
    """Width of the two hidden layers of a projector."""
    encoder_depth: int = 8
    """Block whose tokens the projectors read, counted from 1, at most ``num_layers``."""
    latent_size: tuple[Positive, ...] | None = None
    """[height, width] of the latents in latent pixels, if they are not a square of ``input_size``; no weight depends on
    it."""
    model_id: str = "dit"

    network = "mindspeed_mm_dit.models.dit:DiT"
    adapter = "mindspeed_mm_dit.models.dit_adapter:DiTAdapter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.num_classes or self.texts):
            raise self.error("num_classes", "must be a positive whole number, unless the network has a text condition.")
        self.check_divides("num_heads", "hidden_size")
        if self.hidden_size % 4:
            raise self.error("hidden_size", "must be a multiple of 4, for the 2-D sin-cos positions.")
        self.check_divides("patch_size", "input_size", ", or another input_size")
        if not 1 <= self.hidden_size * self.mlp_ratio <= MAX_INT64 or self.mlp_hidden_size < 1:
            raise self.error(
                "mlp_ratio",
                f"gives the MLP's hidden layer no valid width: hidden_size({self.hidden_size}) * mlp_ratio must be at "
                "least 1, and no more than a tensor can have. The published DiT has 4.0.",
            )
        if self.rope and self.head_dim % 4:
            raise self.error(
                "rope",
                "rotates pairs by row and by column, so the width of a head must be a multiple of 4, but "
                f"hidden_size({self.hidden_size}) / num_heads({self.num_heads}) = {self.head_dim}. Use another "
                "num_heads.",
            )
        if self.latent_size is not None:
            self._check_latent_size(self.latent_size)
        self._check_tokens()

    def _check_latent_size(self, size: tuple[int, ...]) -> None:
        """Raise ConfigError unless latents of ``size`` can be cut into patches."""
        if len(size) != 2:
            raise self.error("latent_size", "must be two positive whole numbers: height and width.")
        for side in size:
            if side % self.patch_size:
                raise self.error(
                    "latent_size",
                    f"is not a whole number of patches: {side} % {self.patch_size} = {side % self.patch_size}. Use "
                    f"multiples of {self.patch_size}.",
                )
        if self.z_dims and size[0] != size[1]:
            raise self.error(
                "latent_size", "is not square, but a teacher's features need square latents. Drop z_dims and teacher."
            )

    def _check_tokens(self) -> None:
        """Raise ConfigError for in-context tokens or projectors that do not fit this network."""
        if self.in_context_len and not self.num_classes:
            raise self.error(
                "in_context_len",
                "needs labels, but num_classes is 0. Drop it: each block attends to the caption already.",
            )
        if self.in_context_start >= self.num_layers:
            raise self.error(
                "in_context_start", f"must be below num_layers = {self.num_layers}, because blocks are counted from 0."
            )
        if self.in_context_start and not self.in_context_len:
            raise self.error(
                "in_context_start",
                "has no effect where in_context_len is 0. Set in_context_len to the number of these tokens, or drop "
                "in_context_start.",
            )
        if self.z_dims:
            check_between("predictor.projector_dim", self.projector_dim, 1, MAX_INT64)
            check_between("predictor.encoder_depth", self.encoder_depth, 1, self.num_layers)

    def check_context_parallel(self, ranks: int) -> None:
        """Raise ConfigError unless the ranks can split heads and tokens evenly, and the loss needs only gradients."""
        if ranks > 1 and self.h_embedder:
            raise ConfigError(
                f"--context-parallel-size = {ranks} is not supported with h_embedder (MeanFlow): its time derivative "
                "needs the whole sample on one rank. Use 1."
            )
        tokens = {
            "the tokens of an image": self.num_tokens,
            "the tokens of an image and those in context": self.num_tokens + self.in_context_len,
        }
        check_shareable(ranks, {"predictor.num_heads": self.num_heads, **tokens})

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

    def resized(self, shape: Shape) -> DiTConfig:
        if len(shape) != 3 or shape[0] != self.in_channels:
            return super().resized(shape)  # type: ignore[return-value]
        is_square = shape[1:] == (self.input_size, self.input_size)
        return replace(self, latent_size=None if is_square else shape[1:])

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

    def reduced_width(self) -> DiTConfig:
        """Return the same network with at most 4 heads, of the same width, and at most 4 blocks."""
        heads, layers = min(self.num_heads, 4), min(self.num_layers, 4)
        blocks = {"num_layers": layers, "in_context_start": self.in_context_start * layers // self.num_layers}
        projectors = {"encoder_depth": min(self.encoder_depth, layers), "projector_dim": min(self.projector_dim, 256)}
        return replace(self, hidden_size=self.head_dim * heads, num_heads=heads, **blocks, **projectors)  # type: ignore[arg-type]

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
