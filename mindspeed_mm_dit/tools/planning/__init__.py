"""Before a run: configs for your own images, published weights, resource estimates and data reports."""

from __future__ import annotations

import re

PUBLISHED = """DiT-XL/2 DiT-XL/2-512 SiT-XL/2 sd-vae-ft-ema sd-vae-ft-mse Wan2.1-1.3B Wan2.2-5B FLUX.1-dev FLUX.2-dev
    FLUX.2-klein-4B SD3.5-medium Qwen-Image Z-Image UMT5 CLIP MiniLM Inception"""
"""Names of the weights in ``get.py``."""


def register() -> None:
    """Make the commands and the published weights known."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import register

    for name, summary in {
        "init": "look at your images and write a config folder that trains on them",
        "data": "show what a run would see of its data, and draw a contact sheet",
        "plan": "estimate what a run will need: memory, largest micro-batch, traffic, time",
    }.items():
        register("command", name, Command(summary, f"{__name__}.{name}"))
    summary = "fetch published weights: shows size, licence and checksums first, and verifies them"
    register("command", "get", Command(summary, f"{__name__}.get", "hub", {"huggingface_hub": "huggingface_hub"}))
    for name in PUBLISHED.split():
        register("published_weights", name, f"{__name__}.get:{re.sub('[^A-Za-z0-9]', '_', name).upper()}")
