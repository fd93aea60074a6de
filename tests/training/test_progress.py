"""The checkpoint of the best validation is saved when it is found, and kept until a better one is on disk."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.checkpoint.lock import FolderLock
from mindspeed_mm_dit.checkpoint.store import BEST, CheckpointStore, find_checkpoint, read_facts
from mindspeed_mm_dit.training import progress as room
from mindspeed_mm_dit.training.progress import Progress
from mindspeed_mm_dit.training.resume import ResumePoint
from tests.conftest import run_config


class Writer:
    """Writes at once; what goes wrong shows later, as with a write in the background."""

    problem = None

    def __init__(self, in_background, when_failed):
        Writer.broken = False

    def copy_to_host(self, state):
        return state

    def write(self, state, path, when_complete):
        if Writer.broken:
            self.problem = OSError("full")
        else:
            when_complete()

    def wait(self):
        problem, self.problem = self.problem, None
        return problem


CHECKPOINTS = SimpleNamespace(Writer=Writer, entries_for_mindspeed_mm=lambda facts, config: {})


@pytest.fixture
def progress(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "run_facts", lambda args, iteration, samples: {"iteration": iteration})
    args = run_config(
        save=str(tmp_path), load=str(tmp_path), keep_last=1, save_retain_interval=None, no_async_save=True,
        no_save_optim=False, no_load_optim=False, global_batch_size=4,
        mm=SimpleNamespace(model=SimpleNamespace(predictor=None)),
    )  # fmt: skip
    engine = SimpleNamespace(state=lambda with_optimizer: {}, load=lambda path, with_optimizer: None)
    claim = FolderLock(args.save)
    claim.take()
    yield Progress(args, engine, CHECKPOINTS, claim)
    claim.release()


def validated(progress, *losses):
    for loss in losses:
        progress.advance()
        progress.keep_if_best(loss)


def test_every_smaller_loss_is_saved_and_only_the_smallest_stays(progress, tmp_path):
    store = CheckpointStore(tmp_path)
    validated(progress, 0.9, 0.5, 0.7, math.nan, 0.5)
    assert store.iterations() == [2]
    progress.try_save()
    assert store.iterations() == [2, 5] and find_checkpoint(tmp_path / "best") == store.path(2)
    validated(progress, 0.4)
    assert store.iterations() == [6] and read_facts(store.path(6))[BEST] == {"iteration": 6, "loss": 0.4}


def test_a_best_one_that_could_not_be_written_does_not_displace_the_one_before(progress, tmp_path):
    store = CheckpointStore(tmp_path)
    validated(progress, 0.9)
    Writer.broken = True
    validated(progress, 0.5)
    Writer.broken = False
    progress.advance()
    progress.try_save()
    assert store.iterations() == [1, 3] and find_checkpoint(tmp_path / "best") == store.path(1)
    validated(progress, 0.7)  # better than what is on disk
    assert find_checkpoint(tmp_path / "best") == store.path(4)


def test_a_resumed_run_knows_the_best_of_its_folder_and_of_no_other(progress, tmp_path):
    validated(progress, 0.9, 0.5)
    start = ResumePoint(CheckpointStore(tmp_path).path(2), 2, read_facts(CheckpointStore(tmp_path).path(2)))
    progress.restore(start)
    validated(progress, 0.6)
    assert CheckpointStore(tmp_path).iterations() == [2]
    progress._args = replace(progress._args, load="elsewhere")
    progress.restore(start)
    validated(progress, 0.6)
    assert find_checkpoint(tmp_path / "best").name == "iter_0000003"


def test_the_next_best_one_is_kept_if_the_best_could_not_be_written(progress, tmp_path):
    validated(progress, 0.9)
    Writer.broken = True
    validated(progress, 0.5)
    Writer.broken = False
    validated(progress, 0.6)
    assert find_checkpoint(tmp_path / "best") == CheckpointStore(tmp_path).path(3)
