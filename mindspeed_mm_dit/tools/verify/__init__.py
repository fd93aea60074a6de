"""Numerical verification: against published values, between frameworks, across layouts, and of recomputed steps."""

from __future__ import annotations

_FIGURES = {"matplotlib": "matplotlib"}


def register() -> None:
    """Register the commands."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import register

    for name, summary in {
        "parity": "check this implementation against a file of reference values",
        "compare": "compare PyTorch with MindSpore, a network with diffusers', or two machines' steps",
        "prove": "check a training step against float64 in every layout: ranks, sharding, precision",
        "replay": "recompute one step of a run, and find the first value that is not finite",
    }.items():
        packages = {"parity": {"rich": "rich"}, "compare": _FIGURES, "prove": _FIGURES}.get(name, {})
        register("command", name, Command(summary, f"{__name__}.cli.{name}", "lab", packages))
