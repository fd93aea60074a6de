"""Parameters and costs shared by image and video transformers: attention normalised over its whole width, and a
two-layer embedder."""

from __future__ import annotations

from mindspeed_mm_dit.configs.predictor import Initial, Kept, Parameter, Rule, linear


def attention(name: str, width: int) -> dict[str, Parameter]:
    """Return the parameters of ``models/layers.WholeAttention``, under diffusers' names."""
    found: dict[str, Parameter] = {}
    for layer in ("to_q", "to_k", "to_v", "to_out.0"):
        found |= linear(f"{name}.{layer}", width, width)
    return found | {f"{name}.{norm}.weight": Parameter((width,), Initial.ONES) for norm in ("norm_q", "norm_k")}


def two_layers(name: str, in_features: int, width: int, initial: Rule) -> dict[str, Parameter]:
    """Return the parameters of ``models/layers.TwoLayers``."""
    first = linear(f"{name}.linear_1", width, in_features, initial=initial)
    return first | linear(f"{name}.linear_2", width, width, initial=initial)


def multiply_adds_to_text(tokens: int, texts: int, width: int) -> int:
    """Return the multiply-adds of cross-attention of ``tokens`` N to ``texts`` L states, including projections."""
    return 2 * (tokens + texts) * width * width + 2 * tokens * texts * width


def kept_of_text(tokens: int, texts: int, width: int, heads: int) -> Kept:
    """Return what cross-attention keeps for backward.

    q raw, normalised and weighted, attention twice; k raw, normalised and weighted, and v; statistics of the norms.
    """
    return Kept(other=(5 * tokens + 4 * texts) * width, full=tokens * (1 + heads) + texts)
