"""Section ``predictor`` of model.json with ``model_id`` "qwen_image"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mindspeed_mm_dit.configs.joint import JointConfig


@dataclass(frozen=True)
class QwenImageConfig(JointConfig):
    """Qwen-Image (Qwen Team 2025); the defaults are the published ones."""

    num_layers: int = 60
    """Number of blocks."""
    joint_attention_dim: int = 3584
    """Width of the text encoder's states; a state that is all zeros is padding, which nothing attends to."""
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    """Channels of a head that turn with the number of the image, and the row and the column of a patch; even."""
    model_id: str = "qwen_image"
    """Names this kind of network."""

    network = "mindspeed_mm_dit.models.qwen_image:QwenImage"
    diffusers_class = "QwenImageTransformer2DModel"
    fixed: ClassVar = {
        "patch_size": (2,), "guidance_embeds": (False,), "zero_cond_t": (False,), "use_layer3d_rope": (False,),
        "use_additional_t_cond": (False,),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_turned("axes_dims_rope", self.axes_dims_rope)

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        found = super().of_diffusers(section)
        return {key: value for key, value in found.items() if key != "out_channels" or value != found["in_channels"]}
