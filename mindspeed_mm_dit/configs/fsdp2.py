"""fsdp2.yaml: how the model is sharded and recomputed; and in which precision a step computes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mindspeed_mm_dit.configs.files import read_yaml
from mindspeed_mm_dit.configs.limits import Between, Positive, Section, shorten_repr
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError, PlatformError, nearest

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


ComputeMode = Literal["autocast", "fsdp2"]
"""How a step computes in bfloat16: autocast casts the inputs of each matrix product, or FSDP2 gathers bf16 weights."""
ComputeDtype = Literal["fp32", "bf16"]

_WORDS = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Precision:
    """The precision of each part of a training step."""

    compute: ComputeDtype = "fp32"
    """Precision of the matrix products, forward and backward."""
    mode: ComputeMode | None = None
    """How ``compute`` is achieved; None: without casts, in the precision of the weights."""
    reduce: ComputeDtype = "fp32"
    """Precision of the gradients while they are averaged over ranks."""

    def __str__(self) -> str:
        """Return a description for the log."""
        if self.mode is None:
            return "float32"
        how = {"autocast": "under autocast", "fsdp2": "by fsdp2.yaml"}[self.mode]
        return f"{_WORDS[self.compute]} {how}, weights float32, gradients averaged in {_WORDS[self.reduce]}"


FLOAT32 = Precision()
AUTOCAST = Precision("bf16", "autocast")
SHARDED_BF16 = Precision("bf16", "fsdp2")
"""The precision for ``param_dtype: bf16`` with ``reduce_dtype: fp32``."""


def decide_precision(
    bf16: bool, fsdp2: Fsdp2Config | None, supported: Collection[ComputeMode], where: str
) -> Precision:
    """Return the precision that --bf16 and fsdp2.yaml (None without --use-torch-fsdp2) request.

    supported: the bfloat16 modes of a training step; where: framework and device, for errors.

    Raises:
        ConfigError: flag and file contradict each other, or request float16, which needs loss scaling.
        PlatformError: this framework does not train in bfloat16 on this device.
    """
    for key in ("param_dtype", "reduce_dtype", "output_dtype") if fsdp2 else ():
        if getattr(fsdp2, key) == "fp16":
            raise ConfigError(
                f"fsdp2.yaml: {key} = 'fp16' needs loss scaling, which is not supported: small gradients would become "
                "zero. Use bf16, which has the range of float32, or fp32."
            )
    param_dtype = fsdp2.param_dtype if fsdp2 else None
    if bf16 and (param_dtype == "fp32" or (param_dtype is None and fsdp2 is not None and "autocast" not in supported)):
        raise ConfigError(
            f"--bf16 contradicts fsdp2.yaml, whose param_dtype is {param_dtype or 'null'}: training would be in "
            "float32. Set param_dtype: bf16 and reduce_dtype: fp32 in fsdp2.yaml, or drop --bf16."
        )
    mode: ComputeMode | None = "fsdp2" if param_dtype == "bf16" else "autocast" if bf16 else None
    if mode is not None and mode not in supported:
        setting = "--bf16" if bf16 else f"fsdp2.yaml: param_dtype = {param_dtype!r}"
        raise PlatformError(
            f"{setting} cannot be used: {where} does not train in bfloat16, only in float32. Drop it, or train with "
            "--ai-framework pytorch."
        )
    reduce = (fsdp2.reduce_dtype or param_dtype) if fsdp2 else None
    return Precision("bf16" if mode else "fp32", mode, "bf16" if reduce == "bf16" else "fp32")
