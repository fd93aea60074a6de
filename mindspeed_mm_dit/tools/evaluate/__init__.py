"""Scores of images and videos: FID and related metrics, scores against your own images, and the demo data sets."""

from __future__ import annotations


def register() -> None:
    """Register the command, the data sets, and the judges that score a report's samples."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import register

    summary = "score a model on many samples: FID, Inception Score, precision and recall"
    register("command", "evaluate", Command(summary, f"{__name__}.cli", "scores", {"sklearn": "scikit-learn"}))
    for name in ("digits", "captioned_digits", "inverted_digits", "digits_buckets"):
        register("builtin_images", name, f"{__name__}.demo:{name.upper()}")
    for name in ("moving_digits", "moving_digits_buckets"):
        register("builtin_clips", name, f"{__name__}.demo:{name.upper()}")
    register("report_judge", "built-in data", f"{__name__}.demo_judges:builtin_judge")
    register("score_test", "own images", f"{__name__}.images_judge:self_test")
