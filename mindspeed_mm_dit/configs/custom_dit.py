"""Section ``predictor`` of model.json with ``model_id`` "custom_dit"."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.configs.limits import LARGEST, check_between
from mindspeed_mm_dit.configs.video_transformer import VideoTransformerConfig
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class CustomDiTConfig(VideoTransformerConfig):
    """The text-to-video DiT of MindSpeed-MM's tutorial "develop a new model", with its keys and defaults."""

    num_heads: int = 40
    """Number of attention heads."""
    head_dim: int = 128
    """Width of a head, even and at least 6; times ``num_heads`` it is the width D of a token."""
    text_dim: int | None = 4096
    """Width of the text encoder's states; null: no text condition and no cross-attention."""
    num_classes: int = 0
    """Number of classes; label ``num_classes`` is the unconditional class of guidance. 0: condition on text only."""
    class_dropout_prob: float = 0.1
    """Probability, in [0, 1), that a training label becomes the unconditional class; 0: there is no such class."""
    model_id: str = "custom_dit"

    eps = 1e-5
    """Epsilon of all norms, as in the tutorial; not a key of model.json."""
    network = "mindspeed_mm_dit.models.video_transformer:CustomDiT"
    affine_norms = ("norm1", "norm3")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("predictor.num_classes", self.num_classes, 0, LARGEST)
        if not (self.num_classes or self.text_dim):
            raise ConfigError(
                "predictor.num_classes = 0",
                "and text_dim = null leave the network without a condition",
                "set one of them",
            )
        if not 0.0 <= self.class_dropout_prob < 1.0:
            raise ConfigError(f"predictor.class_dropout_prob = {self.class_dropout_prob}", "must lie in [0, 1)")
