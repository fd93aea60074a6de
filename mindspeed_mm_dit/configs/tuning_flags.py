"""Flags for fine-tuning: LoRA under MindSpeed-MM's names, and ``--freeze`` (``model.freeze`` in its native engine)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.flag import flag
from mindspeed_mm_dit.configs.flag_types import positive_float, positive_int
from mindspeed_mm_dit.configs.tuning import FREEZE, TARGETS, Tuning
from mindspeed_mm_dit.errors import ConfigError

_PLAIN = Tuning()
_PATTERNS = {"nargs": "+", "metavar": "PATTERN"}
_NOT_IN_MEGATRON: dict[str, Any] = {
    "refused_in": ("megatron",),
    "refusal": "trains the whole network in its Megatron engine",
    "cure": "use --host mindspeed-mm-native, or --host standalone",
}


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Which part of the predictor to train, if not all of it."""

    lora_target_modules: tuple[str, ...] = flag(
        "train only LoRA adapters of these linear layers of the predictor: attention, mlp or all of its blocks, or "
        "names such as attn1.to_q or blocks.{0-3}.attn.qkv; --init-from names the weights that they adapt",
        (), _PATTERNS, native="training.lora.target_modules", **_NOT_IN_MEGATRON,
    )  # fmt: skip
    lora_r: int = flag(
        "rank R of the adapters", _PLAIN.rank, {"type": positive_int, "metavar": "R"}, native="training.lora.rank"
    )
    lora_alpha: float = flag(
        "scale A of the adapters: their output is multiplied by A / R",
        _PLAIN.alpha,
        {"type": positive_float, "metavar": "A"},
        native="training.lora.alpha",
    )
    lora_dropout: float = flag(
        "dropout of the adapters; only 0, MindSpeed-MM's default, is supported", 0.0, {"type": float, "metavar": "P"},
        native="training.lora.dropout",
    )  # fmt: skip
    freeze: tuple[str, ...] = flag(
        "do not train these modules of the predictor, e.g. y_embedder or blocks.{0-13}",
        (), _PATTERNS, native="model.freeze", **_NOT_IN_MEGATRON,
    )  # fmt: skip


def tuning_of_run(args: FineTuning, init_from: str | None) -> Tuning:
    """Return the tuning that the flags of a run request.

    Raises ConfigError for adapters without --init-from, and as ``tuning_of`` does.
    """
    tuning = tuning_of(args)
    if tuning.targets and init_from is None:
        raise ConfigError(TARGETS, "adapters need pretrained weights", "add --init-from WEIGHTS")
    return tuning


def tuning_of(args: FineTuning) -> Tuning:
    """Return the tuning that the flags request; raises ConfigError for flags that contradict each other."""
    tuning = Tuning(args.lora_target_modules, args.lora_r, args.lora_alpha, args.freeze)
    if args.lora_dropout:
        raise ConfigError(
            f"--lora-dropout = {args.lora_dropout:g}",
            "is not supported: random numbers must depend only on seed and sample index, which those of dropout do not",
            "leave it out; to regularise, train fewer steps or use weight decay",
        )
    if tuning.targets and tuning.freeze:
        raise ConfigError(f"{FREEZE} = {' '.join(tuning.freeze)}", f"with {TARGETS} only the adapters are trained",
                          "leave one of the two out")  # fmt: skip
    if not tuning.targets and dataclasses.replace(tuning, freeze=()) != _PLAIN:
        raise ConfigError("--lora-r, --lora-alpha", f"have no effect without {TARGETS}", "add it, or drop them")
    return tuning
