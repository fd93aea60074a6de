"""Section ``predictor`` of model.json with ``model_id`` "flux" (FLUX.1) and "flux2" (FLUX.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mindspeed_mm_dit.configs.condition import Conditions, PooledText
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.limits import MOST_LAYERS, check_between, require_positive
from mindspeed_mm_dit.configs.predictor import Shape, count_of, shape_of
from mindspeed_mm_dit.errors import ConfigError

GUIDANCE, MOST_EMBEDDED_GUIDANCE = 3.5, 100.0
"""Guidance scale that diffusers trains and samples distilled networks with, and the largest."""


@dataclass(frozen=True)
class FluxConfig(JointConfig):
    """FLUX.1 (Black Forest Labs 2024); the defaults are those of FLUX.1-schnell."""

    num_single_layers: int = 38
    """Number of blocks after them in which image and text share one set of weights."""
    pooled_projection_dim: int = 768
    """Width of the pooled vector of the text."""
    pooled_encoder: Literal[0, 1] = 1
    """Index of the text encoder in model.json that makes that vector: the second, or 0 if the first makes both."""
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    """Rotary channels of a head for a constant 0, the row and column of a patch; even."""
    guidance_embeds: bool = False
    """Take the guidance scale as an input, as guidance-distilled networks do (FLUX.1-dev)."""
    guidance: float = GUIDANCE
    """With ``guidance_embeds``: that scale, in training and sampling, 0 to 100."""
    model_id: str = "flux"

    network = "mindspeed_mm_dit.models.flux:Flux"
    diffusers_class = "FluxTransformer2DModel"
    adaptable = (*JointConfig.adaptable, "guidance", "pooled_encoder")  # type: ignore[assignment]
    published_texts: ClassVar[Mapping[str, Any]] = {"attend_padding": True}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1,), "out_channels": (None,)}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "predictor", "pooled_projection_dim")
        check_between("predictor.num_single_layers", self.num_single_layers, 1, MOST_LAYERS)
        check_between("predictor.guidance", self.guidance, 0.0, MOST_EMBEDDED_GUIDANCE)
        self.check_rotary_axes("axes_dims_rope", self.axes_dims_rope)

    @property
    def conditions(self) -> Conditions:
        """The states of the text, and its pooled vector, dropped together."""
        width, number, dropout_key = self.pooled_projection_dim, self.pooled_encoder, self.texts.dropout_key
        return Conditions(self.texts, PooledText(width, encoder=number, setting="pooled_projection_dim",
                                                 shared_dropout_key=dropout_key))  # fmt: skip

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> FluxConfig | None:
        """Return the architecture that ``shapes`` imply, with the published proportions of rotary axes."""
        if "single_transformer_blocks.0.proj_mlp.weight" not in shapes:
            return None
        D, channels = shape_of(shapes, "x_embedder.weight", 2)
        (head_dim,) = shape_of(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
        return cls(
            num_layers=count_of(shapes, "transformer_blocks"), num_attention_heads=D // head_dim,
            num_single_layers=count_of(shapes, "single_transformer_blocks"), attention_head_dim=head_dim,
            joint_attention_dim=shape_of(shapes, "context_embedder.weight", 2)[1], in_channels=channels // 4,
            pooled_projection_dim=shape_of(shapes, "time_text_embed.text_embedder.linear_1.weight", 2)[1],
            axes_dims_rope=cls.published_rotary_axes(head_dim),  # type: ignore[arg-type]
            guidance_embeds="time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        )  # fmt: skip


@dataclass(frozen=True)
class Flux2Config(JointConfig):
    """FLUX.2 (Black Forest Labs 2025); the defaults are those of FLUX.2-dev."""

    num_layers: int = 8
    num_single_layers: int = 48
    """Number of blocks after them in which image and text share one set of weights."""
    num_attention_heads: int = 48
    joint_attention_dim: int = 15360
    in_channels: int = 128
    """Channels of the latents: the autoencoder's, in patches of 2 x 2. The network's own patches are 1 x 1."""
    latent_size: tuple[int, int] = (64, 64)
    """[height, width] of these latents; no weight depends on it."""
    axes_dims_rope: tuple[int, int, int, int] = (32, 32, 32, 32)
    """Rotary channels of a head for the image's time, a patch's row and column, and the text position; even."""
    rope_theta: float = 2000.0
    """Base of the frequencies of the positions."""
    mlp_ratio: float = 3.0
    """Width of an MLP's hidden layer, as a multiple of D."""
    timestep_guidance_channels: int = 256
    """Width of the sinusoids of time and guidance; even."""
    guidance_embeds: bool = True
    """Take the guidance scale as an input, as guidance-distilled networks do."""
    guidance: float = GUIDANCE
    """With ``guidance_embeds``: that scale, in training and sampling, 0 to 100."""
    model_id: str = "flux2"

    network = "mindspeed_mm_dit.models.flux2:Flux2"
    published_sampler = ("euler", 50)
    diffusers_class = "Flux2Transformer2DModel"
    patch_size = 1
    token_channels = 1
    adaptable = (*JointConfig.adaptable, "guidance")  # type: ignore[assignment]
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1,), "out_channels": (None,), "eps": (1e-6,)}
    published_texts: ClassVar[Mapping[str, Any]] = {
        "zero_padding": False, "cut_padding": False, "layers": (9, 18, 27),
        "prompt_template": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    }  # fmt: skip
    """For Qwen3, the text encoder of FLUX.2-klein; the defaults of Mistral3Config are those of FLUX.2-dev."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("predictor.num_single_layers", self.num_single_layers, 1, MOST_LAYERS)
        check_between("predictor.guidance", self.guidance, 0.0, MOST_EMBEDDED_GUIDANCE)
        check_between("predictor.rope_theta", self.rope_theta, 1.0, 1e9)
        check_between("predictor.mlp_ratio", self.mlp_ratio, 1 / self.hidden_size, 1000.0)
        require_positive(self, "predictor", "timestep_guidance_channels")
        if self.timestep_guidance_channels % 2:
            what = f"predictor.timestep_guidance_channels = {self.timestep_guidance_channels}"
            raise ConfigError(what, "must be even: half of it is cosines, half sines")
        self.check_rotary_axes("axes_dims_rope", self.axes_dims_rope)

    @property
    def mlp_width(self) -> int:
        """Width of an MLP's hidden layer."""
        return int(self.hidden_size * self.mlp_ratio)

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, Shape]) -> Flux2Config | None:
        """Return the architecture that ``shapes`` imply, with the published proportions of rotary axes."""
        if "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight" not in shapes:
            return None
        D, channels = shape_of(shapes, "x_embedder.weight", 2)
        (head_dim,) = shape_of(shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
        embedder = "time_guidance_embed.{}_embedder.linear_1.weight"
        return cls(
            num_layers=count_of(shapes, "transformer_blocks"), num_attention_heads=D // head_dim,
            num_single_layers=count_of(shapes, "single_transformer_blocks"), attention_head_dim=head_dim,
            joint_attention_dim=shape_of(shapes, "context_embedder.weight", 2)[1], in_channels=channels,
            axes_dims_rope=cls.published_rotary_axes(head_dim),  # type: ignore[arg-type]
            mlp_ratio=shape_of(shapes, "transformer_blocks.0.ff.linear_out.weight", 2)[1] / D,
            timestep_guidance_channels=shape_of(shapes, embedder.format("timestep"), 2)[1],
            guidance_embeds=embedder.format("guidance") in shapes,
        )  # fmt: skip
