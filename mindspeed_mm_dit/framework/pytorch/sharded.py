"""Check whether a tensor or module is sharded, without importing DTensor (half of PyTorch's own import time)."""

from __future__ import annotations

import sys
from typing import Any


def is_sharded(x: Any) -> bool:
    """Return whether ``x`` is a DTensor; false as long as DTensor has not been imported."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def is_fsdp(module: Any) -> bool:
    """Return whether FSDP2 shards the parameters of ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
