"""The commands of ``mm-dit``: a line about each, and the module that is imported when it is chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from mindspeed_mm_dit.errors import not_installed
from mindspeed_mm_dit.registry import Registry


class Command(NamedTuple):
    """A command, before its module is imported."""

    summary: str
    """Its line in ``mm-dit --help``."""
    module: str
    """Module with DESCRIPTION, ``add_arguments(parser)`` and ``run(args)``, which returns the exit code."""
    extra: str = ""
    """Extra of setup.py with the packages it needs besides the core's; empty: none."""
    packages: Mapping[str, str] = {}
    """Those packages: module name -> name of the package to install."""

    def check(self, name: str) -> None:
        """Raise PlatformError unless the packages of the command, which is called ``name``, are installed."""
        for module, package in self.packages.items():
            if importlib.util.find_spec(module) is None:
                raise not_installed(f"mm-dit {name}", package, self.extra)


COMMANDS = Registry[Command]("command")
TRAIN = Command("train the model that a config folder describes", "mindspeed_mm_dit.cli.train")
SAMPLE = Command("generate images or videos with a trained model", "mindspeed_mm_dit.cli.sample")
CACHE_LATENTS = Command("encode a data set once, so that no training step has to", "mindspeed_mm_dit.cli.cache_latents")
EMA = Command("make an EMA of another width after a run has ended (post-hoc EMA)", "mindspeed_mm_dit.cli.ema")
