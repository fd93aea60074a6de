"""Two runs that want one folder: one has it, and the other is told by whom it is held."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from mindspeed_mm_dit.checkpoint import lock
from mindspeed_mm_dit.checkpoint.lock import FolderLock, Owner
from mindspeed_mm_dit.errors import ConfigError


@pytest.fixture
def other():
    """Another process of this machine, as an owner, and the process."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = lock._started(process.pid)
    yield dataclasses.replace(Owner.here(), user="ada", pid=process.pid, process_started=started), process
    process.kill()
    process.wait()


def hold(folder, owner: Owner, silence: float = 0.0) -> None:
    (folder / lock.NAME).write_text(json.dumps(dataclasses.asdict(owner)))
    touched = (folder / lock.NAME).stat().st_mtime - silence
    os.utime(folder / lock.NAME, (touched, touched))


def test_a_folder_of_a_run_that_lives_is_refused_with_owner_host_and_age(tmp_path, other):
    owner, _ = other
    hold(tmp_path, dataclasses.replace(owner, started=owner.started - 90 * 60), silence=10_000)
    with pytest.raises(ConfigError) as refused:
        FolderLock(tmp_path).take()
    expected = rf"ada's run on {re.escape(owner.host)} \(process {owner.pid}\), which began 90 min ago"
    assert re.search(expected, str(refused.value))


def test_a_run_that_was_killed_is_taken_over_at_once(tmp_path, other):
    """Nobody has waited for the process yet: it is a zombie, and still has its number."""
    owner, process = other
    hold(tmp_path, owner)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    FolderLock(tmp_path).take()
    assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == os.getpid()


def test_a_number_that_another_process_has_now_does_not_keep_a_claim(tmp_path, other):
    hold(tmp_path, dataclasses.replace(other[0], process_started="1"))
    FolderLock(tmp_path).take()


@pytest.mark.parametrize(("more", "taken"), [(-60, False), (60, True)])
@pytest.mark.parametrize("readable", [True, False])
def test_of_another_machine_only_the_silence_counts(tmp_path, other, more, taken, readable):
    silence = lock.SILENCE_SECONDS + more
    hold(tmp_path, dataclasses.replace(other[0], host="far", machine="far"), silence)
    if not readable:  # its writer was interrupted
        (tmp_path / lock.NAME).write_bytes(b"")
        os.utime(tmp_path / lock.NAME, ((tmp_path / lock.NAME).stat().st_mtime - silence,) * 2)
    if taken:
        FolderLock(tmp_path).take()
    else:
        with pytest.raises(ConfigError, match="far" if readable else "does not say whose it is"):
            FolderLock(tmp_path).take()


def test_a_claim_is_touched_while_the_run_lives_and_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    held = FolderLock(tmp_path / "new")
    held.take()
    path = tmp_path / "new" / lock.NAME
    os.utime(path, (1, 1))
    for _ in range(1000):
        if path.stat().st_mtime > 1:
            break
        held._ended.wait(0.01)
    assert path.stat().st_mtime > 1
    held.release()
    assert not path.exists()


def test_a_claim_that_was_removed_is_renewed_and_one_that_was_taken_over_is_not(tmp_path, other):
    held = FolderLock(tmp_path / "folder")
    held.take()
    (tmp_path / "folder" / lock.NAME).unlink()
    (tmp_path / "folder").rmdir()
    held.keep()
    assert json.loads((tmp_path / "folder" / lock.NAME).read_text())["pid"] == os.getpid()
    hold(tmp_path / "folder", other[0])
    with pytest.raises(ConfigError, match="ada's run"):
        held.keep()
    held.release()
    assert (tmp_path / "folder" / lock.NAME).exists()


def test_of_many_that_take_over_a_dead_claim_one_has_it(tmp_path, other):
    hold(tmp_path, dataclasses.replace(other[0], process_started="1"))
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
    """Start a process that tries to take ``folder``, says in a byte whether it has it, and lives on."""
    child = os.fork()
    if child == 0:
        os.close(start[1])
        os.read(start[0], 1)
        try:
            FolderLock(folder).take()
            os.write(done[1], b"1")
        except ConfigError:
            os.write(done[1], b"0")
        signal.pause()
    return child


def test_a_claim_that_cannot_be_written_leaves_the_folder_free(tmp_path, monkeypatch):
    def full(path, mode="r", **options):
        if mode != "xb":
            return open(path, mode, **options)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return open("/dev/full", "wb", buffering=0)

    with monkeypatch.context() as disk:
        disk.setattr(lock, "open", full, raising=False)
        with pytest.raises(ConfigError, match="No space left on device"):
            FolderLock(tmp_path).take()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_stands_in_the_place_of_a_claim_and_is_none_is_named_at_once(tmp_path, kind):
    place = tmp_path / lock.NAME
    {"link": lambda: place.symlink_to("gone"), "pipe": lambda: os.mkfifo(place), "folder": place.mkdir}[kind]()
    with pytest.raises(ConfigError, match=r"--save = .*\.claim is no regular file: remove it"):
        FolderLock(tmp_path).take()


def test_a_claim_that_nobody_can_read_is_respected(tmp_path):
    for content in ("[" * 100_000, '{"pid": "x"}', "9" * 5000, "null"):
        (tmp_path / lock.NAME).write_text(content)
        with pytest.raises(ConfigError, match="belongs to a run that does not say whose it is"):
            FolderLock(tmp_path).take()
