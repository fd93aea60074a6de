"""Recognise the installed releases of MindSpeed-MM and MindSpeed by their modules; the tested pairs.

Version strings do not help: each of these MindSpeed-MM calls itself 0.1, and each MindSpeed 0.12.1. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.integrations.mindspeed_mm.installed import source_of


@dataclass(frozen=True)
class Mark:
    """A module that a release has and its predecessor lacks."""

    name: str
    """Name of the release in git."""
    module: str
    """A module that came with it."""


MINDSPEED_MM = (
    Mark("v26.0.0", "mindspeed_mm.fsdp.train.trainer"),
    Mark("v26.1.0", "mindspeed_mm.fsdp.train.training_context"),
    Mark("master (57069cd5)", "mindspeed_mm.fsdp.inference.infer_engine"),
)
MINDSPEED = (
    Mark("93c45456", "mindspeed.core.distributed.torch_fully_sharded_data_parallel.utils"),
    Mark("26.0.0_core_r0.12.1", "mindspeed.core.distributed.torch_fully_sharded_data_parallel.checkpointing"),
    Mark("26.1.0_core_r0.12.1", "mindspeed.core.optimizer.utils"),
    Mark("master (028de58c)", "mindspeed.core.distill.config"),
)
"""Oldest first. A tree counts as the last release whose module it has; a newer tree looks like the last one.

The second release brought MindSpeed's own torch_dcp loader (checkpoint/mindspeed_mm.py and state.py explain the
consequences); the third counts the steps of its AdamW in a plain number.
"""

TESTED = (
    ("v26.0.0", "93c45456"),
    ("v26.0.0", "26.0.0_core_r0.12.1"),
    ("v26.1.0", "26.1.0_core_r0.12.1"),
    ("master (57069cd5)", "master (028de58c)"),
)
"""The pairs that tests/contract was run with (docs/mindspeed_mm.md)."""

MEGATRON = "core_v0.12.1"
TORCH = "2.7.1"
"""Versions that upstream names for each of the pairs."""


def recognise(marks: tuple[Mark, ...]) -> str | None:
    """Return the name of the last of ``marks`` whose module is installed; None for a tree older than all of them."""
    installed = [mark.name for mark in marks if source_of(mark.module) is not None]
    return installed[-1] if installed else None


def tested_pairs() -> str:
    """Return the tested pairs, for a message."""
    return "; ".join(f"MindSpeed-MM {mm} with MindSpeed {mindspeed}" for mm, mindspeed in TESTED)


def warnings(megatron: str) -> list[str]:
    """Return a line for each untested version: of the pair, and of ``megatron``, the version of its core."""
    pair = (recognise(MINDSPEED_MM), recognise(MINDSPEED))
    lines = []
    if pair not in TESTED:
        mm, mindspeed = (name or "older than any tested" for name in pair)
        lines.append(
            f"warning: MindSpeed-MM ({mm}, by its modules) with MindSpeed ({mindspeed}, by its modules) was not "
            f"tested; tested: {tested_pairs()} (docs/mindspeed_mm.md)"
        )
    if f"core_v{megatron}" != MEGATRON:
        lines.append(f"warning: Megatron-LM core_v{megatron} was not tested; tested: {MEGATRON} (docs/mindspeed_mm.md)")
    return lines
