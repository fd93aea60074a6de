"""A lock on a folder of checkpoints: one run at a time may save into it. Needs no framework.

    .claim    the locked file; it holds whose run it is

The operating system holds the lock (flock): it ends with the process, however that ends. Whether it also holds
between machines is up to the file system: NFS does by Linux's documentation, Lustre if it is mounted with ``flock`` and
not with ``localflock`` (tested here on local disks only). On a file system without locks a run saves with a warning.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import getpass
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import logger

NAME = ".claim"
MAX_BYTES = 1000
"""What is read of a locked file, which holds one line."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What flock returns on a file system without locks, such as Lustre mounted without them."""


class FolderLock:
    """The lock of this run on ``folder``; held from :meth:`take` to :meth:`release` or the end of the process."""

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._path = Path(folder), Path(folder) / NAME
        self._descriptor: int | None = None

    def take(self) -> None:
        """Lock the folder; create it if it is missing.

        Raises:
            ConfigError: it belongs to a live run, or cannot be written to.
        """
        try:
            self.renew()
        except OSError as error:
            self.release()
            raise ConfigError(
                f"--save = {self._folder} cannot be written to: {error}. Choose another --save."
            ) from None
        # A copy in a process that reads data would hold the lock for as long as that process outlives this one.
        os.register_at_fork(after_in_child=self._close)
        atexit.register(self.release)

    def renew(self) -> None:
        """Check that the folder still belongs to this run; lock it again if someone has removed the file.

        Raises:
            ConfigError: another run has locked it since.
            OSError: the folder cannot be written to.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self.is_ours():
            self._lock()

    def release(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            if self.is_ours():
                self._path.unlink()
        self._close()

    def is_ours(self) -> bool:
        """Return whether this run holds the lock; raises OSError if the folder cannot be read."""
        try:
            return self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _lock(self) -> None:
        while not self.is_ours():  # the last holder may remove the file just before this run locks it
            self._close()
            if os.path.lexists(self._path) and not stat.S_ISREG(os.lstat(self._path).st_mode):  # a link, a pipe
                raise OSError(f"{self._path} is no regular file: remove it")
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                error = self._locked_error(descriptor)
                os.close(descriptor)
                raise error from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
                logger.warning(
                    f"warning: --save = {self._folder}: its file system has no locks ({error.strerror}): make sure "
                    "that no other run saves there"
                )
            self._descriptor = descriptor
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{_user()}'s run on {socket.gethostname()} (process {os.getpid()})\n".encode(), 0)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _locked_error(self, descriptor: int) -> ConfigError:
        owner = os.pread(descriptor, MAX_BYTES, 0).decode("utf-8", "replace").strip() or "another run"
        minutes = (time.time() - os.fstat(descriptor).st_mtime) / 60
        age = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
        return ConfigError(
            f"--save = {self._folder} belongs to {owner}, which began {age} ago. Choose another --save, or end that "
            "run."
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return f"user {os.getuid()}"
