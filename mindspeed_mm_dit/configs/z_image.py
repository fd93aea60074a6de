"""Section ``predictor`` of model.json with ``model_id`` "z_image"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mindspeed_mm_dit.configs.joint import JointConfig, without_fixed
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.predictor import Shape, check_shareable, count_of, shape_of

_OUR_KEYS = {
    "n_layers": "num_layers", "n_refiner_layers": "num_refiner_layers", "n_heads": "num_attention_heads",
    "cap_feat_dim": "joint_attention_dim", "axes_dims": "axes_dims_rope",
}  # fmt: skip
"""Key of diffusers' config.json -> key here."""
_LONGEST = [1536, 512, 512]
"""Positions on each axis in diffusers' published tables; ours are computed for as many as needed."""

UNIT = 32
"""Texts and images are padded to multiples of this many tokens."""


@dataclass(frozen=True)
class ZImageConfig(JointConfig):
    """Z-Image (Z-Image Team 2025); the defaults are the published ones."""

    num_layers: int = 30
    """Number of blocks of image and text as one sequence."""
    num_refiner_layers: int = 2
    """Number of blocks of the image alone, and of the text alone, before them."""
    num_attention_heads: int = 30
    joint_attention_dim: int = 2560
    """Width of the text encoder's states; states at the end that are all zeros are padding."""
    axes_dims_rope: tuple[int, int, int] = (32, 48, 48)
    """Rotary channels of a head for the text position, and the row and column of a patch; even."""
    rope_theta: float = 256.0
    """Base of the frequencies of the positions."""
    model_id: str = "z_image"

    network = "mindspeed_mm_dit.models.z_image:ZImage"
    published_sampler = ("euler", 50)
    diffusers_class = "ZImageTransformer2DModel"
    data_time = 1
    token_channels = 1
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "all_patch_size": ([2],), "all_f_patch_size": ([1],), "norm_eps": (1e-5,), "qk_norm": (True,),
        "t_scale": (1000.0,), "siglip_feat_dim": (None,),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("predictor.num_refiner_layers", self.num_refiner_layers, 1, 1000)
        check_between("predictor.rope_theta", self.rope_theta, 1.0, 1e9)
        self.check_rotary_axes("axes_dims_rope", self.axes_dims_rope)

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
            ranks,
            {
                "predictor.num_attention_heads": self.num_attention_heads,
                "the padding multiple of texts and images": UNIT,
            },
        )

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = {_OUR_KEYS.get(key, key): value for key, value in super().of_diffusers(section).items()}
        heads, width = settings["num_attention_heads"], settings.pop("dim")
        rest = without_fixed(settings, {"n_kv_heads": (heads,), "axes_lens": (settings.get("axes_lens"),)})
        return {**rest, "attention_head_dim": width // heads}

    def to_diffusers(self) -> dict[str, Any]:
        diffusers_keys = {ours: key for key, ours in _OUR_KEYS.items()}
        settings = {diffusers_keys.get(key, key): value for key, value in super().to_diffusers().items()}
        settings["dim"] = self.num_attention_heads * settings.pop("attention_head_dim")
        return {**settings, "n_kv_heads": self.num_attention_heads, "axes_lens": _LONGEST}

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> ZImageConfig | None:
        """Return the architecture that ``shapes`` imply, with the published proportions of rotary axes."""
        if "cap_pad_token" not in shapes:
            return None
        D, channels = shape_of(shapes, "all_x_embedder.2-1.weight", 2)
        (head_dim,) = shape_of(shapes, "layers.0.attention.norm_q.weight", 1)
        return cls(
            num_layers=count_of(shapes, "layers"), num_refiner_layers=count_of(shapes, "noise_refiner"),
            num_attention_heads=D // head_dim, attention_head_dim=head_dim, in_channels=channels // 4,
            joint_attention_dim=shape_of(shapes, "cap_embedder.1.weight", 2)[1],
            axes_dims_rope=cls.published_rotary_axes(head_dim),  # type: ignore[arg-type]
        )  # fmt: skip
