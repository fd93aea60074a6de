"""Section ``predictor`` of model.json with ``model_id`` "wan": Wan 2.1 and 2.2, text-to-video and image-to-video."""

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
"""Channels of the mask of conditioning frames: one for each frame that a latent frame encodes."""
CLIP_TOKENS = 257
"""Tokens of CLIP (ViT-H/14) for an image of 224 x 224 pixels."""
FRAME_DROPOUT = 0.1
"""Default probability of training without the first frame, for networks that also generate from text alone."""
OURS = ("latent_size", "expand_timesteps", "last_frame", "frame_dropout_prob", "model_id")
"""Keys that a published config.json does not have."""
_IMAGE, _EMBEDDER = "condition_embedder.image_embedder", "patch_embedding.weight"


@dataclass(frozen=True)
class WanConfig(VideoTransformerConfig):
    """Wan 2.1 and 2.2 (Wan Team 2025), with the keys of a published ``transformer/config.json``.

    The defaults are those of the 14B text-to-video models. An image-to-video network has 2 C + 4 ``in_channels`` for
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
    """Input width of the keys and values of these features: that of a token; null without ``image_dim``."""
    pos_embed_seq_len: int | None = None
    """Number of features per sample, if they have learned positions (first and last frame); null: no positions."""
    expand_timesteps: bool = False
    """Embed a timestep per token, with the clean first frame at time 0, as Wan 2.2's TI2V-5B does. A key of
    diffusers' model_index.json."""
    last_frame: bool = False
    """Condition on the last frame too. Our own key; no weight depends on it."""
    frame_dropout_prob: float | None = None
    """With ``expand_timesteps``: probability of training on a clip without its first frame, from text alone; null: 0.1.
    Other networks always take the frame. Our own key."""
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
        """Frames per second as published: 24 for Wan 2.2's TI2V-5B, 16 for the others."""
        return 24.0 if self.expand_timesteps else 16.0

    def _check_image(self) -> None:
        """Raise ConfigError unless the settings are those of one kind of image-to-video network, or of none."""
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
        """Channels C of a latent: those of the input without mask and latents of conditioning frames."""
        return self.out_channels if self.in_channels == 2 * self.out_channels + MASK_CHANNELS else self.in_channels

    @property
    def mask_channels(self) -> int:
        """Channels of the mask of conditioning frames; 0 for text-to-video."""
        return MASK_CHANNELS if self.latent_channels < self.in_channels else int(self.expand_timesteps)

    @property
    def adaptable(self) -> tuple[str, ...]:  # type: ignore[override]
        """Settings that may differ in ``adapt_weight``, whose source can be a text-to-video network."""
        of_images = ("in_channels", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len", *OURS[1:4])
        return (*VideoTransformerConfig.adaptable, *(of_images if self.mask_channels else ()))

    @property
    def conditions(self) -> Conditions:
        """The text and, for image-to-video, the conditioning frames and CLIP's features of them."""
        shape = (self.latent_channels, *self.latent_size)
        dropout = FRAME_DROPOUT if self.frame_dropout_prob is None else self.frame_dropout_prob
        frame_dropout = dropout if self.expand_timesteps else 0.0
        frames = (FirstFrame(shape, self.mask_channels, self.last_frame, frame_dropout),) if self.mask_channels else ()
        tokens = self.pos_embed_seq_len or CLIP_TOKENS
        features = (ImageTokens(tokens, self.image_dim, self.last_frame),) if self.image_dim else ()
        return Conditions(*super().conditions, *frames, *features)

    def adapt_weight(self, name: str, source: SourceTensor) -> AdaptedTensor | None:
        """Widen the patch embedding of a text-to-video network with zeros for the channels of an image."""
        missing = source.shape[1] - source.value.shape[1] if name == _EMBEDDER else 0
        if missing != self.in_channels - self.latent_channels or not missing:
            return super().adapt_weight(name, source)
        zeros = np.zeros((len(source.value), missing, *source.shape[2:]), source.value.dtype)
        return AdaptedTensor(
            np.concatenate([source.value, zeros], 1), f"zeros for the {missing} channels of the conditioning frames"
        )

    @property
    def defaults_for_missing(self) -> tuple[str, ...]:
        return self.heads_key, self.head_dim_key

    @classmethod
    def of_diffusers(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return section ``predictor`` for the config.json of a diffusers folder, for the smallest latents."""
        settings = {key: value for key, value in section.items() if not key.startswith("_")}
        return settings | {"latent_size": settings.get("patch_size", cls.patch_size)}

    def to_diffusers(self) -> dict[str, Any]:
        """Return the config.json of a WanTransformer3DModel."""
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in OURS}
        return {"_class_name": self.diffusers_class, **settings}

    def settings_of_width(self, width: int) -> dict[str, Any]:
        return {"added_kv_proj_dim": width} if self.image_dim else {}

    def is_optional(self, name: str) -> bool:
        """Return whether ``name`` belongs to CLIP's features, which a text-to-video network lacks."""
        return name.startswith(f"{_IMAGE}.") or any(f".attn2.{part}" in name for part in ("add_", "norm_added"))

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> Any:
        config = super().of_shapes(shapes)
        if config is None or f"{_IMAGE}.norm1.weight" not in shapes:
            return config
        positions = shapes.get(f"{_IMAGE}.pos_embed")
        return replace(
            config, image_dim=shapes[f"{_IMAGE}.norm1.weight"][0], added_kv_proj_dim=config.hidden_size,
            pos_embed_seq_len=positions and positions[1],
        )  # fmt: skip
