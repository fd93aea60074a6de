"""Disks that fail, fill up or change what they were given: what was saved is what is read, and a run goes on."""

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint import checksums, mindspore_ckpt, torch_dcp
from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.checkpoint.lock import FolderLock
from mindspeed_mm_dit.checkpoint.store import BackgroundWriter, CheckpointStore, read_facts, write_error
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.training import progress as progress_module
from mindspeed_mm_dit.training.progress import locked_save_folder, open_progress
from tests.conftest import run_config

WEIGHTS = {f"w{i}": np.arange(60, dtype=np.float32).reshape(5, 12) + i for i in range(3)}


def write_torch(path: Path) -> None:
    torch_dcp.write({"model": {name: torch.from_numpy(array) for name, array in WEIGHTS.items()}}, path)


def write_mindspore(path: Path) -> None:
    mindspore_ckpt.write(path, {f"model.{name}": array for name, array in WEIGHTS.items()})


FRAMEWORKS = {"pytorch": (write_torch, torch_dcp), "mindspore": (write_mindspore, mindspore_ckpt)}


def save(root: Path, framework: str, iteration: int = 1) -> Path:
    store = CheckpointStore(root)
    FRAMEWORKS[framework][0](store.begin(iteration))
    return store.commit(iteration, {"iteration": iteration})


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << byte % 8
    path.write_bytes(content)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_file_has_its_checksum_and_a_flipped_bit_anywhere_is_found(tmp_path, framework):
    path = save(tmp_path, framework)
    files = {file.name for file in path.iterdir()} - {checksums.FILE}
    assert checksums.read(path).keys() == files and {"run.json"} < files
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for byte in range(0, len(good), max(1, len(good) // 40)):
            flip(file, byte)
            problem = FRAMEWORKS[framework][1].find_damage(path)
            assert problem is not None and (file.name in problem or file.name == checksums.FILE), (file.name, byte)
            file.write_bytes(good)
    assert FRAMEWORKS[framework][1].find_damage(path) is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_commands(tmp_path, framework):
    save(tmp_path, framework)
    data = next(file for file in save(tmp_path, framework, 2).iterdir() if file.suffix in (".distcp", ".ckpt"))
    flip(data, data.stat().st_size // 2)
    found, passed = CheckpointStore(tmp_path).latest(FRAMEWORKS[framework][1].find_damage)
    assert found == 1 and data.name in passed[0]
    for read in (lambda: read_weights(data.parent), lambda: convert(tmp_path, tmp_path / "w.safetensors")):
        with pytest.raises(CheckpointError, match=rf"iter_0000002.*{data.name}"):
            read()
    flip(tmp_path / "iter_0000001/run.json", 1)  # read before weights; without it a command would ask for --model
    with pytest.raises(CheckpointError, match=r"iter_0000001.*run\.json"):
        read_facts(tmp_path / "iter_0000001")


def test_ranks_share_the_reading_and_each_finds_a_damaged_index(tmp_path):
    """An index is a pickle: read damaged, it may raise anything, on the ranks alone that have not compared it."""
    path = save(tmp_path, "pytorch")
    index = (path / ".metadata").read_bytes()
    for byte in range(0, len(index), 29):
        flip(path / ".metadata", byte)
        assert all(".metadata" in torch_dcp.find_damage(path, rank, 2) for rank in (0, 1))
        (path / ".metadata").write_bytes(index)
    flip(path / "__0_0.distcp", 100)
    found = [torch_dcp.find_damage(path, rank, 3) for rank in range(3)]
    assert len(checksums.read(path)) == 3 and found.count(None) == 2


def test_checkpoint_without_checksums_is_read_unless_truncated(tmp_path):
    path = save(tmp_path, "pytorch")
    (path / checksums.FILE).unlink()
    data = next(file for file in path.iterdir() if file.suffix == ".distcp")
    np.testing.assert_array_equal(read_weights(path)["w1"], WEIGHTS["w1"])
    data.write_bytes(data.read_bytes()[:-10])
    assert data.name in torch_dcp.find_damage(path)


class Writer(BackgroundWriter):
    error: OSError | None = None

    def write(self, state, path, when_complete):
        def work():
            (path / "data").write_text("half of it")
            if self.error:
                raise self.error
            when_complete()

        self.thread = threading.Thread(target=self._finish, args=(work, path))
        self.thread.start()

    def _join(self):
        if hasattr(self, "thread"):
            self.thread.join()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The progress of a run of one rank that saves into ``tmp_path / "save"``."""
    monkeypatch.setattr(progress_module, "run_facts", lambda args, iteration, consumed: {"iteration": iteration})
    checkpoints = SimpleNamespace(Writer=Writer, entries_for_mindspeed_mm=lambda facts, predictor: {})
    args = run_config(save=str(tmp_path / "save"), keep_last=2, save_retain_interval=None, no_async_save=False,
                     no_save_optim=False, global_batch_size=8,
                     mm=SimpleNamespace(model=SimpleNamespace(predictor=None)))  # fmt: skip
    with locked_save_folder(args) as claim:
        yield open_progress(args, SimpleNamespace(state=lambda with_optimizer: {}), checkpoints, claim, None)


def steps(progress, count: int) -> None:
    for _ in range(count):
        progress.advance()
        progress.try_save()
        progress._writer._join()


def full_disk():
    return mock.patch.object(Writer, "error", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def test_a_save_that_fails_is_said_at_once_and_costs_only_itself(run, tmp_path, capsys):
    steps(run, 1)
    with full_disk():
        steps(run, 1)
    said = capsys.readouterr().out
    assert said.count("OSError: [Errno 28]") == 1 and "GiB" in said
    assert not list((tmp_path / "save").glob(".iter_*.partial"))
    steps(run, 1)
    run.finish()
    assert CheckpointStore(tmp_path / "save").iterations() == [1, 3]
    assert "OSError" not in capsys.readouterr().out


def test_a_full_disk_is_said_in_words_where_pytorch_names_a_line_of_its_own(tmp_path):
    torn, of_a_rank = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), Exception()
    of_a_rank.failures = {1: (torn, None)}
    for error in (torn, of_a_rank):
        assert "a file on the disk is shorter" in str(write_error(error, tmp_path))
    torn.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert "OSError: [Errno 28]" in str(write_error(torn, tmp_path))


def test_a_last_save_that_fails_is_the_end_with_an_error_and_the_one_before_stays(run, tmp_path):
    steps(run, 1)
    run.advance()
    with full_disk(), pytest.raises(CheckpointError, match="Errno 28") as caught:
        run.finish()
    assert caught.value.is_shared and CheckpointStore(tmp_path / "save").iterations() == [1]


def test_a_read_only_disk_costs_the_saves_while_it_is_one(run, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    steps(run, 1)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "mkdir", refuse)
        steps(run, 2)
        assert capsys.readouterr().out.count("Read-only file system") == 2
    run.finish()
    assert CheckpointStore(tmp_path / "save").iterations() == [1, 3]


def test_a_folder_that_is_removed_is_made_again_and_one_that_became_a_file_is_said(run, tmp_path, capsys):
    steps(run, 1)
    shutil.rmtree(tmp_path / "save")
    steps(run, 1)
    assert CheckpointStore(tmp_path / "save").iterations() == [2]
    shutil.rmtree(tmp_path / "save")
    (tmp_path / "save").write_text("a file")
    steps(run, 1)
    assert "FileExistsError" in capsys.readouterr().out
    (tmp_path / "save").unlink()
    run.finish()
    assert CheckpointStore(tmp_path / "save").iterations() == [3]


def test_what_another_run_is_writing_stays_where_it_took_the_folder_over(run, tmp_path, capsys):
    steps(run, 1)
    (tmp_path / "save" / ".claim").unlink()
    other = FolderLock(tmp_path / "save")
    other.take()
    CheckpointStore(tmp_path / "save").begin(7)
    steps(run, 1)
    assert "belongs to" in capsys.readouterr().out
    assert (tmp_path / "save" / ".iter_0000007.partial").is_dir()
    with pytest.raises(ConfigError, match="belongs to"):
        run.finish()


def test_a_checkpoint_of_which_a_file_lies_on_another_disk_is_not_published(tmp_path):
    store = CheckpointStore(tmp_path)
    write_torch(store.begin(1))
    (elsewhere,) = store.partial_path(1).glob("*.distcp")
    elsewhere.unlink()
    with pytest.raises(OSError, match="share this disk"):
        store.commit(1, {})
    assert store.iterations() == []
