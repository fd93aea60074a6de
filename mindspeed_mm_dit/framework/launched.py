"""The launcher that started this process, torchrun or msrun: its variables, and how the process ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm_dit.configs.environment import integer_variable
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class LaunchVariables:
    """Names of the environment variables that set the rank of a process, for one framework."""

    rank: str
    """Rank of this process."""
    world_size: str
    """Number of processes."""
    required: tuple[str, ...]
    """Variables that each process also needs if there are several."""


LAUNCH_VARIABLES = {
    "pytorch": LaunchVariables("RANK", "WORLD_SIZE", ("RANK", "MASTER_ADDR", "MASTER_PORT")),
    "mindspore": LaunchVariables("RANK_ID", "MS_WORKER_NUM", ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT")),
}

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PREFIXES = (
    "MS_",
    "TORCHELASTIC_",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "MASTER_",
)


def launched_alone() -> None:
    """Set torchrun's variables for a single process, unless a launcher has set them."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of torchrun and msrun."""
    return {name: value for name, value in environment.items() if not name.startswith(_PREFIXES)}


def check_launched(environment: Mapping[str, str], framework: str) -> None:
    """Check that a launcher's variables are complete: with some of them, a process waits for others that never come.

    Raises:
        ConfigError: a variable is missing, or contradicts another; the error names it.
    """
    names = LAUNCH_VARIABLES[framework]
    world_size = integer_variable(environment, names.world_size, 1, 1)
    rank = integer_variable(environment, names.rank, 0, 0)
    cure = "start it with mm-dit train, torchrun or msrun, or unset the variable that is left in the shell: unset {}"
    if rank >= world_size:
        raise ConfigError(
            f"{names.rank} = {rank}",
            f"there is no such process: {names.world_size} is {environment.get(names.world_size, 'not set')}",
            cure.format(names.rank),
        )
    missing = [name for name in names.required if not environment.get(name)]
    if world_size > 1 and missing:
        raise ConfigError(
            f"{names.world_size} = {world_size}",
            f"the process would wait for others it cannot find: {', '.join(missing)} not set",
            cure.format(names.world_size),
        )


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """Ask the kernel for SIGTERM when the launcher dies, even if it is killed: no rank continues alone.

    This applies to launchers that wait for their processes: torchrun, and msrun with --join. A process that was started
    otherwise may outlive its parent.
    """
    launcher = os.getppid()
    under_msrun = environment.get("MS_ROLE") == "MS_WORKER" and _joins(launcher)
    if not under_msrun and "TORCHELASTIC_RUN_ID" not in environment:
        return
    die_with_parent(signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the request
        signal.raise_signal(signal.SIGTERM)


def die_with_parent(number: signal.Signals) -> None:
    """On Linux, ask the kernel to send this process ``number`` when its parent dies."""
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(_PR_SET_PDEATHSIG, number.value)


def _joins(pid: int) -> bool:
    """Return whether process ``pid`` is an msrun that waits for its workers."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"\0--join=True\0" in words or b"\0--join\0True\0" in words
