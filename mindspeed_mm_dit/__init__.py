"""Train and sample diffusion transformers (DiT, Peebles & Xie 2023) of images and videos, from classes or text.

In a shell: ``mm-dit`` lists its commands. In Python:

    import mindspeed_mm_dit as dit
    pipe = dit.load("outputs/digits")                      # the folder of a run, or weights in any format
    pipe.sample(classes=[3, 7], num=4).save("some.png")    # help(pipe.sample) explains every argument
    pipe = dit.create("digits")                            # a model.json: an untrained network
    pipe.loss(pixels, classes=labels).mean().backward()    # to train it in a loop of your own
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import create, load, prove, record_trace

__all__ = ["create", "load", "prove", "record_trace"]

if sys.version_info < (3, 10):  # noqa: UP036  # an older Python cannot even parse the other files
    print(f"error: Python 3.10 or newer is needed; {sys.executable} is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the functions of the Python API on first use."""
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the module, including the Python API, so that ``help`` documents it."""
    return sorted({*globals(), *__all__})
