"""Visualization: loss curves, the report of a run, and a browser page that generates samples."""

from __future__ import annotations


def register() -> None:
    """Register the commands."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import register

    summary = "generate images or videos on a page in your browser"
    register("command", "app", Command(summary, f"{__name__}.cli", "app", {"gradio": "gradio"}))
    summary = "draw the loss curves of one run or several in one picture"
    packages = {"matplotlib": "matplotlib", "tensorboard": "tensorboard"}
    register("command", "plot", Command(summary, f"{__name__}.plot", "view", packages))
