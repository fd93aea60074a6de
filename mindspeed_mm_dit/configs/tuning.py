"""Fine-tuning: which weights of a model are trained, which layers have adapters (LoRA), and the flags for both."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.flag import flag, positive_float, positive_int, unsigned_int
from mindspeed_mm_dit.configs.fsdp2 import numbers_in
from mindspeed_mm_dit.configs.limits import BASE_DTYPES, MAX_LAYERS, check_between
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import ZEROS, ParameterSpec, ParameterSpecs, Shape
from mindspeed_mm_dit.errors import ConfigError, UserError, nearest

DOWN, UP = "lora_A", "lora_B"
"""Names of the two layers of an adapter, inside the layer that it adapts."""
TARGETS, FREEZE = "--lora-target-modules", "--freeze"
MAX_RANK = 4096
SETS = {"attention": "attn|attention", "mlp": r"(^|_)(mlp|ffn?|feed_forward)(_|$)", "all": ""}
"""Sets of layers in a network's blocks: a pattern for the first part of their names inside a block."""
_PREFIX = "predictor."
_WEIGHT = ".weight"


class LoraSpec(NamedTuple):
    """The adapter of one layer."""

    rank: int
    scale: float
    """Factor of its output: alpha / rank."""


@dataclass(frozen=True)
class Tuning:
    """Which part of a model is trained: everything that is not frozen, or only adapters."""

    targets: tuple[str, ...] = ()
    """Patterns of the layers that have an adapter; if there are any, everything else is frozen."""
    rank: int = 8
    """Width r of an adapter: A is (r, in), B (out, r)."""
    alpha: float = 16
    """An adapter adds (alpha / r) B A to the weight."""
    freeze: tuple[str, ...] = ()
    """Patterns of the modules, or single parameters, that are not trained."""
    base_dtype: str = ""
    """Format of few bits for the weights of frozen linear layers; empty: float32."""

    def __post_init__(self) -> None:
        check_between("--lora-r", self.rank, 1, MAX_RANK)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"--lora-alpha = {self.alpha} must be a positive number, such as 16.")

    @property
    def lora_spec(self) -> LoraSpec:
        """The adapter of every adapted layer."""
        return LoraSpec(self.rank, self.alpha / self.rank)

    def spelled_out(self, parameters: ParameterSpecs) -> Tuning:
        """Return this tuning with the names in SETS replaced by patterns; raises ConfigError for an empty set."""

        def spelled(flag: str, patterns: Sequence[str]) -> tuple[str, ...]:
            expanded = [_set_patterns(flag, name, parameters) if name in SETS else [name] for name in patterns]
            return tuple(dict.fromkeys(pattern for members in expanded for pattern in members))

        return dataclasses.replace(self, targets=spelled(TARGETS, self.targets), freeze=spelled(FREEZE, self.freeze))

    def layers(self, parameters: ParameterSpecs) -> list[str]:
        """Return the names of the layers that have an adapter.

        Raises ConfigError for a pattern that matches none.
        """
        possible = [name.removesuffix(_WEIGHT) for name, p in parameters.items() if is_linear_weight(name, p)]
        adapted = set().union(*(_matching_names(TARGETS, pattern, possible, _matches_end) for pattern in self.targets))
        return [name for name in possible if name in adapted]

    def applied(self, parameters: ParameterSpecs) -> ParameterSpecs:
        """Return ``parameters`` under this tuning, with frozen ones marked and adapters added.

        Raises ConfigError for a pattern that matches nothing, or if nothing is left to train.
        """
        if not (self.targets or self.freeze):
            return parameters
        layers, names = set(self.layers(parameters)), list(parameters)
        frozen = set(names) if self.targets else set()
        frozen = frozen.union(*(_matching_names(FREEZE, pattern, names, _matches_part) for pattern in self.freeze))
        changed: dict[str, ParameterSpec] = {}
        for name, p in parameters.items():
            changed[name] = dataclasses.replace(p, trained=False, saved=not self.targets) if name in frozen else p
            if (layer := name.removesuffix(_WEIGHT)) in layers and name.endswith(_WEIGHT):
                changed |= {
                    f"{layer}.{part}": adapter for part, adapter in adapter_parameters(p.shape, self.rank).items()
                }
        if self.base_dtype:
            changed |= {
                name: dataclasses.replace(p, stored_as=self.base_dtype)
                for name, p in changed.items()
                if not p.trained and is_linear_weight(name, p)
            }
        if not any(p.trained for p in changed.values()):
            raise ConfigError(f"{FREEZE} = {' '.join(self.freeze)} leaves nothing to train. Freeze fewer modules.")
        return ParameterSpecs(changed, parameters.blocks)


FULL_TUNING = Tuning()
"""Train the whole model."""


def tuning_from_facts(facts: Mapping[str, Any]) -> Tuning:
    """Return the tuning recorded in ``facts`` by ``tuning_facts`` of a model; without one, train all of it."""
    freeze = tuple(str(facts.get(FREEZE, "")).split())
    if TARGETS not in facts:
        return Tuning(freeze=freeze)
    return Tuning(tuple(facts[TARGETS]), int(facts["--lora-r"]), float(facts["--lora-alpha"]))


def is_tuning(facts: Mapping[str, Any]) -> bool:
    """Return whether ``facts`` record adapters as :func:`tuning_from_facts` reads them."""
    try:
        return isinstance(facts.get(TARGETS), list) and bool(tuning_from_facts(facts).targets)
    except (UserError, LookupError, TypeError, ValueError, OverflowError):
        return False


def expand_lists(patterns: Iterable[str]) -> list[str]:
    """Return equivalent patterns with only {*} and ranges like {0-3} in braces: ``blocks.{0-3,7}`` becomes two."""
    result = []
    for pattern in patterns:
        match = re.search(r"\{([^{}]*,[^{}]*|\d+)\}", pattern)
        for part in match[1].replace(" ", "").split(",") if match else ():
            replacement = f"{{{part}}}" if "-" in part else part
            result += expand_lists([pattern[: match.start()] + replacement + pattern[match.end() :]])  # type: ignore[union-attr]
        result += [] if match else [pattern]
    return result


def adapter_parameters(shape: Shape, rank: int) -> dict[str, ParameterSpec]:
    """Return A (r, in) and B (out, r) of the adapter of a weight (out, in); B, and so the change, starts at zero."""
    out_features, in_features = shape
    return {
        f"{DOWN}{_WEIGHT}": ParameterSpec((rank, in_features), _uniform, matrices=1),
        f"{UP}{_WEIGHT}": ParameterSpec((out_features, rank), ZEROS, matrices=1),
    }


def _uniform(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Draw A as peft does: uniform up to 1 / sqrt(in) (He et al. 2015, with a slope of sqrt(5))."""
    return (rng.random(shape, np.float32) * 2 - 1) * np.float32(shape[1] ** -0.5)


@dataclass(frozen=True)
class TunedModelConfig(ModelConfig):
    """A model.json and its tuning. (The tuning comes from flags; it is not a key of the file.)"""

    tuning: Tuning = FULL_TUNING

    @classmethod
    def of(cls, model: ModelConfig, tuning: Tuning) -> TunedModelConfig:
        """Return ``model`` with ``tuning``."""
        return cls(
            **{field.name: getattr(model, field.name) for field in dataclasses.fields(ModelConfig)}, tuning=tuning
        )

    def tuning_facts(self) -> dict[str, Any]:
        tuning = self.tuning
        if not tuning.targets:
            return {FREEZE: " ".join(tuning.freeze)}
        return {TARGETS: list(tuning.targets), "--lora-r": tuning.rank, "--lora-alpha": tuning.alpha}


def _set_patterns(flag: str, name: str, parameters: ParameterSpecs) -> list[str]:
    """Return a pattern for each layer of a set, in all blocks; with --freeze, for each part of a block."""
    linear = [weight.removesuffix(_WEIGHT) for weight, p in parameters.items() if is_linear_weight(weight, p)]
    patterns = []
    for layer in linear if flag == TARGETS else parameters:
        block = parameters.block_of(layer)
        inside = layer.removeprefix(f"{block}.")
        part = inside.partition(".")[0]
        if block and re.search(SETS[name], part):
            patterns.append(f"{block.rpartition('.')[0]}.{{*}}.{inside if flag == TARGETS else part}")
    if not patterns:
        raise ConfigError(
            f"{flag} = {name} matches no linear layer in a block of this model. {_available_names(_ends(linear))}"
        )
    return list(dict.fromkeys(patterns))


def is_linear_weight(name: str, p: ParameterSpec) -> bool:
    """Return whether a parameter is the weight (out, in) of a linear layer inside the network."""
    return name.endswith(_WEIGHT) and len(p.shape) == 2 and p.matrices > 0


def _matching_names(
    flag: str, pattern: str, names: Iterable[str], fits: Callable[[re.Pattern[str], str], bool]
) -> set[str]:
    expression, names = _compile_pattern(flag, pattern), list(names)
    matches = {name for name in names if fits(expression, name)}
    if not matches:
        kind = "linear layer" if flag == TARGETS else "module"
        names = names if flag == TARGETS else [name.rpartition(".")[0] or name for name in names]
        ends = _ends(names)
        raise ConfigError(
            f"{flag} = {pattern} matches no {kind} of this model. {nearest(pattern, [*ends, *names])}"
            f"{_available_names(ends)} The words {', '.join(SETS)} each name a set of layers."
        )
    return matches


def _ends(names: Iterable[str]) -> list[str]:
    """Return the names inside blocks, each once, and others whole."""
    return list(dict.fromkeys(re.sub(r"^.*?\.\d+\.", "", name) for name in names))


def _available_names(ends: Sequence[str]) -> str:
    return f"It has {', '.join(ends[:16])}{' and more' if len(ends) > 16 else ''}."


def _compile_pattern(flag: str, pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern; it must match a name from one of its parts to its end."""
    first, *others = (
        _pattern_part_regex(chunk, f"{flag} = {pattern}") for chunk in pattern.removeprefix(_PREFIX).split("{*}")
    )
    if not others:
        return re.compile(first)
    *middle, last = others
    # Lookaheads match each chunk where it comes first, without backtracking, as fnmatch does; otherwise several {*}
    # could take exponential time.
    lookaheads = [f"(?=(?P<at{number}>.*?{chunk}))(?P=at{number})" for number, chunk in enumerate(filter(None, middle))]
    return re.compile("".join([first, *lookaheads, f".*{last}"]))


def _pattern_part_regex(text: str, where: str) -> str:
    """Return the regular expression for a part of a pattern without {*}."""
    parts = re.split(r"\{([^{}]*)\}", text)
    return "".join(re.escape(part) if number % 2 == 0 else _numbers(part, where) for number, part in enumerate(parts))


def _numbers(inner: str, where: str) -> str:
    return f"(?:{'|'.join(map(str, numbers_in(inner, where, MAX_LAYERS)))})"


def matches(pattern: str, layer: str) -> bool:
    """Return whether a pattern of adapted layers matches ``layer``; raises ConfigError for an invalid pattern."""
    return _matches_end(_compile_pattern(TARGETS, pattern), layer)


def _matches_end(expression: re.Pattern[str], name: str) -> bool:
    """Return whether ``name``, or its end from one of its parts on, matches the pattern."""
    starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
    return any(expression.fullmatch(name, start) for start in starts)


def _matches_part(expression: re.Pattern[str], name: str) -> bool:
    """Return whether the pattern matches the parameter ``name`` or a module that contains it.

    The last part alone, such as "weight", does not match: it would freeze parameters all over the network.
    """
    ends = [match.start() for match in re.finditer(r"\.", name)]
    is_last = "." in name and expression.fullmatch(name.rpartition(".")[2])
    return any(_matches_end(expression, name[:end]) for end in ends) or (not is_last and _matches_end(expression, name))


_PLAIN = Tuning()


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Which part of the predictor to train, if not all of it."""

    lora_target_modules: tuple[str, ...] = flag(
        "train only LoRA adapters of these linear layers of the predictor: attention, mlp or all of its blocks, or "
        "names such as attn1.to_q or blocks.{0-3}.attn.qkv; --init-from names the weights that they adapt",
        (),
        nargs="+",
        metavar="PATTERN",
    )
    lora_r: int = flag("rank R of the adapters", _PLAIN.rank, type=positive_int, metavar="R")
    lora_alpha: float = flag(
        "scale A of the adapters: their output is multiplied by A / R", _PLAIN.alpha, type=positive_float, metavar="A"
    )
    lora_dropout: float = flag(
        "dropout of the adapters; only 0, MindSpeed-MM's default, is supported", 0.0, type=float, metavar="P"
    )
    base_dtype: str | None = flag(
        "store the weights of frozen linear layers in few bits: nf4 (4 bits), int8, fp8 (8) or bf16 (16); each is "
        "widened inside its products only",
        None,
        choices=BASE_DTYPES,
        compared="setting",
    )
    offload_blocks: int = flag(
        "keep the frozen weights of N blocks in the machine's memory, and copy each to the device ahead of its turn",
        0,
        type=unsigned_int,
        metavar="N",
    )
    freeze: tuple[str, ...] = flag(
        "do not train these modules of the predictor, e.g. y_embedder or blocks.{0-13}",
        (),
        nargs="+",
        metavar="PATTERN",
    )


def run_tuning(args: FineTuning, init_from: str | None) -> Tuning:
    """Return the tuning that the flags of a run request.

    Raises ConfigError for adapters without --init-from, and as ``tuning_from_flags`` does.
    """
    tuning = tuning_from_flags(args)
    if tuning.targets and init_from is None:
        raise ConfigError(f"{TARGETS} needs pretrained weights. Add --init-from WEIGHTS.")
    return tuning


def tuning_from_flags(args: FineTuning) -> Tuning:
    """Return the tuning that the flags request; raises ConfigError for flags that contradict each other."""
    tuning = Tuning(args.lora_target_modules, args.lora_r, args.lora_alpha, args.freeze, args.base_dtype or "")
    if args.lora_dropout:
        raise ConfigError(
            f"--lora-dropout = {args.lora_dropout:g} is not supported: random numbers must depend only on seed and "
            "sample index, which those of dropout do not. Leave it out; to regularise, train fewer steps or use "
            "weight decay."
        )
    if tuning.targets and tuning.freeze:
        raise ConfigError(
            f"{FREEZE} = {' '.join(tuning.freeze)} contradicts {TARGETS}, which trains only the adapters. Leave one of "
            "the two out."
        )
    if tuning.base_dtype and not tuning.targets:
        raise ConfigError(
            f"--base-dtype = {tuning.base_dtype} is for a base that only adapters train on. Add {TARGETS}, or leave it "
            "out."
        )
    if not tuning.targets and dataclasses.replace(tuning, freeze=(), base_dtype="") != _PLAIN:
        raise ConfigError(f"--lora-r and --lora-alpha have no effect without {TARGETS}. Add it, or drop them.")
    return tuning
