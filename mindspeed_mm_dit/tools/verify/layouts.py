"""The registry of layouts in which a training step is verified.

A layout is *how* a step is computed. Its ``what`` flags change the mathematics, and with it the float64 reference.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.errors import ConfigError, nearest

UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Unit roundoff of each precision: the largest relative error of one rounding."""
RECOMPUTED = "recompute_modules"
WATCHED_BY = {"mindspore": ("--pynative",)}
"""Flags needed to watch modules, by framework: a compiled graph does not call modules."""


@dataclass(frozen=True)
class Layout:
    """How a step is spread over ranks, memory and precision."""

    name: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    """Flags of pretrain_dit.py that change how the step is computed."""
    what: tuple[str, ...] = ()
    """Flags that change what is computed: optimizer, clipping."""
    micro_batches: int = 1
    """Micro-batches of a step on each rank."""
    sharing: int = 1
    """Size of the context-parallel group, whose ranks split the tokens of a sample."""
    sharding: Mapping[str, Any] | None = None
    """Keys of fsdp2.yaml that differ from the user's; None: the weights are replicated."""
    precision: str = "float32"
    framework: str = "pytorch"
    host: str = "standalone"
    """Host of the step, a value of ``--host``."""
    against_host: bool = False
    """Whether its reference is computed on the host's CPU, not on the accelerator; skipped if there is none."""

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks}, {self.label}"

    @property
    def label(self) -> str:
        """The name, with the framework if that is not PyTorch."""
        return self.name if self.framework == "pytorch" else f"{self.name} ({self.framework})"

    @property
    def reference_key(self) -> tuple[bool, tuple[str, ...]]:
        """Key of the float64 reference: layouts with the same key are compared with the same one."""
        return self.against_host, self.what

    @property
    def stem(self) -> str:
        """Stem of the layout's file names, which ``--layouts`` also matches."""
        return f"{self.framework}-{self.ranks}-{self.name}".replace(" ", "-").replace("/", "-")


_CLIPPED, _UNCLIPPED = ("--clip-grad", "0.001"), ("--clip-grad", "0")
_MUON = ("--optimizer", "muon")
_LORA = ("--lora-target-modules", "{*}", "--lora-r", "2", "--lora-alpha", "1")
_SHARDED: Mapping[str, Any] = {"sharding_size": "auto"}
_HYBRID: Mapping[str, Any] = {"sharding_size": 2}
_RECOMPUTED: Mapping[str, Any] = {RECOMPUTED: True, "use_reentrant": False}
_BF16: Mapping[str, Any] = {"param_dtype": "bf16", "reduce_dtype": "fp32", "cast_forward_inputs": False}
_ULYSSES = ("--context-parallel-size", "2")

LAYOUTS: tuple[Layout, ...] = (
    Layout("whole batch"),
    Layout("device", against_host=True),
    Layout("micro-batches", micro_batches=4),
    Layout("recompute", sharding={**_SHARDED, **_RECOMPUTED}, micro_batches=2),
    Layout("torch.compile", flags=("--torch-compile",)),
    Layout("autocast", flags=("--bf16",), precision="bfloat16"),
    Layout("clipping active", what=_CLIPPED, micro_batches=2),
    Layout("no clipping", what=_UNCLIPPED),
    Layout("Muon", what=_MUON),
    Layout("LoRA", what=_LORA, micro_batches=2),
    Layout("replicated", 2),
    Layout("replicated, micro-batches", 2, micro_batches=2),
    Layout("replicated, autocast", 2, ("--bf16",), precision="bfloat16"),
    Layout("replicated, clipping active", 2, what=_CLIPPED, micro_batches=2),
    Layout("FSDP2", 2, sharding=_SHARDED),
    Layout("FSDP2, micro-batches, recompute", 2, sharding={**_SHARDED, **_RECOMPUTED}, micro_batches=2),
    Layout("FSDP2, bf16", 2, sharding={**_SHARDED, **_BF16}, precision="bfloat16"),
    Layout("FSDP2, clipping active", 2, what=_CLIPPED, sharding=_SHARDED, micro_batches=2),
    Layout("FSDP2, Muon", 2, what=_MUON, sharding=_SHARDED),
    Layout("FSDP2, LoRA", 2, what=_LORA, sharding=_SHARDED),
    Layout("FSDP2, torch.compile", 2, ("--torch-compile",), sharding=_SHARDED),
    Layout("Ulysses", 2, _ULYSSES, sharing=2),
    Layout("replicated", 4),
    Layout("FSDP2", 4, sharding=_SHARDED, micro_batches=2),
    Layout("hybrid", 4, sharding=_HYBRID, micro_batches=2),
    Layout("hybrid, Ulysses", 4, _ULYSSES, sharing=2, sharding=_HYBRID),
    Layout("MindSpeed-MM, old route", 2, sharding=_SHARDED, micro_batches=2, host="mindspeed-mm"),
    Layout("MindSpeed-MM, native engine", 2, sharding=_SHARDED, micro_batches=2, host="mindspeed-mm-native"),
    Layout("whole batch, graph", framework="mindspore"),
    Layout("micro-batches, pynative", flags=("--pynative",), micro_batches=2, framework="mindspore"),
    Layout("LoRA, graph", what=_LORA, framework="mindspore"),
    Layout("replicated, graph", 2, micro_batches=2, framework="mindspore"),
    Layout("FSDP2, clipping active, graph", 2, what=_CLIPPED, sharding=_SHARDED, framework="mindspore"),
)
"""All layouts, in the order in which they are verified."""


def chosen(patterns: Sequence[str], layouts: Sequence[Layout] = LAYOUTS) -> list[Layout]:
    """Return the layouts whose name or stem matches one of ``patterns`` (``*`` matches anything); without any, all.

    Raises ConfigError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(_matches(layout, pattern) for layout in layouts):
            names = list(dict.fromkeys(layout.name for layout in layouts))
            raise ConfigError(
                f"--layouts {pattern}", "matches no layout", f"{nearest(pattern, names)}Layouts are: {'; '.join(names)}"
            )
    return [layout for layout in layouts if not patterns or any(_matches(layout, pattern) for pattern in patterns)]


def _matches(layout: Layout, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (layout.name, layout.stem, str(layout)))
