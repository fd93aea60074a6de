"""Scores of images and videos: FID and its kin, judges of your own images, digits that a program can read."""

from __future__ import annotations


def join() -> None:
    """Make the command known, and what scores the samples of a report."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import join

    summary = "score a model on many samples: FID, Inception Score, precision and recall"
    join("command", "evaluate", Command(summary, f"{__name__}.cli.evaluate"))
    join("judge of a report", "built-in data", f"{__name__}.built_in:judge_of")
