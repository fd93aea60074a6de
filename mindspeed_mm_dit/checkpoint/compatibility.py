"""Checks that a checkpoint is complete and fits the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.store import DAMAGED_CURE
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.errors import CheckpointError

LEARNED = {
    "predictor": ("model_id", "num_heads", "num_attention_heads"),
    "diffusion": ("model_id", "prediction_type", "noise_schedule", "num_train_timesteps", "path"),
}
"""Settings that no tensor shows, and without which weights cannot be interpreted."""


def learned_apart(here: ModelConfig, there: ModelConfig) -> tuple[str, Any, Any] | None:
    """Return the first setting of LEARNED in which two models differ, with its value in each, or None."""
    for section, names in LEARNED.items():
        ours, theirs = vars(getattr(here, section)), vars(getattr(there, section))
        for name in names:
            if ours.get(name) != theirs.get(name):
                return f"{section}.{name}", ours.get(name), theirs.get(name)
    return None


def check_whole(path: Path, problem_of: Callable[[Path], str | None]) -> None:
    """Raise CheckpointError, naming the file, if the checkpoint folder ``path`` is damaged."""
    problem = problem_of(path)
    if problem is not None:
        raise CheckpointError(str(path), f"is damaged: {problem}", DAMAGED_CURE)


def check_names(
    expected: Mapping[str, tuple[int, ...]],
    actual: Mapping[str, tuple[int, ...]],
    what: str,
    reason: str = "belongs to another architecture",
    cure: str = "use the model.json that this checkpoint was trained with",
) -> None:
    """Raise CheckpointError, naming the tensors, unless ``actual`` has exactly the names and shapes of ``expected``."""
    missing = [f"{name} is missing" for name in expected if name not in actual]
    unknown = [f"{name} is not in this model" for name in actual if name not in expected]
    misshapen = [
        f"{name} is {tuple(actual[name])}, this model has {tuple(shape)}"
        for name, shape in expected.items()
        if name in actual and tuple(actual[name]) != tuple(shape)
    ]
    if problems := [
        problem for group in zip_longest(missing, unknown, misshapen) for problem in group if problem
    ]:  # of each kind
        summary = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise CheckpointError(what, f"{reason}: {summary}", cure)
