"""Section ``predictor`` of model.json with ``model_id`` "wan": Wan 2.1 and 2.2, from a text, and from an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from mindspeed_mm_dit.configs.condition import Conditions, FirstFrame, ImageTokens
from mindspeed_mm_dit.configs.limits import LARGEST, check_between
from mindspeed_mm_dit.configs.parameters import Shape
from mindspeed_mm_dit.configs.predictor import AdaptedTensor, SourceTensor
from mindspeed_mm_dit.configs.video_transformer import VideoTransformerConfig
from mindspeed_mm_dit.errors import ConfigError

MASK_CHANNELS = 4
"""Channels of the mask beside the latents of given frames: one for each frame that a latent frame encodes."""
CLIP_TOKENS = 257
"""Tokens that CLIP (ViT-H/14) makes of an image of 224 x 224 pixels."""
FRAME_DROPOUT = 0.1
"""Probability of learning a clip without its frame, if a network draws clips from a text alone too."""
OURS = ("latent_size", "expand_timesteps", "last_frame", "frame_dropout_prob", "model_id")
"""Keys that a published config.json does not have."""
_IMAGE, _EMBEDDER = "condition_embedder.image_embedder", "patch_embedding.weight"


@dataclass(frozen=True)
class WanConfig(VideoTransformerConfig):
    """Wan 2.1 and 2.2 (Wan Team 2025), with the keys of a published ``transformer/config.json``.

    The defaults are those of the 14B models from a text. A network from an image has 2 C + 4 ``in_channels`` for
    latents of C ``out_channels``, or ``expand_timesteps``.
    """

    num_attention_heads: int = 40
    """Number of attention heads."""
    attention_head_dim: int = 128
    """Width of a head, even and at least 6; times ``num_attention_heads`` it is the width D of a token."""
    text_dim: int = 4096
    """Width of the text encoder's states."""
    eps: float = 1e-6
    """Epsilon of all norms, between 0 and 1."""
    cross_attn_norm: bool = True
    """Normalise before cross-attention, as the published networks do; must be true."""
    qk_norm: Literal["rms_norm_across_heads"] = "rms_norm_across_heads"
    """Normalise queries and keys over the whole width, before they are split into heads."""
    image_dim: int | None = None
    """Width of CLIP's features of the first frame, which Wan 2.1's image-to-video attends to; null: none."""
    added_kv_proj_dim: int | None = None
    """Width of what the keys and values of the features are made from: that of a token; null without ``image_dim``."""
    pos_embed_seq_len: int | None = None
    """Number of the features of a sample, if they have learned positions (first and last frame); null: no positions."""
    expand_timesteps: bool = False
    """Tell each token its time, and give the first frame as it is, at time 0, as Wan 2.2's TI2V-5B does. A key of
    diffusers' model_index.json."""
    last_frame: bool = False
    """Give the last frame too. Our own key; no weight depends on it."""
    frame_dropout_prob: float | None = None
    """Probability that a clip is learned without its frame, from its text alone, with ``expand_timesteps``; null: 0.1
    there. Other networks always take the frame. Our own key."""
    model_id: str = "wan"

    heads_key, head_dim_key = "num_attention_heads", "attention_head_dim"
    network = "mindspeed_mm_dit.models.video_transformer:Wan"
    diffusers_class = "WanTransformer3DModel"
    affine_norms = ("norm2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cross_attn_norm:
            raise ConfigError(
                "predictor.cross_attn_norm = false",
                "all published text-to-video networks of Wan have that norm, and only those are supported",
                "set it to true",
            )
        self._check_image()

    @property
    def frame_rate(self) -> float:  # type: ignore[override]
        """Frames per second: 24 of Wan 2.2's TI2V-5B, 16 of the others, as published."""
        return 24.0 if self.expand_timesteps else 16.0

    def _check_image(self) -> None:
        """Raise ConfigError unless the settings are those of one way to begin with an image, or of none."""
        for name in ("image_dim", "pos_embed_seq_len"):
            if (value := getattr(self, name)) is not None:
                check_between(f"predictor.{name}", value, 1, LARGEST)
        if self.frame_dropout_prob is not None:
            check_between("predictor.frame_dropout_prob", self.frame_dropout_prob, 0.0, 1.0)
        wide = self.in_channels == 2 * self.out_channels + MASK_CHANNELS
        problems = {
            f"image_dim = {self.image_dim}": self.image_dim is not None and not wide,
            f"pos_embed_seq_len = {self.pos_embed_seq_len}": self.pos_embed_seq_len is not None and not self.image_dim,
            "expand_timesteps = true": self.expand_timesteps and wide,
            f"patch_size = {list(self.patch_size)}": self.expand_timesteps and self.patch_size[0] > 1,
            "last_frame = true": self.last_frame and not wide,
            f"frame_dropout_prob = {self.frame_dropout_prob}": self.frame_dropout_prob and not self.expand_timesteps,
        }
        for what, wrong in problems.items():
            if wrong:
                raise ConfigError(
                    f"predictor.{what}",
                    f"does not go with in_channels = {self.in_channels}, out_channels = {self.out_channels}"
                    + ("" if self.image_dim else ", image_dim = null"),
                    "image-to-video takes 2 C + 4 channels for latents of C; TI2V-5B has as many as the latents, and "
                    "patches of one frame",
                )
        keys = self.hidden_size if self.image_dim else None
        if self.added_kv_proj_dim != keys:
            raise ConfigError(
                f"predictor.added_kv_proj_dim = {self.added_kv_proj_dim}",
                f"must be {keys}: "
                + ("features of an image are embedded to the width of a token" if keys else "image_dim is null"),
            )

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of attention heads."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.attention_head_dim

    @property
    def latent_channels(self) -> int:
        """Channels C of a latent: those of the input without mask and latents of given frames."""
        return self.out_channels if self.in_channels == 2 * self.out_channels + MASK_CHANNELS else self.in_channels

    @property
    def mask_channels(self) -> int:
        """Channels of the mask of given frames; 0 if no frame is given."""
        return MASK_CHANNELS if self.latent_channels < self.in_channels else int(self.expand_timesteps)

    @property
    def adaptable(self) -> tuple[str, ...]:  # type: ignore[override]
        """Settings in which the source of ``adapt_weight`` may differ: it may be a network from a text."""
        of_images = ("in_channels", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len", *OURS[1:4])
        return (*VideoTransformerConfig.adaptable, *(of_images if self.mask_channels else ()))

    @property
    def conditions(self) -> Conditions:
        """The text, and for a network that begins with an image, its frames and CLIP's features."""
        shape = (self.latent_channels, *self.latent_size)
        dropout = FRAME_DROPOUT if self.frame_dropout_prob is None else self.frame_dropout_prob
        lost = dropout if self.expand_timesteps else 0.0
        frames = (FirstFrame(shape, self.mask_channels, self.last_frame, lost),) if self.mask_channels else ()
        tokens = self.pos_embed_seq_len or CLIP_TOKENS
        features = (ImageTokens(tokens, self.image_dim, self.last_frame),) if self.image_dim else ()
        return Conditions(*super().conditions, *frames, *features)

    def adapt_weight(self, name: str, offer: SourceTensor) -> AdaptedTensor | None:
        """Widen the patch embedding of a network from a text with zeros for what an image adds."""
        missing = offer.shape[1] - offer.value.shape[1] if name == _EMBEDDER else 0
        if missing != self.in_channels - self.latent_channels or not missing:
            return super().adapt_weight(name, offer)
        zeros = np.zeros((len(offer.value), missing, *offer.shape[2:]), offer.value.dtype)
        return AdaptedTensor(
            np.concatenate([offer.value, zeros], 1), f"zeros for the {missing} channels of the given frames"
        )

    @property
    def defaults_for_missing(self) -> tuple[str, ...]:
        return self.heads_key, self.head_dim_key

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return section ``predictor`` for the config.json of a diffusers folder, for the smallest latents."""
        found = {key: value for key, value in section.items() if not key.startswith("_")}
        return found | {"latent_size": found.get("patch_size", cls.patch_size)}

    def to_diffusers(self) -> dict[str, Any]:
        """Return the config.json of a WanTransformer3DModel."""
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in OURS}
        return {"_class_name": self.diffusers_class, **kept}

    def settings_of_width(self, width: int) -> dict[str, Any]:
        return {"added_kv_proj_dim": width} if self.image_dim else {}

    def is_optional(self, name: str) -> bool:
        """Return whether ``name`` belongs to CLIP's features, which a network from a text does not take."""
        return name.startswith(f"{_IMAGE}.") or any(f".attn2.{own}" in name for own in ("add_", "norm_added"))

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> Any:
        found = super().of_shapes(shapes)
        if found is None or f"{_IMAGE}.norm1.weight" not in shapes:
            return found
        positions = shapes.get(f"{_IMAGE}.pos_embed")
        return replace(
            found, image_dim=shapes[f"{_IMAGE}.norm1.weight"][0], added_kv_proj_dim=found.hidden_size,
            pos_embed_seq_len=positions and positions[1],
        )  # fmt: skip
