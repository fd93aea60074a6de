"""Two runs that want one folder: one has it, and the other is told by whom it is held."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from mindspeed_mm_dit.checkpoint import lock
from mindspeed_mm_dit.checkpoint.lock import FolderLock
from mindspeed_mm_dit.errors import ConfigError
from tests.conftest import ROOT

HOLD = "import sys; from mindspeed_mm_dit.checkpoint.lock import FolderLock; "
HOLD += "FolderLock(sys.argv[1]).take(); print('held', flush=True); input()"


@pytest.fixture
def holder(tmp_path):
    """Another process, which has locked the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "LOGNAME": "ada"})  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_locked_folder_is_refused_with_owner_host_and_age(tmp_path, holder):
    began = time.time() - 90 * 60
    os.utime(tmp_path / lock.NAME, (began, began))
    with pytest.raises(ConfigError) as refused:
        FolderLock(tmp_path).take()
    owner = f"ada's run on {socket.gethostname()} (process {holder.pid})"
    assert owner in str(refused.value) and "90 min" in str(refused.value)
    assert (tmp_path / lock.NAME).read_text() == f"{owner}\n"


def test_a_killed_run_is_taken_over_at_once(tmp_path, holder):
    """Nobody has waited for the process yet: it is a zombie, and still has its number."""
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    FolderLock(tmp_path).take()
    assert f"(process {os.getpid()})" in (tmp_path / lock.NAME).read_text()


def test_a_process_that_reads_data_does_not_hold_the_lock(tmp_path):
    held = FolderLock(tmp_path)
    held.take()
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        there.sendall(b"forked")
        there.recv(1)  # until this process closes its end
        os._exit(0)
    there.close()
    assert here.recv(6) == b"forked"
    held._close()  # as if this process had been killed, and its child lived on
    FolderLock(tmp_path).take()
    here.close()
    os.waitpid(child, 0)


def test_a_lock_is_gone_after_its_run(tmp_path, holder):
    holder.communicate("\n")
    assert holder.returncode == 0 and list(tmp_path.iterdir()) == []


def test_a_removed_lock_is_renewed_unless_another_run_has_one(tmp_path):
    held, other = FolderLock(tmp_path / "folder"), FolderLock(tmp_path / "folder")
    held.take()
    path = tmp_path / "folder" / lock.NAME
    path.unlink()
    (tmp_path / "folder").rmdir()
    held.renew()
    assert held.is_ours() and f"(process {os.getpid()})" in path.read_text()
    path.unlink()
    other.take()
    with pytest.raises(ConfigError, match="'s run"):
        held.renew()
    held.release()
    assert other.is_ours() and path.exists()
    other.release()
    assert not path.exists()


def test_one_of_many_that_take_a_folder_has_it(tmp_path):
    (tmp_path / lock.NAME).write_text("of a run that was killed")
    start, done = os.pipe(), os.pipe()
    children = [_child(tmp_path, start, done) for _ in range(8)]
    os.close(start[1])  # all of them begin
    results = b"".join(os.read(done[0], 1) for _ in children)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert sorted(results) == sorted(b"1" + b"0" * 7)
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


def _child(folder, start, done) -> int:
    """Start a process that tries to take ``folder``, writes a byte: whether it has it, and lives on."""
    child = os.fork()
    if child == 0:
        os.close(start[1])
        os.read(start[0], 1)
        held = FolderLock(folder)
        try:
            held.take()
            os.write(done[1], b"1")
        except ConfigError:
            os.write(done[1], b"0")
        signal.pause()
    return child


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    held = FolderLock(tmp_path)
    held.take()
    assert f"--save = {tmp_path}" in capsys.readouterr().err and held.is_ours()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(ConfigError, match="No space left on device"):
        FolderLock(tmp_path).take()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--save = .*file"):
        FolderLock(tmp_path / "file").take()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("gone"), os.mkfifo, os.mkdir])
def test_what_is_no_lock_file_is_named_at_once(tmp_path, make):
    make(tmp_path / lock.NAME)
    with pytest.raises(ConfigError, match=r"--save = .*\.claim"):
        FolderLock(tmp_path).take()


def test_an_unreadable_owner_is_respected(tmp_path, holder):
    for content, named in (
        (b"", "another run"), (b"\xff\x1b[2J", "\N{REPLACEMENT CHARACTER}\\x1b[2J"), (b"9" * 5000, "9" * 1000),
    ):  # fmt: skip
        (tmp_path / lock.NAME).write_bytes(content)
        with pytest.raises(ConfigError, match=rf" {re.escape(named)}\W.* 0 min"):
            FolderLock(tmp_path).take()
