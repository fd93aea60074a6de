"""The settings of a DiT: those of Peebles & Xie 2023, and the options of later recipes.

- LightningDiT (Yao & Wang 2025): ``qk_norm``, ``rms_norm``, ``swiglu``, ``rope`` and ``wo_shift``.
- JiT (Li & He 2025): ``bottleneck_dim`` and the in-context tokens.
- PixArt-alpha (Chen et al. 2023): ``text_dim``, cross-attention of each block to the states of a caption.
- Stable Diffusion 3 (Esser et al. 2024): ``pooled_dim``, a vector of the whole caption added to the timestep.
- REPA (Yu et al. 2024): ``z_dims``, projectors trained to predict a teacher's features.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from mindspeed_mm_dit.configs.condition import ClassLabel, Condition, Conditions, PooledText, TextStates
from mindspeed_mm_dit.configs.limits import DEEP, LARGEST, MOST_LAYERS, check_between, divisors, require_positive
from mindspeed_mm_dit.configs.parameters import Shape
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.errors import ConfigError

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
