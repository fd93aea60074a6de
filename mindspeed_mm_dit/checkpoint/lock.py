"""A lock on a folder of checkpoints: one run at a time may save into it. Needs no framework.

    .claim    who saves here: user, host, process, start; touched every HEARTBEAT_SECONDS

On the owner's machine a lock ends with its process. Other machines see only its age, and take over a lock that has not
been touched for SILENCE_SECONDS. Ages are measured by the clock of the disk.
"""

from __future__ import annotations

import atexit
import getpass
import json
import os
import socket
import stat
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError, UserError

NAME = ".claim"
HEARTBEAT_SECONDS = 15.0
SILENCE_SECONDS = 300.0
"""Longer than anything, such as a compiler or a hanging disk, keeps a live process from touching its lock."""


@dataclass(frozen=True)
class Owner:
    """The run that saves into a folder."""

    user: str
    """Login name."""
    host: str
    """Name of the machine."""
    pid: int
    """The first rank's process."""
    process_started: str
    """When that process started, as the kernel counts time; empty if unknown."""
    machine: str
    """Host name, boot and PID namespace; empty if unknown."""
    started: float
    """When it locked the folder, in seconds since 1970."""

    @classmethod
    def here(cls) -> Owner:
        """Return this process as an owner."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container whose user has no name
            user = f"user {os.getuid()}"
        return cls(user, socket.gethostname(), os.getpid(), _started(os.getpid()), _machine(), time.time())

    def is_dead(self, silence: float) -> bool:
        """Return whether this owner will write no more; ``silence``: seconds since it touched its lock."""
        if self.machine and self.machine == _machine():
            if self.pid == os.getpid():
                return True  # an earlier process with this PID, or a lock that was not released
            return _started(self.pid) != self.process_started and not _is_hidden(self.pid)
        return silence > SILENCE_SECONDS

    def __str__(self) -> str:
        age = (time.time() - self.started) / 60
        return f"{self.user}'s run on {self.host} (process {self.pid}), which began {_duration(age)} ago"


class FolderLock:
    """The lock of this run on ``folder``; held from :meth:`take` to :meth:`release` or the end of the process."""

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._path = Path(folder), Path(folder) / NAME
        self._content = b""
        self._ended = threading.Event()

    def take(self) -> None:
        """Lock the folder; create it if it is missing.

        Raises:
            ConfigError: it belongs to a live run, or cannot be written to.
        """
        self._content = json.dumps(asdict(Owner.here()), indent=1).encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._remove_stale()
        except OSError as error:
            raise ConfigError(
                f"--save = {self._folder}", f"cannot be written to: {error}", "choose another --save"
            ) from None
        atexit.register(self.release)
        threading.Thread(target=self._beat, name="checkpoint lock", daemon=True).start()

    def keep(self) -> None:
        """Check that the folder still belongs to this run; renew the lock if someone has removed it.

        Raises:
            ConfigError: another run took it over, as this one was silent for too long.
            OSError: the folder cannot be written to.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._create() and self._read() != self._content:
            raise self._refusal(_owner(self._read()))

    def release(self) -> None:
        """Release the lock."""
        self._ended.set()
        with suppress(OSError):
            if self.is_ours():
                self._path.unlink()

    def is_ours(self) -> bool:
        """Return whether this run holds the lock; raises OSError if the lock cannot be read."""
        return bool(self._content) and self._read() == self._content

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                if self.is_ours():
                    os.utime(self._path)

    def _create(self) -> bool:
        """Write the lock; return False if there already is one."""
        try:
            file = open(self._path, "xb")  # noqa: SIM115 (closed below; removed if it cannot be written)
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._content)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _remove_stale(self) -> None:
        """Remove the lock of a dead owner; raise ConfigError if the owner lives."""
        with suppress(FileNotFoundError):  # released, or removed by another run that takes the folder
            content = self._read()
            owner, silence = _owner(content), self._silence()
            if not (owner.is_dead(silence) if owner else silence > SILENCE_SECONDS):
                raise self._refusal(owner, silence)
            aside = self._path.with_name(f"{NAME}.{uuid.uuid4().hex}")
            os.rename(self._path, aside)  # only one of several runs succeeds
            if aside.read_bytes() != content:  # it moved the new lock of a faster run: put it back
                os.rename(aside, self._path)
            else:
                aside.unlink()

    def _silence(self) -> float:
        """Return the seconds since the lock was touched, by the clock of the disk."""
        with tempfile.TemporaryFile(dir=self._folder) as fresh:
            return os.fstat(fresh.fileno()).st_mtime - self._path.stat().st_mtime

    def _read(self) -> bytes:
        if not stat.S_ISREG(self._path.lstat().st_mode):  # a link to nothing, a pipe
            raise OSError(f"{self._path} is no regular file: remove it")
        return self._path.read_bytes()

    def _refusal(self, owner: Owner | None, silence: float = 0.0) -> ConfigError:
        return ConfigError(
            f"--save = {self._folder}",
            f"belongs to {owner or 'a run that does not say whose it is'}; last sign of life {silence:.0f} s ago",
            "choose another --save, or end that run. On another machine a run that was killed is taken over after "
            f"{_duration(SILENCE_SECONDS / 60)} without a sign of life",
        )


def _owner(content: bytes) -> Owner | None:
    try:
        return from_mapping(Owner, json.loads(content), NAME)
    except (ValueError, RecursionError, UserError):
        return None


def _duration(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _started(pid: int) -> str:
    """Return when a process started; empty if it has ended (a zombie counts as ended)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def _is_hidden(pid: int) -> bool:
    """Return whether a process is alive, but its /proc entry is hidden from this user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not os.path.exists(f"/proc/{pid}")
    except (OSError, OverflowError):
        return False
    return False


def _machine() -> str:
    """Return a value that is equal for two processes that see each other's PIDs; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
