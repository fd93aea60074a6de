"""Section ``predictor`` of model.json with ``model_id`` "qwen_image"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mindspeed_mm_dit.configs.joint import JointConfig, without_fixed
from mindspeed_mm_dit.configs.parameters import Shape
from mindspeed_mm_dit.configs.predictor import count_of, shape_of


@dataclass(frozen=True)
class QwenImageConfig(JointConfig):
    """Qwen-Image (Qwen Team 2025); the defaults are the published ones."""

    num_layers: int = 60
    """Number of blocks."""
    joint_attention_dim: int = 3584
    """Width of the text encoder's states; a state that is all zeros is padding, which nothing attends to."""
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    """Rotary channels of a head for the image index, and the row and column of a patch; even."""
    model_id: str = "qwen_image"

    network = "mindspeed_mm_dit.models.qwen_image:QwenImage"
    published_sampler = ("euler", 50)
    diffusers_class = "QwenImageTransformer2DModel"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "patch_size": (2,), "guidance_embeds": (False,), "zero_cond_t": (False,), "use_layer3d_rope": (False,),
        "use_additional_t_cond": (False,), "pooled_projection_dim": (None, 768),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rotary_axes("axes_dims_rope", self.axes_dims_rope)

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().of_diffusers(section)
        return without_fixed(settings, {"out_channels": (settings["in_channels"],)})

    def to_diffusers(self) -> dict[str, Any]:
        return super().to_diffusers() | {"out_channels": self.in_channels}

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> QwenImageConfig | None:
        """Return the architecture that ``shapes`` imply, with the published proportions of rotary axes."""
        if "transformer_blocks.0.txt_mod.1.weight" not in shapes:
            return None
        D, channels = shape_of(shapes, "img_in.weight", 2)
        (head_dim,) = shape_of(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
        return cls(
            num_layers=count_of(shapes, "transformer_blocks"), num_attention_heads=D // head_dim,
            attention_head_dim=head_dim, joint_attention_dim=shape_of(shapes, "txt_in.weight", 2)[1],
            in_channels=channels // 4, axes_dims_rope=cls.published_rotary_axes(head_dim),  # type: ignore[arg-type]
        )  # fmt: skip
