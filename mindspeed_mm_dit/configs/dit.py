"""A DiT (Peebles & Xie 2023): reduced copies, adapting weights of another one, and its config from tensor shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm_dit.configs.dit_adapting import RULES
from mindspeed_mm_dit.configs.dit_settings import DiTSettings
from mindspeed_mm_dit.configs.parameters import Shape
from mindspeed_mm_dit.configs.predictor import AdaptedTensor, SourceTensor, check_shareable, count_of, shape_of
from mindspeed_mm_dit.errors import ConfigError

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
