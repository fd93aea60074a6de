"""Train and sample diffusion transformers of images and videos, by class or by text (DiT, Peebles & Xie 2023)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_mm_dit.api import create, load

__all__ = ["create", "load"]

if sys.version_info < (3, 10):  # noqa: UP036  # what stands in the other files an older one cannot even read
    print(f"error: Python 3.10 or newer is needed; {sys.executable} is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import what Python calls directly when it is first asked for."""
    if name in __all__:
        from mindspeed_mm_dit import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
