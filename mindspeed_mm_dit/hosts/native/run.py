"""The run that the engine is about to do, read from its yaml and checked before anything is built."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.native.settings import flags_of, fsdp2_of, lookup, recomputed
from mindspeed_mm_dit.hosts.native.values import checked_values


class Run:
    """One run: what the yaml says in the words of our flags (``flags.mm``: the config files), and how far it is."""

    def __init__(self, flags: RunConfig, recomputed: Sequence[str]) -> None:
        self.flags, self.recomputed = flags, recomputed
        self.consumed_samples = 0
        """Position that training begins at."""
        self.model: Any = None
        """The ``TrainedPredictor``, once it is built."""
        self.first_lr: float | None = None
        """Learning rate of the first step of a resumed run; None once it is taken."""
        self.saved: int | None = None
        """The iteration that training.save is known to hold as it is now."""
        self.meeting = contextlib.ExitStack()
        """What holds until the ranks have met."""

    @property
    def autocast(self) -> bool:
        """Whether matrix products cast their inputs to bfloat16 (with FSDP2 ``param_dtype`` does it)."""
        precision = self.flags.mm.precision
        return precision is not None and precision.way == "autocast"


_current: Run | None = None


def current() -> Run:
    """Return the run of this process."""
    assert _current is not None, "the engine has not imported the plugin"
    return _current


def begin(argv: Sequence[str]) -> None:
    """Read and check the run that ``argv``, the engine's command line, asks for.

    Raises:
        UserError: whatever is wrong, with setting, value, reason and cure.
    """
    global _current
    from mindspeed_mm_dit.hosts.native.preflight import check

    read = engine_arguments(argv)
    flags = checked_values(flags_of(read, lookup), argv[1], runtime.world_size())
    flags = replace(flags, mm=check(read, flags, fsdp2_of(read)))
    _current = Run(flags, recomputed(read))


def engine_arguments(argv: Sequence[str]) -> Any:
    """Return the engine's own reading of its command line and the yaml there, whose keys are checked before.

    Raises:
        ConfigError: naming the key.
    """
    from mindspeed_mm.config.config_manager import ConfigManager
    from mindspeed_mm.config.exception import ConfigValidationError
    from mindspeed_mm.fsdp.params.argument import Arguments

    from mindspeed_mm_dit.hosts.native.keys import check_keys, refused

    if len(argv) < 2 or not argv[1].endswith((".yaml", ".yml")):
        raise ConfigError("command line", "names no yaml", "trainer.py CONFIG.yaml")
    check_keys(argv[1])
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # (it prints the whole of it, and the trainer does so too)
            return ConfigManager(config_class=Arguments).load_and_parse()
    except ConfigValidationError as error:
        raise refused(argv[1], error.__cause__ or error) from None
