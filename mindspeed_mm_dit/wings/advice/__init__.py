"""Before a run: settings for your own images, what a run will need, and what it would see of its data."""

from __future__ import annotations


def join() -> None:
    """Make the commands known."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import join

    for name, summary in {
        "init": "look at your images and write a config folder that trains on them",
        "data": "show what a run would see of its data, and draw a contact sheet",
        "plan": "estimate what a run will need: memory, largest micro-batch, traffic, time",
    }.items():
        join("command", name, Command(summary, f"{__name__}.cli.{name}"))
