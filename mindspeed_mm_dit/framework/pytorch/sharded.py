"""Tell whether a tensor or module is sharded, without the import of what shards: half of the time of PyTorch itself."""

from __future__ import annotations

import sys
from typing import Any


def is_sharded(x: Any) -> bool:
    """Return whether ``x`` is a DTensor; false as long as nobody has imported them."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def is_fsdp(module: Any) -> bool:
    """Return whether FSDP2 shards the parameters of ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
