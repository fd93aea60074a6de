"""MindSpeed-MM as the host of a run, by either of its routes."""

from __future__ import annotations


def register() -> None:
    """Register both hosts, of which the one registered last is tried first, and the form of its data.json."""
    from mindspeed_mm_dit.registry import register

    register("host", "mindspeed-mm", f"{__name__}.megatron.run:KIND")
    register("host", "mindspeed-mm-native", f"{__name__}.native.attach:KIND")
    register("data_config_format", "mindspeed-mm", f"{__name__}.data_json:translated")
