"""Visualization: loss curves, and a browser page that generates samples."""

from __future__ import annotations


def register() -> None:
    """Register the commands, and the loss curve of a report."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import register

    summary = "generate images or videos on a page in your browser"
    register("command", "app", Command(summary, f"{__name__}.cli.app", "app", {"gradio": "gradio"}))
    summary = "draw the loss curves of one run or several in one picture"
    packages = {"matplotlib": "matplotlib", "tensorboard": "tensorboard"}
    register("command", "plot", Command(summary, f"{__name__}.plot", "view", packages))
    register("report_picture", "loss curve", f"{__name__}.plot:draw_loss_of_run")
