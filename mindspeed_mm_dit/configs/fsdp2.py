"""fsdp2.yaml: how the model is sharded, with MindSpeed-MM's keys, defaults and path syntax.

A path names a module, starting at the composite (``predictor.final_layer``), with at most one pair of braces:
``predictor.blocks.{*}`` is every child, ``predictor.blocks.{0-20,25}`` is children 0 to 20 and 25.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mindspeed_mm_dit.configs.files import read_yaml
from mindspeed_mm_dit.configs.limits import Between, Positive, Section, shorten_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError, nearest

Dtype = Literal["bf16", "fp16", "fp32"]
Units = Annotated[int, Between(0, 1024)]

ENCODERS = ("ae", "text_encoder")
"""Frozen parts of a model."""


@dataclass(frozen=True)
class Fsdp2Config(Section):
    """All of fsdp2.yaml."""

    sharding_size: Positive | Literal["auto"] | None = None
    """Number of ranks that share one copy of the weights; null: 1 (every rank holds all weights), "auto": all ranks."""
    sub_modules_to_wrap: tuple[str, ...] = ()
    """Paths of the modules that become FSDP units of their own."""
    reshard_after_forward: bool | Positive = True
    """Free the gathered weights after forward (true), keep them (false), or reshard them to this number of ranks."""
    param_dtype: Dtype | None = None
    """Precision of the gathered weights in forward and backward; null: that of the weights. fp16 is refused."""
    reduce_dtype: Dtype | None = None
    """Precision of the gradient reduction; null: ``param_dtype``. fp16 is refused."""
    output_dtype: Dtype | None = None
    """Precision of the outputs of the root module. fp16 is refused."""
    cast_forward_inputs: bool = True
    """Cast the inputs of wrapped modules to ``param_dtype``, including noise and latents at the root.

    A DiT needs false: its embedders cast their own inputs, and the data stay in float32."""
    offload_to_cpu: bool = False
    """Keep weights, gradients and optimizer state in CPU memory."""
    pin_memory: bool = True
    """Pin that CPU memory; only with ``offload_to_cpu``."""
    num_to_forward_prefetch: Units | None = 0
    """Number of units whose weights are gathered ahead in forward, 0 to 1024."""
    num_to_backward_prefetch: Units | None = 0
    """Number of units whose weights are gathered ahead in backward, 0 to 1024."""
    ignored_modules: tuple[str, ...] | None = None
    """Paths of modules that are replicated, never sharded. "ae" and "text_encoder" are always among them, listed or
    not."""
    recompute_modules: tuple[str, ...] | None = None
    """Paths of modules whose activations are recomputed in backward."""
    use_reentrant: bool = True
    """Use the reentrant variant of torch.utils.checkpoint."""
    align_fsdp_param_groups: bool = False
    """MindSpeed-MM only: one FSDP unit per Linear."""
    expert_parallel_size: int | None = 1
    """MindSpeed-MM only: mixture of experts; a DiT has none, so 1."""
    reshard_local_experts: bool | int = True
    """MindSpeed-MM only: mixture of experts."""
    moe_modules: tuple[str, ...] | None = None
    """MindSpeed-MM only: mixture of experts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_parallel_size not in (None, 1) or self.moe_modules:
            raise ConfigError(
                f"expert_parallel_size = {self.expert_parallel_size} and moe_modules = {self.moe_modules} are for a "
                "mixture of experts, and a DiT has no experts. Drop both keys."
            )

    @property
    def ignored(self) -> tuple[str, ...]:
        """``ignored_modules`` without the encoders, which are never sharded."""
        return tuple(path for path in self.ignored_modules or () if path not in ENCODERS)

    def shard_ranks(self, world_size: int) -> int:
        """Return the number of ranks that share one copy of the weights; raises ConfigError if it does not divide."""
        size = world_size if self.sharding_size == "auto" else self.sharding_size or 1
        if world_size % size:
            raise ConfigError(
                f"fsdp2.yaml: sharding_size = {size} does not divide the {world_size} ranks. Use null, 'auto' or a "
                "divisor of their number."
            )
        if type(self.reshard_after_forward) is int and size % self.reshard_after_forward:
            raise ConfigError(
                f"fsdp2.yaml: reshard_after_forward = {self.reshard_after_forward} does not divide the {size} ranks "
                "that share one copy of the weights. Use true, false, or a divisor of them."
            )
        return size


def load_fsdp2_config(path: str | Path | None) -> Fsdp2Config:
    """Read fsdp2.yaml; without a path, return the defaults."""
    if path is None:
        return Fsdp2Config()
    content = read_yaml(path, "--fsdp2-config-path")
    if content is None:
        raise ConfigError(f"--fsdp2-config-path = {path} is empty. Drop the flag to have every default, or write {{}}.")
    return from_mapping(Fsdp2Config, content, str(path))


def resolve_paths(paths: Iterable[str], module_names: Iterable[str], setting: str) -> list[str]:
    """Expand the braces of ``paths`` against ``module_names`` (dotted, as from named_modules).

    Returns the matching names in order, each once. ``setting`` is the key of the paths, for errors.
    Raises ConfigError if a path matches no module.
    """
    names = [name for name in module_names if name]
    matches: dict[str, None] = {}
    for position, path in enumerate(paths):
        where = f"fsdp2.yaml: {setting}[{position}] = {path!r}"
        expanded = _expand(path, names, where)
        missing = [name for name in expanded if name not in names]
        if missing or not expanded:
            problem = "matches no module" if len(expanded) < 2 else f"names {missing[0]!r}, which is not a module"
            raise ConfigError(f"{where} {problem}. {_known_modules(missing[0] if missing else path, names)}")
        matches.update(dict.fromkeys(expanded))
    return list(matches)


def _expand(path: str, names: list[str], where: str) -> list[str]:
    match = re.fullmatch(r"([^{}]*)\{([^{}]*)\}([^{}]*)", path)
    if match is None:
        if "{" in path or "}" in path:
            raise ConfigError(f"{where} may have at most one pair of braces. Split it into several paths.")
        return [path]
    prefix, inner, suffix = match.groups()
    if inner == "*":
        depth = prefix.count(".")
        children = [name for name in names if name.startswith(prefix) and name.count(".") == depth]
        return [child + suffix for child in children]
    return [f"{prefix}{number}{suffix}" for number in numbers_in(inner, where, len(names))]


def numbers_in(inner: str, where: str, most: int) -> list[int]:
    """Return the numbers in the content of braces, e.g. "0-20,25"; ``where`` names the setting in errors."""
    numbers: list[int] = []
    for part in inner.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if match is None:
            raise ConfigError(f"{where}: {part!r} is neither a number nor a range such as 0-20.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{where}: the range {part!r} runs backwards.")
        if last - first >= most:
            raise ConfigError(
                f"{where}: the range {shorten_repr(part)} is longer than the model, which has {most} modules."
            )
        numbers.extend(range(first, last + 1))
    return numbers


def _known_modules(path: str, names: list[str]) -> str:
    parent = path.rpartition(".")[0]
    while parent and parent not in names:
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    children = [n[len(prefix) :] for n in names if n.startswith(prefix) and "." not in n[len(prefix) :]]
    owner = repr(parent) if parent else "the model"
    return f"{nearest(path, names)}The modules of {owner} are {', '.join(children)}."
