"""Presets: the published sizes of DiT and its successors, by name, as settings of section ``predictor``."""

from __future__ import annotations

from typing import Any

_SIZES = {
    # name: (num_layers, hidden_size, num_heads)
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "H": (32, 1280, 16),
    "XL": (28, 1152, 16),
    "1p0B": (24, 1536, 24),
    "1p6B": (28, 1792, 28),
}
_LIGHTNING = {"learn_sigma": False, "rms_norm": True, "swiglu": True, "rope": True}
_JIT = {**_LIGHTNING, "qk_norm": True, "in_context_len": 32}
_JIT_SIZES = {"B": (128, 4), "L": (128, 8), "H": (256, 10)}
"""Size -> bottleneck_dim, in_context_start."""


def _sizes(name: str, patch_size: int) -> dict[str, int]:
    num_layers, hidden_size, num_heads = _SIZES[name]
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "patch_size": patch_size,
    }


DIT = {f"DiT-{size}/{patch}": _sizes(size, patch) for size in ("S", "B", "L", "XL") for patch in (2, 4, 8)}
"""The twelve networks of Peebles & Xie 2023, table 1."""
LIGHTNING_DIT = {
    f"LightningDiT-{size}/{patch}": {**_sizes(size, patch), **_LIGHTNING}
    for size in ("B", "L", "XL", "1p0B", "1p6B")
    for patch in (1, 2)
}
"""With the options of the published runs (Yao & Wang 2025); later ones add ``qk_norm``."""
JIT = {
    f"JiT-{size}/{patch}": {**_sizes(size, patch), **_JIT, "bottleneck_dim": bottleneck, "in_context_start": start}
    for size, (bottleneck, start) in _JIT_SIZES.items()
    for patch in (16, 32)
}
"""For pixels, without an autoencoder: patches of 16 for images of 256, of 32 for 512 (Li & He 2025)."""
_SD35_MEDIUM = {"pos_embed_max_size": 384, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13))}
_SD35_LARGE = {"num_layers": 38, "num_attention_heads": 38, "qk_norm": "rms_norm"}
_KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
_KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
JOINT: dict[str, dict[str, Any]] = {
    "FLUX.1-dev": {"model_id": "flux", "guidance_embeds": True},
    "FLUX.1-schnell": {"model_id": "flux", "guidance_embeds": False},
    "FLUX.2-dev": {"model_id": "flux2"},
    "FLUX.2-klein-4B": {"model_id": "flux2", **_KLEIN_4B, "guidance_embeds": False},
    "FLUX.2-klein-9B": {"model_id": "flux2", **_KLEIN_9B, "guidance_embeds": False},
    "SD3-medium": {"model_id": "sd3"},
    "SD3.5-medium": {"model_id": "sd3", **_SD35_MEDIUM},
    "SD3.5-large": {"model_id": "sd3", **_SD35_LARGE},
    "Qwen-Image": {"model_id": "qwen_image"},
    "Z-Image": {"model_id": "z_image"},
}
"""Networks in which text and image attend to each other; other settings have the defaults of their family."""
PRESETS: dict[str, dict[str, Any]] = {**DIT, **LIGHTNING_DIT, **JIT, **JOINT}
