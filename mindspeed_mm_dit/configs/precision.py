"""Decides the precision of a run, once, from --bf16, fsdp2.yaml and what the framework supports.

Weights, optimizer state and EMA are always float32.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.errors import ConfigError, PlatformError

ComputeMode = Literal["autocast", "fsdp2"]
"""How a step computes in bfloat16: autocast casts the inputs of each matrix product, or FSDP2 gathers bf16 weights."""
Dtype = Literal["fp32", "bf16"]

_WORDS = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Precision:
    """The precision of each part of a training step."""

    compute: Dtype = "fp32"
    """Precision of the matrix products, forward and backward."""
    mode: ComputeMode | None = None
    """How ``compute`` is achieved; None: without casts, in the precision of the weights."""
    reduce: Dtype = "fp32"
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
