"""Section ``predictor`` of model.json with ``model_id`` "custom_dit"."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.configs.video_transformer import TUTORIAL_LATENTS, VideoTransformerConfig


@dataclass(frozen=True)
class CustomDiTConfig(VideoTransformerConfig):
    """The text-to-video DiT of MindSpeed-MM's tutorial "develop a new model", under its keys and defaults."""

    num_layers: int = 40
    """Number of transformer blocks."""
    num_heads: int = 40
    """Attention heads."""
    head_dim: int = 128
    """Width of a head; with ``num_heads`` the width D of a token."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    """Frames, height and width of a patch, in latent pixels."""
    in_channels: int = 16
    """Channels of the latents."""
    out_channels: int = 16
    """Channels of the network's output."""
    text_dim: int = 4096
    """Width of the text encoder's states."""
    freq_dim: int = 256
    """Width of the sinusoidal timestep code."""
    ffn_dim: int = 13824
    """Width of the MLP's hidden layer."""
    rope_max_seq_len: int = 1024
    """Largest number of patches along frames, height or width; no weight depends on it."""
    latent_size: tuple[int, int, int] = TUTORIAL_LATENTS
    """Frames, height and width of the latents, in latent pixels; no weight depends on it, and no key of the others'."""
    model_id: str = "custom_dit"
    """Key in PREDICTOR_MODEL_MAPPINGS."""

    eps = 1e-5
    """Of all norms, as in the tutorial; no key of model.json."""
    affine_norms = ("norm1", "norm3")
    kept_norms = 4
