"""Which MindSpeed-MM and which MindSpeed are here, told by what they have, and which go together as tested.

Version strings do not tell: every MindSpeed-MM here calls itself 0.1, and every MindSpeed 0.12.1. Nothing is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.hosts.installed import source_of


@dataclass(frozen=True)
class Mark:
    """What a release has that the one before it has not."""

    name: str
    """The release, as git knows it."""
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
"""Oldest first. A tree is the last of them whose module it has; one that is newer than all of them looks like the last.

The second brought a torch_dcp loader of MindSpeed's own (checkpoint/mindspeed_mm.py and state.py say what follows from
it), the third counts the steps of its AdamW in a plain number.
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
"""What upstream names for each of them."""


def recognise(marks: tuple[Mark, ...]) -> str | None:
    """Return the name of the last of ``marks`` whose module is here; None for a tree older than all of them."""
    here = [mark.name for mark in marks if source_of(mark.module) is not None]
    return here[-1] if here else None


def in_words() -> str:
    """Return the tested pairs, for a message."""
    return "; ".join(f"MindSpeed-MM {mm} with MindSpeed {mindspeed}" for mm, mindspeed in TESTED)


def warnings(megatron: str) -> list[str]:
    """Return a line for what nobody has run this project with: the pair, or ``megatron``, the version of its core."""
    found = (recognise(MINDSPEED_MM), recognise(MINDSPEED))
    lines = []
    if found not in TESTED:
        mm, mindspeed = (name or "older than any tested" for name in found)
        lines.append(
            f"warning: MindSpeed-MM ({mm}, by its modules) with MindSpeed ({mindspeed}, by its modules) was not "
            f"tested; tested: {in_words()} (docs/mindspeed_mm.md)"
        )
    if f"core_v{megatron}" != MEGATRON:
        lines.append(f"warning: Megatron-LM core_v{megatron} was not tested; tested: {MEGATRON} (docs/mindspeed_mm.md)")
    return lines
