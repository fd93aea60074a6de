import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.checkpoint import store as stores
from mindspeed_mm_dit.checkpoint.store import BEST, RUN_FACTS, TRACKER, CheckpointStore, find_checkpoint, read_facts
from mindspeed_mm_dit.configs.limits import MAX_SAMPLES
from mindspeed_mm_dit.errors import CheckpointError


def write(store: CheckpointStore, iteration: int) -> None:
    (store.begin(iteration) / "data").write_text(str(iteration))
    store.commit(iteration, {"iteration": iteration})


def folders(place):
    return sorted(path.name for path in place.iterdir() if path.is_dir())


def test_checkpoint_is_invisible_until_it_is_complete(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 10)
    (store.begin(20) / "half").touch()
    assert store.iterations() == [10] and (tmp_path / TRACKER).read_text() == "10"
    assert list(store.begin(20).iterdir()) == []  # what a killed save left is no part of the next
    store.commit(20, {})
    assert store.iterations() == [10, 20] and (tmp_path / TRACKER).read_text() == "20"
    store.begin(30)
    store.remove_unfinished()
    assert folders(tmp_path) == ["iter_0000010", "iter_0000020"]
    for iteration in (10, 20):  # one that was set aside for one that never came comes back
        store.path(iteration).rename(tmp_path / f".iter_{iteration:07}.old.partial")
    write(store, 20)
    store.remove_unfinished()
    assert folders(tmp_path) == ["iter_0000010", "iter_0000020"]


@pytest.mark.parametrize(("flags", "written", "kept"), [
    ({}, [1, 2, 3, 4], [3, 4]),
    ({"keep_last": 2}, [1, 2, 3, 4], [3, 4]),
    ({"keep_last": 2}, [30, 40, 5, 10, 15], [10, 15, 30, 40]),  # a run that was resumed from the start
    ({"keep_last": 1, "retain_interval": 20}, [10, 20, 30, 40, 45, 50], [20, 40, 50]),
])  # fmt: skip
def test_last_checkpoints_are_kept(tmp_path, flags, written, kept):
    store = CheckpointStore(tmp_path, **flags)
    for iteration in written:
        write(store, iteration)
    assert store.iterations() == kept
    assert read_facts(store.path(kept[0])) == {"iteration": kept[0]}
    assert (store.path(kept[0]) / RUN_FACTS).read_text() == f'{{\n "iteration": {kept[0]}\n}}\n'


def test_the_best_is_kept_until_there_is_a_better_one(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    pytest.raises(CheckpointError, find_checkpoint, tmp_path / "best").match("best does not exist")
    for iteration, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        store.begin(iteration)
        store.commit(iteration, {BEST: {"iteration": best, "loss": 0.5}} if best else {})
        if best is None:
            pytest.raises(CheckpointError, find_checkpoint, tmp_path / "best").match("no best")
        else:
            assert store.iterations() == sorted({best, iteration})
            assert find_checkpoint(tmp_path / "best") == store.path(best)
            assert read_facts(store.path(iteration))[BEST]["iteration"] == best
    for text, message in (("2", "iter_0000002"), ("two", "no best")):  # gone, or no number
        (tmp_path / stores.BEST_TRACKER).write_text(text)
        pytest.raises(CheckpointError, find_checkpoint, tmp_path / "best").match(message)
    store = CheckpointStore(tmp_path / "other")
    store.begin(3)
    store.commit(3, {BEST: {"iteration": 2, "loss": 0.5}})  # (whose write had failed)
    assert not (tmp_path / "other" / stores.BEST_TRACKER).exists()


def test_damaged_checkpoint_is_passed_over_and_not_counted_among_the_last(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    assert store.latest(lambda path: None) == (None, [])
    write(store, 1)
    write(store, 2)
    iteration, passed = store.latest(lambda path: "cut short" if path.name.endswith("2") else None)
    assert iteration == 1 and "iter_0000002" in passed[0] and "cut short" in passed[0]
    pytest.raises(CheckpointError, store.latest, lambda path: "empty").match("no checkpoint")
    store = CheckpointStore(tmp_path, keep_last=2)
    for iteration in (10, 20):  # the second is damaged: the run goes on from the first
        write(store, iteration)
    store.mark_newer_as_stale(10)
    for iteration, kept in ((15, [10, 15, 20]), (25, [15, 20, 25]), (30, [20, 25, 30])):
        write(store, iteration)
        assert store.iterations() == kept
    store.mark_newer_as_stale(10)
    write(store, 20)  # again, and whole
    write(store, 21)
    assert store.iterations() == [20, 21, 25, 30]


def test_rewrite_replaces_the_earlier_checkpoint_or_leaves_it(tmp_path, monkeypatch):
    store, rename = CheckpointStore(tmp_path), os.rename
    write(store, 5)
    write(store, 5)

    def fails(source, target):
        if source == store.partial_path(5):
            raise OSError("no space")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    pytest.raises(OSError, write, store, 5).match("no space")
    assert (store.path(5) / "data").read_text() == "5"


def test_classes_of_a_run_are_those_of_its_newest_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    assert stores.read_classes(None) == stores.read_classes("") == stores.read_classes(tmp_path) == ()
    for iteration, facts in enumerate(({"classes": ["cat"]}, {"classes": ["cat", "dog"]}, {"classes": 3}), 1):
        store.begin(iteration)
        store.commit(iteration, facts)
    assert stores.read_classes(tmp_path) == ("cat", "dog")
    write(store, 4)
    assert stores.read_classes(tmp_path) == ()  # (of captions)


def test_reader_during_a_run_finds_a_whole_checkpoint(tmp_path, monkeypatch):
    """A run saves, and deletes what was the newest, while that is read."""
    store, seen = CheckpointStore(tmp_path, keep_last=1), []
    write(store, 5)

    def read(path):
        seen.append(path.name)
        if len(seen) == 1:
            write(store, 6)
        return (path / "data").read_text()

    assert stores.read_newest(tmp_path, "--checkpoint", read) == "6" and seen == ["iter_0000005", "iter_0000006"]
    shutil.rmtree(store.path(6))
    gone = pytest.raises(CheckpointError, stores.read_newest, store.path(6), "--checkpoint", read)
    gone.match(r"--checkpoint = .*iter_0000006 does not exist")
    write(store, 7)
    (store.path(7) / "data").unlink()
    pytest.raises(FileNotFoundError, stores.read_newest, tmp_path, "--checkpoint", read)  # (by no run: it is damaged)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    write(store, 8)  # (a checkpoint goes by its name before its files do)
    assert store.iterations() == [8] and store.partial_path(7).exists()


def test_a_copy_without_hidden_files_is_named_by_what_it_lacks(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)
    (store.path(1) / "__0_0.distcp").touch()
    for path in (tmp_path, store.path(1)):
        pytest.raises(CheckpointError, find_checkpoint, path).match(r"iter_0000001.*\.metadata")


@pytest.mark.parametrize("name", ["file", "iter_0000001", "iter_0000002", "renamed"])
def test_what_is_no_folder_of_checkpoints_is_no_fresh_start(tmp_path, name):
    (tmp_path / "file").touch()
    write(CheckpointStore(tmp_path), 1)
    (tmp_path / "iter_0000002").mkdir()  # of another program, without the facts of a run
    (tmp_path / "renamed").mkdir()
    (tmp_path / "renamed" / RUN_FACTS).write_text("{}")
    refused = pytest.raises(CheckpointError, CheckpointStore(tmp_path / name).latest, lambda path: None)
    refused.match("is a file" if name == "file" else "is one")


def test_files_are_synced_before_a_checkpoint_becomes_visible(tmp_path, monkeypatch):
    """Else a power cut could leave the name of a file without its content."""
    synced, moved = set(), []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor):
        synced.add((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def noting_replace(source, target):
        moved.append((os.path.basename(target), (os.stat(source).st_ino, os.stat(source).st_size) in synced))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    write(CheckpointStore(tmp_path), 7)
    assert [own for own in moved if own[0] in (RUN_FACTS, TRACKER)] == [(RUN_FACTS, True), (TRACKER, True)]


NO_FACTS = [b"[1, 2]", b"null", b"{", b"", b"[" * 100_000, '{"a": 2}'.encode("utf-16"), b'{"n": ' + b"9" * 5000 + b"}"]
ALPHA = {"base": "a", "--lora-target-modules": ["qkv"], "--lora-r": 8, "--lora-alpha": 16}
ODD = [("iteration", -7), ("iteration", "two"), ("iteration", 3), ("iteration", True), ("consumed_samples", "x"),
       ("consumed_samples", 10**30), ("consumed_samples", -1), ("consumed_samples", MAX_SAMPLES + 1),
       ("consumed_samples", True), ("consumed_samples", 1.0), ("model", [1]), ("model", None), ("classes", 5),
       ("classes", {"a": 1}), ("classes", [1, 2]), ("seed", -1), ("seed", 1.5),
       ("adapters", ALPHA | {"--lora-alpha": "many"}), ("adapters", ALPHA | {"--lora-alpha": 10**400}),
       ("adapters", ALPHA | {"--lora-alpha": -1}), ("adapters", ALPHA | {"--lora-r": [8]}), ("adapters", {"base": "a"}),
       ("captions", [None]), ("settings", []), ("command", "train"),
       ("best", {"iteration": 1, "loss": math.nan}), ("best", {"iteration": 1, "loss": "low"}),
       ("power_ema_stds", "x"), ("power_ema_stds", [0.05, 7])]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ODD)
def test_impossible_fact_is_refused_with_its_key(tmp_path, key, value):
    path = tmp_path / "iter_0000002"
    path.mkdir()
    (path / RUN_FACTS).write_text(json.dumps({"iteration": 2, "consumed_samples": 16, key: value}))
    pytest.raises(CheckpointError, read_facts, path).match(rf"run\.json.* {key} = ")


class Writer(stores.BackgroundWriter):
    """Has nothing to wait for."""

    _join = staticmethod(lambda: None)


def test_failures_of_writers_and_readers_tell_their_first_cause(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("writer failed\nat line 1") from OSError(28, "No space left on device")

    told = []
    writer = Writer(in_background=True, when_failed=told.append)
    writer._finish(fail, tmp_path / "iter_0000001")
    (problem,) = told
    assert "OSError: [Errno 28] No space left" in str(problem)
    assert writer.wait() is problem and writer.wait() is None
    gone, of_format = FileNotFoundError(2, "No such file", "x"), ValueError("bad header\nframes")
    of_format.__context__ = RuntimeError("between")
    of_format.__context__.__cause__ = gone
    collected = Exception("many ranks")
    collected.failures = {1: (of_format, "traceback"), 2: (ValueError("other"), "traceback")}
    plain = ValueError("bad header\nframes")
    for problem, words in ((of_format, "FileNotFoundError: [Errno 2]"), (collected, "FileNotFoundError: [Errno 2]"),
                           (plain, "ValueError: bad header")):  # fmt: skip
        said = str(stores.read_error(problem, tmp_path))
        assert words in said and "frames" not in said
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * 2**29))
    problem = OSError(28, "No space left on device")
    assert "No space left on device (1.50 GiB" in str(stores.write_error(problem, tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: os.stat(folder / "gone"))
    said = str(stores.write_error(problem, tmp_path))
    assert "No space left on device" in said and "GiB" not in said


def test_facts_of_another_iteration_are_refused_and_damaged_ones_empty(tmp_path):
    assert stores.iteration_of(Path("a/iter_0000020")) == 20
    assert stores.iteration_of(Path("a/other")) is None and stores.iteration_of(Path("iter_0000020/a")) is None
    store = CheckpointStore(tmp_path)
    for consumed in (0, MAX_SAMPLES):
        store.begin(20)
        store.commit(20, {"iteration": 20, "consumed_samples": consumed})
        assert read_facts(store.path(20)) == {"iteration": 20, "consumed_samples": consumed}
    store.path(20).rename(tmp_path / "iter_0000030")
    pytest.raises(CheckpointError, read_facts, tmp_path / "iter_0000030").match("iteration = 20.*iter_0000030")
    (tmp_path / "iter_0000030").rename(tmp_path / "copy")
    assert read_facts(tmp_path / "copy")["iteration"] == 20  # another name says nothing
    assert read_facts(tmp_path) == {}
    for content in NO_FACTS:
        (tmp_path / RUN_FACTS).write_bytes(content)
        assert read_facts(tmp_path) == {}


def test_a_run_saves_into_no_checkpoint_and_nowhere_inside_of_one(tmp_path):
    (tmp_path / "run/facts").mkdir(parents=True)
    stores.check_is_no_checkpoint("--save", tmp_path / "run")
    for name in ("iter_0000001", "iter_0000001/deeper"):  # by its name, though nothing is there yet
        refused = pytest.raises(CheckpointError, stores.check_is_no_checkpoint, "--save", tmp_path / name)
        refused.match(r"--save = .*/iter_0000001 is one")
    (tmp_path / "run" / RUN_FACTS).write_text("{}")
    for name in ("run", "run/facts"):  # by what is there, whatever its name
        pytest.raises(CheckpointError, stores.check_is_no_checkpoint, "--save", tmp_path / name).match("/run is one")


def test_folder_means_its_newest_checkpoint(tmp_path):
    write(CheckpointStore(tmp_path / "run/checkpoints"), 7)
    newest = tmp_path / "run/checkpoints/iter_0000007"
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(tmp_path / "run/checkpoints") == newest
    assert find_checkpoint(newest) == newest
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, words in (("link", "a link to nothing"), ("gone", "does not exist"), ("rum", "'run'")):
        pytest.raises(CheckpointError, find_checkpoint, tmp_path / name).match(f"(?s)--checkpoint = .*/{name}.*{words}")
    pytest.raises(CheckpointError, find_checkpoint, newest.parent / BEST, "--load").match("^--load = .*/best")
