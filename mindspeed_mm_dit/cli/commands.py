"""The commands of ``mm-dit``: a line about each, and the module that is imported when it is chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from mindspeed_mm_dit.errors import not_installed
from mindspeed_mm_dit.registry import Joined, join


class Command(NamedTuple):
    """A command, before its module is imported."""

    summary: str
    """Its line in ``mm-dit --help``."""
    module: str
    """Has DESCRIPTION, ``add_arguments(parser)`` and ``run(args)``, which returns the exit code."""
    extra: str = ""
    """Extra of setup.py that brings what it needs beside the core's packages; empty: nothing."""
    packages: Mapping[str, str] = {}
    """What it needs: name of a module -> of the package to install."""

    def check(self, name: str) -> None:
        """Raise PlatformError unless the packages of the command, which is called ``name``, are installed."""
        for module, package in self.packages.items():
            if importlib.util.find_spec(module) is None:
                raise not_installed(f"mm-dit {name}", package, self.extra)


COMMANDS = Joined[Command]("command")
for _name, _summary in {
    "train": "train the model that a config folder describes",
    "sample": "generate images or videos with a trained model",
    "cache-latents": "encode a data set once, so that no training step has to",
    "convert": "write a checkpoint in another format",
    "ema": "make an EMA of another width after a run has ended (post-hoc EMA)",
}.items():
    join("command", _name, Command(_summary, f"mindspeed_mm_dit.cli.{_name.replace('-', '_')}"))
