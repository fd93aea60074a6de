"""Parameters, arithmetic and memory of a DiT (Peebles & Xie 2023), with the options of ``dit_settings.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm_dit.configs.cross_attention import attention, kept_of_text, multiply_adds_to_text, two_layers
from mindspeed_mm_dit.configs.dit_adapting import RULES
from mindspeed_mm_dit.configs.dit_settings import DiTSettings
from mindspeed_mm_dit.configs.predictor import (
    Begun,
    Initial,
    Kept,
    Normal,
    Offer,
    Parameter,
    Parameters,
    Shape,
    check_shareable,
    count_of,
    linear,
    shape_of,
)
from mindspeed_mm_dit.errors import ConfigError

FREQUENCY_WIDTH = 256
"""Width of the sinusoidal timestep embedding that enters the timestep MLP."""
_TABLE = "y_embedder.embedding_table.weight"
_NORM_VECTORS = 4
"""Vectors of width D per token that a block keeps for its two norms: x and its normalised form, twice."""
_OTHER_VECTORS = 8
"""Other such vectors, without the MLP's: modulated twice; q, k, v; attention; both branches' results."""


@dataclass(frozen=True)
class DiTConfig(DiTSettings):
    """Section ``predictor`` with ``model_id`` "dit"."""

    def parameters(self) -> Parameters:
        """Return the parameters under the published names; with adaLN-Zero every block starts as the identity."""
        D, P, M = self.hidden_size, self.patch_size, self.num_modulations
        before = {
            "pos_embed": Parameter((1, self.num_positions, D), Initial.SINCOS_2D, trained=False),
            **self._positions_in_context(),
            **self._patch_embedding(),
            **self._times_embedding(),
            **self._condition_embedding(),
        }
        block = {
            **self._norm("norm1"),
            **linear("attn.qkv", 3 * D, D, matrices=3),
            **linear("attn.proj", D, D),
            **self._head_norms(),
            **self._attention_to_text(),
            **self._norm("norm2"),
            **self._mlp(),
            **linear("adaLN_modulation.1", M * D, D, initial=Initial.ZEROS, matrices=M),
        }
        after = {
            **self._projectors(),
            **self._norm("final_layer.norm_final"),
            **linear("final_layer.linear", P * P * self.out_channels, D, initial=Initial.ZEROS, matrices=0),
            **linear("final_layer.adaLN_modulation.1", 2 * D, D, initial=Initial.ZEROS, matrices=2),
        }
        return Parameters(before, block, self.num_layers, after)

    def _projectors(self) -> dict[str, Parameter]:
        D, P, found = self.hidden_size, self.projector_dim, dict[str, Parameter]()
        for number, width in enumerate(self.z_dims):
            for place, (outputs, inputs) in zip((0, 2, 4), ((P, D), (P, P), (width, P))):
                found |= linear(f"projectors.{number}.{place}", outputs, inputs)
        return found

    def _times_embedding(self) -> dict[str, Parameter]:
        D, found = self.hidden_size, dict[str, Parameter]()
        for name in ("t_embedder", "h_embedder")[: self.times_told]:
            found |= linear(f"{name}.mlp.0", D, FREQUENCY_WIDTH, initial=Normal(0.02))
            found |= linear(f"{name}.mlp.2", D, D, initial=Normal(0.02))
        return found

    def _condition_embedding(self) -> dict[str, Parameter]:
        D, found = self.hidden_size, dict[str, Parameter]()
        if self.num_classes:
            found[_TABLE] = Parameter((self.num_embeddings, D), Normal(0.02))
        for name, width in (("text_embedder", self.text_dim), ("pooled_embedder", self.pooled_dim)):
            found |= two_layers(name, width, D, Initial.XAVIER_UNIFORM) if width else {}
        return found

    def _attention_to_text(self) -> dict[str, Parameter]:
        """Return cross-attention, zero at the start, so that adding captions does not change a DiT of classes."""
        D = self.hidden_size
        found = attention("cross_attn", D) | linear("cross_attn.to_out.0", D, D, initial=Initial.ZEROS)
        return found if self.text_dim else {}

    def _positions_in_context(self) -> dict[str, Parameter]:
        shape = (1, self.in_context_len, self.hidden_size)
        return {"in_context_posemb": Parameter(shape, Normal(0.02))} if self.in_context_len else {}

    def _patch_embedding(self) -> dict[str, Parameter]:
        D, C, P = self.hidden_size, self.in_channels, self.patch_size
        if self.bottleneck_dim is None:
            return linear("x_embedder.proj", D, C, P, P)
        narrow = Parameter((self.bottleneck_dim, C, P, P), Initial.XAVIER_UNIFORM)
        return {"x_embedder.proj1.weight": narrow, **linear("x_embedder.proj2", D, self.bottleneck_dim, 1, 1)}

    def _norm(self, name: str) -> dict[str, Parameter]:
        """Return the parameters of a norm over the width of a token; a LayerNorm has none."""
        return {f"{name}.weight": Parameter((self.hidden_size,), Initial.ONES)} if self.rms_norm else {}

    def _head_norms(self) -> dict[str, Parameter]:
        """Return the parameters of the norms of queries and keys, over the width of a head."""
        found: dict[str, Parameter] = {}
        for name in ("attn.q_norm", "attn.k_norm") if self.qk_norm else ():
            found[f"{name}.weight"] = Parameter((self.head_dim,), Initial.ONES)
            if not self.rms_norm:
                found[f"{name}.bias"] = Parameter((self.head_dim,))
        return found

    def check_context_parallel(self, ranks: int) -> None:
        """Raise ConfigError unless the ranks can split heads and tokens evenly, and the loss needs only gradients."""
        if ranks > 1 and self.h_embedder:
            reason = "MeanFlow differentiates the network along intervals of time, which needs the sample on one rank"
            raise ConfigError(f"--context-parallel-size = {ranks}", reason, "use 1")
        tokens = {"tokens of an image": self.num_tokens, "tokens of an image and in context": self._most_tokens}
        check_shareable(ranks, {"predictor.num_heads": self.num_heads, **tokens})

    def narrowed(self) -> DiTConfig:
        """Return the same network with at most 4 heads, of the same width, and at most 4 blocks."""
        heads, layers = min(self.num_heads, 4), min(self.num_layers, 4)
        start = self.in_context_start * layers // self.num_layers
        return replace(
            self, hidden_size=self.head_dim * heads, num_heads=heads, num_layers=layers, in_context_start=start,
            encoder_depth=min(self.encoder_depth, layers), projector_dim=min(self.projector_dim, 256),
        )  # fmt: skip

    def _mlp(self) -> dict[str, Parameter]:
        D, hidden = self.hidden_size, self.mlp_hidden_size
        if self.swiglu:
            return {**linear("mlp.w12", 2 * hidden, D, matrices=2), **linear("mlp.w3", D, hidden)}
        return {**linear("mlp.fc1", hidden, D), **linear("mlp.fc2", D, hidden)}

    def multiply_adds(self) -> int:
        D, N, patch = self.hidden_size, self.num_tokens, self.patch_size**2
        blocks = sum(self._multiply_adds_of_block(self.tokens_of_block(i)) for i in range(self.num_layers))
        embedding = patch * self.in_channels * (self.bottleneck_dim or D) + (self.bottleneck_dim or 0) * D
        ends = N * (embedding + patch * D * self.out_channels) + 2 * D * D
        for tokens, width in ((self.text_length, self.text_dim), (1, self.pooled_dim)):
            ends += tokens * (width + D) * D if width else 0
        ends += N * sum(self.projector_dim * (D + self.projector_dim + width) for width in self.z_dims)
        return blocks + ends + self.times_told * (FREQUENCY_WIDTH * D + D * D)

    def _multiply_adds_of_block(self, N: int) -> int:
        D, matrices = self.hidden_size, 3 if self.swiglu else 2
        products = N * (4 * D * D + matrices * D * self.mlp_hidden_size)
        products += multiply_adds_to_text(N, self.text_length, D) if self.text_dim else 0
        return products + 2 * N * N * D + self.num_modulations * D * D

    def kept_by_block(self) -> Kept:
        """Elements that one block keeps of an image for backward; an overestimate before the in-context tokens join."""
        norms = _NORM_VECTORS + (2 + 2 * self.qk_norm) * self.rms_norm  # RMSNorm: the input of its weight
        apart = 2 * (self.qk_norm or self.rope)  # queries and keys as tensors of their own; the values keep qkv alive
        modulations = (2 + self.num_modulations + 2) * self.hidden_size  # silu, six modulations, 1 + scale
        to_text = kept_of_text(self._most_tokens, self.text_length, self.hidden_size, self.num_heads)
        to_text = to_text if self.text_dim else Kept()
        asking = self.block_input if self.text_dim else 0  # the input of cross-attention
        return Kept(
            norm=norms * self.block_input + modulations,
            other=(_OTHER_VECTORS + apart) * self.block_input + self._kept_by_mlp() + to_text.other + asking,
            full=self._most_tokens * (4 + self.num_heads) + to_text.full,  # of the norms; log-sum-exp of attention
        )

    def _kept_by_mlp(self) -> float:
        """Elements that the MLP keeps: before and after GELU; with SwiGLU both halves, silu of one, and the product."""
        if self.swiglu:
            return 4 * self._most_tokens * self.mlp_hidden_size
        return 2 * self.mlp_ratio * self.block_input

    def kept_by_ends(self) -> Kept:
        ends, D = self.num_tokens * self.hidden_size, self.hidden_size
        of_text = self.text_length * (self.text_dim + 3 * D) if self.text_dim else 0
        of_pooled = self.pooled_dim + 2 * D if self.pooled_dim else 0
        bottleneck = self.num_tokens * (self.bottleneck_dim or 0)
        projected = self.num_tokens * sum(4 * self.projector_dim + 2 * width for width in self.z_dims)
        return Kept(norm=2 * ends, other=ends + bottleneck + of_text + of_pooled + projected)

    @property
    def _most_tokens(self) -> int:
        return self.tokens_of_block(self.num_layers - 1)

    @property
    def block_input(self) -> int:
        """Elements of an image that enter a block, including in-context tokens: N D."""
        return self._most_tokens * self.hidden_size

    @property
    def widest(self) -> int:
        return self._most_tokens * 2 * self.mlp_hidden_size if self.swiglu else int(self.block_input * self.mlp_ratio)

    def begun_from(self, name: str, offer: Offer) -> Begun | None:
        """Return the initial ``name``, adapted from a DiT of other classes, size, patches, channels or variance."""
        rule = RULES.get(name)
        if rule is None:
            return super().begun_from(name, offer)
        assert isinstance(offer.there, DiTConfig)
        return rule(self, offer.there, offer) if offer.there.hidden_size == self.hidden_size else None

    def may_lack(self, name: str) -> bool:
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
        """Return the architecture that ``shapes`` imply; settings that no shape shows get a value that fits.

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
