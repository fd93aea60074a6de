"""Train and sample diffusion transformers of images and videos, by class or by text (DiT, Peebles & Xie 2023)."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  # what stands in the other files an older one cannot even read
    print(f"error: Python 3.10 or newer is needed; {sys.executable} is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)

__version__ = "0.1.0"
