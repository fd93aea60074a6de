"""Section ``predictor`` of model.json with ``model_id`` "flux"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mindspeed_mm_dit.configs.condition import Conditions
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.limits import MOST_LAYERS, check_between, require_positive

GUIDANCE, MOST_EMBEDDED_GUIDANCE = 3.5, 100.0
"""The strength of guidance that diffusers trains and samples distilled networks with, and the largest."""


@dataclass(frozen=True)
class FluxConfig(JointConfig):
    """FLUX.1 (Black Forest Labs 2024); the defaults are those of FLUX.1-schnell."""

    num_single_layers: int = 38
    """Number of blocks after them in which image and text share one set of weights."""
    pooled_projection_dim: int = 768
    """Width of the pooled vector of the text, from the second text encoder."""
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    """Channels of a head that turn with a constant 0, the row and the column of a patch; even."""
    guidance_embeds: bool = False
    """Take the strength of guidance as an input, as networks that are distilled from guided ones do (FLUX.1-dev)."""
    guidance: float = GUIDANCE
    """With ``guidance_embeds``: that strength, in training and sampling, 0 to 100."""
    model_id: str = "flux"
    """Names this kind of network."""

    network = "mindspeed_mm_dit.models.flux:Flux"
    diffusers_class = "FluxTransformer2DModel"
    adaptable = (*JointConfig.adaptable, "guidance")  # type: ignore[assignment]
    fixed: ClassVar = {"patch_size": (1,), "out_channels": (None,)}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "predictor", "pooled_projection_dim")
        check_between("predictor.num_single_layers", self.num_single_layers, 1, MOST_LAYERS)
        check_between("predictor.guidance", self.guidance, 0.0, MOST_EMBEDDED_GUIDANCE)
        self.check_turned("axes_dims_rope", self.axes_dims_rope)

    @property
    def conditions(self) -> Conditions:
        """The states of the text, and its pooled vector."""
        return self.with_pooled(self.pooled_projection_dim)
