"""Whether a tensor or a module is sharded, told without importing what shards: half of the time of PyTorch itself."""

from __future__ import annotations

import sys
from typing import Any


def is_sharded(x: Any) -> bool:
    """Return whether ``x`` is a DTensor; where nobody has imported them there is none."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def is_fsdp(module: Any) -> bool:
    """Return whether FSDP2 shards the parameters of ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
