"""Train and sample diffusion transformers (DiT, Peebles & Xie 2023) of images and videos, from classes or text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_mm_dit.api import create, load, prove, witness

__all__ = ["create", "load", "prove", "witness"]

if sys.version_info < (3, 10):  # noqa: UP036  # an older Python cannot even parse the other files
    print(f"error: Python 3.10 or newer is needed; {sys.executable} is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the functions of the Python API on first use."""
    if name in __all__:
        from mindspeed_mm_dit import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
