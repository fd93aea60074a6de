"""The flags of fine-tuning: MindSpeed-MM's names for LoRA, and ``--freeze``, its native engine's ``model.freeze``."""

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
_NOT_IN_THE_OLD_ROUTE: dict[str, Any] = {
    "refused_in": ("megatron",),
    "refusal": "trains the whole network by its old route",
    "cure": "use --host mindspeed-mm-native, or --host standalone",
}


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What is trained of the predictor, where that is not all."""

    lora_target_modules: tuple[str, ...] = flag(
        "train adapters (LoRA) beside these linear layers of the predictor, and nothing else: to_q, attn1.to_q or "
        "blocks.{0-3}.attn.qkv; --init-from names the weights that they stand beside",
        (), _PATTERNS, native="training.lora.target_modules", **_NOT_IN_THE_OLD_ROUTE,
    )  # fmt: skip
    lora_r: int = flag(
        "rank of the adapters", _PLAIN.rank, {"type": positive_int, "metavar": "R"}, native="training.lora.rank"
    )
    lora_alpha: float = flag(
        "their strength is A / R", _PLAIN.alpha, {"type": positive_float, "metavar": "A"}, native="training.lora.alpha"
    )
    lora_dropout: float = flag(
        "0, MindSpeed-MM's default: others are not offered", 0.0, {"type": float, "metavar": "P"},
        native="training.lora.dropout",
    )  # fmt: skip
    freeze: tuple[str, ...] = flag(
        "do not train these modules of the predictor: y_embedder, or blocks.{0-13}",
        (), _PATTERNS, native="model.freeze", **_NOT_IN_THE_OLD_ROUTE,
    )  # fmt: skip


def tuning_of_run(args: FineTuning, init_from: str | None) -> Tuning:
    """Return what the flags of a run say; raises ConfigError for adapters beside no weights, and as tuning_of does."""
    tuning = tuning_of(args)
    if tuning.targets and init_from is None:
        raise ConfigError(TARGETS, "adapters stand beside weights that are trained already", "add --init-from WEIGHTS")
    return tuning


def tuning_of(args: FineTuning) -> Tuning:
    """Return what the flags say; raises ConfigError for those that say nothing together."""
    tuning = Tuning(args.lora_target_modules, args.lora_r, args.lora_alpha, args.freeze)
    if args.lora_dropout:
        raise ConfigError(
            f"--lora-dropout = {args.lora_dropout:g}", "is not offered: every draw of a step is a function of seed and "
            "sample index, and masks of all activations would not be", "leave it out; fewer steps, or weight decay, do "
            "its work",
        )  # fmt: skip
    if tuning.targets and tuning.freeze:
        raise ConfigError(f"{FREEZE} = {' '.join(tuning.freeze)}", f"with {TARGETS} all but the adapters is frozen",
                          "leave one of the two out")  # fmt: skip
    if not tuning.targets and dataclasses.replace(tuning, freeze=()) != _PLAIN:
        raise ConfigError("--lora-r, --lora-alpha", f"mean nothing without {TARGETS}", "add it, or drop them")
    return tuning
