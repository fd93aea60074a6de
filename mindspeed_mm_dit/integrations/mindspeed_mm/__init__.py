"""MindSpeed-MM as the host of a run, by either of its routes."""

from __future__ import annotations


def register() -> None:
    """Register both hosts; the one registered last is tried first."""
    from mindspeed_mm_dit.registry import register

    register("host", "mindspeed-mm", f"{__name__}.megatron.run:KIND")
    register("host", "mindspeed-mm-native", f"{__name__}.native.attach:KIND")
