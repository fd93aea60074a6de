"""DiT on paper (Peebles & Xie 2023): its settings, parameters, arithmetic and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import ClassLabel
from mindspeed_mm_dit.configs.limits import LARGEST, divisors, require_positive
from mindspeed_mm_dit.configs.predictor import (
    Begun,
    Initial,
    Kept,
    Normal,
    Offer,
    Parameter,
    Parameters,
    PredictorConfig,
    Shape,
    count_of,
    linear,
    shape_of,
)
from mindspeed_mm_dit.configs.resampling import resized_input, resized_output
from mindspeed_mm_dit.errors import ConfigError

FREQUENCY_WIDTH = 256
"""Width of the sinusoidal timestep code that enters the timestep MLP."""
_NORM_VECTORS = 4
"""Of width D that a block keeps of each token, into and out of its two norms: x and its normalised form, twice."""
_OTHER_VECTORS = 8
"""The same beside the MLP's: modulated twice; q, k, v; attention; both branches' results."""


@dataclass(frozen=True)
class DiTConfig(PredictorConfig):
    """Section ``predictor`` with ``model_id`` "dit"."""

    input_size: int
    """Height and width of the (square) latents, in latent pixels."""
    num_classes: int
    """Number of classes; label ``num_classes`` itself is the null class of guidance."""
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
    """Width of the MLP's hidden layer over ``hidden_size``."""
    class_dropout_prob: float = 0.1
    """Probability that a training label becomes the null class; 0 leaves the null class out."""
    learn_sigma: bool = True
    """Predict the variance too: twice the output channels."""
    model_id: str = "dit"
    """Key in PREDICTOR_MODEL_MAPPINGS."""

    adaptable = ("num_classes", "class_dropout_prob", "input_size", "patch_size", "in_channels", "learn_sigma")

    def __post_init__(self) -> None:
        require_positive(self, "predictor", "input_size", "num_classes", "in_channels", "patch_size", "hidden_size",
                          "num_layers", "num_heads")  # fmt: skip
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
        if not 1 <= self.hidden_size * self.mlp_ratio <= LARGEST:
            raise ConfigError(
                f"predictor.mlp_ratio = {self.mlp_ratio}",
                f"leaves the MLP's hidden layer without a width: hidden_size({self.hidden_size}) * mlp_ratio must be "
                "at least 1, and no more than a tensor can have",
                "the published DiT has 4.0",
            )
        if not 0.0 <= self.class_dropout_prob < 1.0:
            raise ConfigError(f"predictor.class_dropout_prob = {self.class_dropout_prob}", "must lie in [0, 1)")

    @property
    def out_channels(self) -> int:
        """Channels of the network's output."""
        return self.in_channels * 2 if self.learn_sigma else self.in_channels

    @property
    def num_tokens(self) -> int:
        """Sequence length N."""
        return (self.input_size // self.patch_size) ** 2

    @property
    def num_embeddings(self) -> int:
        """Rows of the label table: the classes and, if labels are ever dropped, the null class."""
        return self.num_classes + (1 if self.class_dropout_prob > 0 else 0)

    @property
    def condition(self) -> ClassLabel:
        """A class label."""
        return ClassLabel(self.num_classes, self.class_dropout_prob)

    @property
    def latent_shape(self) -> Shape:
        """(C, H, W) of a latent."""
        return (self.in_channels, self.input_size, self.input_size)

    @property
    def mlp_hidden_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return int(self.hidden_size * self.mlp_ratio)

    def parameters(self) -> Parameters:
        """Return the parameters under the published names; adaLN-Zero makes every block the identity at the start."""
        D, C, P = self.hidden_size, self.in_channels, self.patch_size
        before = {
            "pos_embed": Parameter((1, self.num_tokens, D), Initial.SINCOS_2D, trained=False),
            **linear("x_embedder.proj", D, C, P, P),
            **linear("t_embedder.mlp.0", D, FREQUENCY_WIDTH, initial=Normal(0.02)),
            **linear("t_embedder.mlp.2", D, D, initial=Normal(0.02)),
            "y_embedder.embedding_table.weight": Parameter((self.num_embeddings, D), Normal(0.02)),
        }
        block = {
            **linear("attn.qkv", 3 * D, D),
            **linear("attn.proj", D, D),
            **linear("mlp.fc1", self.mlp_hidden_size, D),
            **linear("mlp.fc2", D, self.mlp_hidden_size),
            **linear("adaLN_modulation.1", 6 * D, D, initial=Initial.ZEROS),
        }
        after = {
            **linear("final_layer.linear", P * P * self.out_channels, D, initial=Initial.ZEROS),
            **linear("final_layer.adaLN_modulation.1", 2 * D, D, initial=Initial.ZEROS),
        }
        return Parameters(before, block, self.num_layers, after)

    def multiply_adds(self) -> int:
        """Multiply-adds of one image in one forward pass, as published."""
        D, N, patch = self.hidden_size, self.num_tokens, self.patch_size**2
        block = N * (4 * D * D + 2 * D * self.mlp_hidden_size) + 2 * N * N * D + 6 * D * D
        ends = N * patch * D * (self.in_channels + self.out_channels) + 2 * D * D
        return self.num_layers * block + ends + FREQUENCY_WIDTH * D + D * D

    def kept_by_block(self) -> Kept:
        """What one block keeps of an image for backward."""
        return Kept(
            norm=_NORM_VECTORS * self.block_input + (2 + 6 + 2) * self.hidden_size,  # silu, six modulations, 1 + scale
            other=(_OTHER_VECTORS + 2 * self.mlp_ratio) * self.block_input,
            full=self.num_tokens * (4 + self.num_heads),  # of the norms; log-sum-exp of attention
        )

    def kept_by_ends(self) -> Kept:
        """What embedders and last layer keep of an image for backward."""
        return Kept(norm=2 * self.block_input, other=self.block_input)

    @property
    def block_input(self) -> int:
        """Elements of an image that go into a block: N D."""
        return self.num_tokens * self.hidden_size

    @property
    def widest(self) -> int:
        """Elements of an image in the MLP's hidden layer."""
        return int(self.block_input * self.mlp_ratio)

    def begun_from(self, name: str, offer: Offer) -> Begun | None:
        """Return what ``name`` begins as, made of a DiT of other classes, input size, patches, channels or variance."""
        rule = _RULES.get(name)
        if rule is None:
            return super().begun_from(name, offer)
        assert isinstance(offer.there, DiTConfig)
        return rule(self, offer.there, offer) if offer.there.hidden_size == self.hidden_size else None

    def settings_of_size(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings that make a DiT large, each with the values that DiT-XL/2 has."""
        return {
            "hidden_size": {"hidden_size": 1152, "num_heads": 16},
            "num_layers": {"num_layers": 28},
            "num_classes": {"num_classes": 1000},
            "input_size": {"input_size": 16 * self.patch_size},
            "mlp_ratio": {"mlp_ratio": min(4.0, self.mlp_ratio)},
            "in_channels": {"in_channels": 4},
        }

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> DiTConfig | None:
        """Return the architecture that ``shapes`` tell, with one head: their number shows in none of them.

        Raises CheckpointError for a DiT with a tensor missing that decides the sizes.
        """
        if not any(name.startswith("x_embedder.proj.") for name in shapes):
            return None
        D, C, P, _ = shape_of(shapes, "x_embedder.proj.weight", 4)
        tokens, rows = (
            shape_of(shapes, "pos_embed", 3)[1],
            shape_of(shapes, "y_embedder.embedding_table.weight", 2)[0],
        )
        outputs = shape_of(shapes, "final_layer.linear.weight", 2)[0]
        return cls(
            input_size=P * math.isqrt(tokens), num_classes=rows - 1, in_channels=C, patch_size=P, hidden_size=D,
            num_layers=count_of(shapes, "blocks"), num_heads=1,
            mlp_ratio=shape_of(shapes, "blocks.0.mlp.fc1.weight", 2)[0] / D, learn_sigma=outputs == 2 * C * P * P,
        )  # fmt: skip


# --- weights of a DiT of other classes, input size, patches, channels or variance ---------------------------------


def _positions(here: DiTConfig, there: DiTConfig, offer: Offer) -> Begun:
    if offer.value.shape == offer.shape:
        return Begun(offer.value)
    side = here.input_size // here.patch_size
    return Begun(offer.draw(), f"computed anew for {side} x {side} patches")


def _class_table(here: DiTConfig, there: DiTConfig, offer: Offer) -> Begun:
    """Keep the rows of the classes that both know, and the null class."""
    if offer.value.shape == offer.shape and list(offer.labels.items()) == [(i, i) for i in range(offer.shape[0])]:
        return Begun(offer.value)
    table = offer.draw()
    for label, other in offer.labels.items():
        table[label] = offer.value[other]
    kept = sum(label < here.num_classes for label in offer.labels)
    done = [f"{kept} of {here.num_classes} classes kept"] if kept else []
    done += [f"{here.num_classes - kept} of {here.num_classes} classes drawn anew"] if kept < here.num_classes else []
    if here.condition.has_null:
        done.append("the null class " + ("kept" if here.num_classes in offer.labels else "drawn anew"))
    return Begun(table, ", ".join(done))


def _patch_embedding(here: DiTConfig, there: DiTConfig, offer: Offer) -> Begun:
    """Resample patches; a grey picture is embedded as its three equal colours, and these as it."""
    value = offer.value  # (D, C, P, P)
    channels = (there.in_channels, here.in_channels)
    if _are_foreign(*channels):
        return Begun(offer.draw(), _FOREIGN.format(*channels))
    if channels == (1, 3):
        value = np.repeat(value / 3, 3, axis=1)
    elif channels == (3, 1):
        value = value.sum(axis=1, keepdims=True)
    if there.patch_size != here.patch_size:
        value = resized_input(value, here.patch_size)
    return Begun(value, _resampling(here, there))


def _last_layer(here: DiTConfig, there: DiTConfig, offer: Offer) -> Begun:
    """Resample patches, give each colour what grey has or grey their mean, and drop or add the variance."""
    channels = (there.in_channels, here.in_channels)
    if _are_foreign(*channels):
        return Begun(offer.draw(), _FOREIGN.format(*channels))
    P, parts = there.patch_size, 2 if there.learn_sigma else 1
    value = offer.value.reshape(P, P, parts, there.in_channels, -1)  # (P, P, prediction | variance, C, D or 1)
    done = [_resampling(here, there)]
    if there.learn_sigma and not here.learn_sigma:
        value, done = value[:, :, :1], [*done, "the variance dropped"]
    if here.learn_sigma and not there.learn_sigma:
        value, done = np.concatenate([value, np.zeros_like(value)], 2), [*done, "a variance added, of zeros"]
    if channels == (1, 3):
        value = np.repeat(value, 3, axis=3)
    elif channels == (3, 1):
        value = value.mean(axis=3, keepdims=True)
    if there.patch_size != here.patch_size:
        value = resized_output(value, here.patch_size)
    return Begun(value.reshape(offer.shape), ", ".join(filter(None, done)))


_FOREIGN = "drawn anew: latents of {0} channels there and of {1} here have nothing in common"


def _are_foreign(there: int, here: int) -> bool:
    """Return whether channels cannot be translated: all but those of grey and colour pictures mean something else."""
    return there != here and {there, here} != {1, 3}


def _resampling(here: DiTConfig, there: DiTConfig) -> str:
    done = []
    if there.in_channels != here.in_channels:
        done.append("from grey to colour" if there.in_channels == 1 else "from colour to grey")
    if there.patch_size != here.patch_size:
        done.append(f"resampled from patches of {there.patch_size} to {here.patch_size}")
    return ", ".join(done)


_RULES: dict[str, Callable[[DiTConfig, DiTConfig, Offer], Begun]] = {
    "pos_embed": _positions,
    "x_embedder.proj.weight": _patch_embedding,
    "y_embedder.embedding_table.weight": _class_table,
    "final_layer.linear.weight": _last_layer,
    "final_layer.linear.bias": _last_layer,
}
"""Tensors that are not taken as they are."""
