"""Section ``predictor`` of model.json with ``model_id`` "z_image"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.predictor import check_shareable

_OUR_KEYS = {
    "n_layers": "num_layers", "n_refiner_layers": "num_refiner_layers", "n_heads": "num_attention_heads",
    "cap_feat_dim": "joint_attention_dim", "axes_dims": "axes_dims_rope",
}  # fmt: skip
"""Key of diffusers' config.json -> key here."""

UNIT = 32
"""Tokens that texts and images are multiples of."""


@dataclass(frozen=True)
class ZImageConfig(JointConfig):
    """Z-Image (Z-Image Team 2025); the defaults are the published ones."""

    num_layers: int = 30
    """Number of blocks of image and text as one sequence."""
    num_refiner_layers: int = 2
    """Number of blocks of the image alone, and of the text alone, before them."""
    num_attention_heads: int = 30
    """Number of attention heads."""
    joint_attention_dim: int = 2560
    """Width of the text encoder's states; states at the end that are all zeros are padding."""
    axes_dims_rope: tuple[int, int, int] = (32, 48, 48)
    """Channels of a head that turn with the place in the text, and the row and the column of a patch; even."""
    rope_theta: float = 256.0
    """Base of the frequencies of the positions."""
    model_id: str = "z_image"
    """Names this kind of network."""

    network = "mindspeed_mm_dit.models.z_image:ZImage"
    diffusers_class = "ZImageTransformer2DModel"
    data_time = 1
    token_channels = 1
    fixed: ClassVar = {
        "all_patch_size": ([2],), "all_f_patch_size": ([1],), "norm_eps": (1e-5,), "qk_norm": (True,),
        "t_scale": (1000.0,), "siglip_feat_dim": (None,),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("predictor.num_refiner_layers", self.num_refiner_layers, 1, 1000)
        check_between("predictor.rope_theta", self.rope_theta, 1.0, 1e9)
        self.check_turned("axes_dims_rope", self.axes_dims_rope)

    @property
    def time_width(self) -> int:
        """Width of an embedded time."""
        return min(self.hidden_size, 256)

    @property
    def mlp_width(self) -> int:
        """Width of an MLP's hidden layer."""
        return int(self.hidden_size / 3 * 8)

    def check_context_parallel(self, ranks: int) -> None:
        check_shareable(
            ranks, {"predictor.num_attention_heads": self.num_attention_heads, "the unit of texts and images": UNIT}
        )

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        found = {_OUR_KEYS.get(key, key): value for key, value in super().of_diffusers(section).items()}
        heads, width = found["num_attention_heads"], found.pop("dim")
        repeated = {
            "n_kv_heads": heads,
            "axes_lens": found.get("axes_lens"),
        }  # (tables are as long as they need be here)
        rest = {key: value for key, value in found.items() if repeated.get(key, object()) != value}
        return {**rest, "attention_head_dim": width // heads}
