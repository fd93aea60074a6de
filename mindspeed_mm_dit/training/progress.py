"""The progress of a run, and saving and restoring it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mindspeed_mm_dit.checkpoint.lock import FolderLock
from mindspeed_mm_dit.checkpoint.store import BEST, COMMAND, CheckpointStore, write_error
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.terminal import doing
from mindspeed_mm_dit.training.contract import Checkpoints, RunState
from mindspeed_mm_dit.training.dry_run import command
from mindspeed_mm_dit.training.resume import ResumePoint, print_rank_0, run_facts, same_folder


class Progress:
    """Counts steps and samples; saves and restores them with the state of the engine.

    If a save fails, the first rank reports it at once and only that save is lost; all ranks go on alike.
    """

    def __init__(self, args: RunConfig, engine: RunState, checkpoints: Checkpoints, lock: FolderLock | None) -> None:
        self.iteration = 0
        self.consumed_samples = 0
        self.words: Sequence[str] | None = None
        """Flags of the run, if those of this process are a host's."""
        self._args, self._engine, self._checkpoints = args, engine, checkpoints
        self._saved_iteration: int | None = None
        self._problem: UserError | None = None
        self._best: dict[str, Any] | None = None
        self._best_before: dict[str, Any] | None = None
        if lock is not None:
            self._lock = lock
            assert args.save is not None, "the lock is on --save"
            self._store = CheckpointStore(args.save, args.keep_last, args.save_retain_interval)
            self._writer = checkpoints.Writer(not args.no_async_save, self._give_up_save)

    def advance(self) -> None:
        """Count one optimizer step."""
        self.iteration += 1
        self.consumed_samples += self._args.global_batch_size

    def restore(self, start: ResumePoint) -> None:
        """Continue from the checkpoint that ``find_resume_point`` found."""
        path, iteration, facts = start
        self._engine.load(path, with_optimizer=not self._args.no_load_optim)
        self.iteration = iteration
        if self._args.save:
            self._store.mark_newer_as_stale(iteration)
        self.consumed_samples = facts.get("consumed_samples", iteration * self._args.global_batch_size)
        self._saved_iteration = iteration if same_folder(self._args.load, self._args.save) else None
        self._best = facts.get(BEST) if self._saved_iteration is not None else None
        print_rank_0(f"resumed from {path}: iteration {iteration}, {self.consumed_samples} samples consumed")

    def try_save(self, check: Callable[[], object] = lambda: None) -> None:
        """Start writing a checkpoint of this iteration, unless there is one already; a failure is reported.

        check: raises if the state must not be saved; called while it is copied, so that the device is waited for once.
        """
        if not self._args.save:
            check()
            return
        with doing("saving", print_rank_0):
            self._finish_write()
            is_new = self._saved_iteration != self.iteration
            with_optimizer = not self._args.no_save_optim
            state = self._writer.copy_to_host(self._engine.state(with_optimizer=with_optimizer)) if is_new else {}
            check()
            if is_new and self._begin():
                self._start_write(self._args.save, state)

    def _start_write(self, save: str, state: dict[str, Any]) -> None:
        iteration, store = self.iteration, self._store
        facts = run_facts(self._args, iteration, self.consumed_samples) | ({BEST: self._best} if self._best else {})
        facts[COMMAND] = command(save, self.words)
        state.update(self._checkpoints.entries_for_mindspeed_mm(facts, self._args.mm.model.predictor))
        self._writer.write(state, store.partial_path(iteration), lambda: self._commit(iteration, facts))
        self._saved_iteration = iteration

    def keep_if_best(self, loss: float, check: Callable[[], object] = lambda: None) -> None:
        """Save this iteration if ``loss``, of its validation, is the smallest so far; keep it until a smaller one."""
        if not math.isfinite(loss):
            return
        if self._best is not None and self._best["iteration"] == self._saved_iteration:
            self._finish_write()  # its write may fail, and then another is the best so far
        if self._best is not None and loss >= self._best["loss"]:
            return
        self._finish_write()
        self._best_before, self._best = self._best, {"iteration": self.iteration, "loss": loss}
        self.try_save(check)
        if self._saved_iteration != self.iteration:
            self._best = self._best_before

    def _commit(self, iteration: int, facts: dict[str, Any]) -> None:
        self._lock.renew()  # another run may have taken the folder over since
        self._store.commit(iteration, facts)

    def wait_for_write(self) -> None:
        """Wait for the write under way, since its state is good; ignore whether it fails."""
        if self._args.save:
            self._writer.wait()

    def finish(self) -> None:
        """Save the last state and wait until it is on disk.

        Raises:
            UserError: it could not be saved; on every rank.
        """
        if not self._args.save:
            return
        self.try_save()
        with doing("saving", print_rank_0):
            self._finish_write()
        if self._saved_iteration != self.iteration:
            raise _shared_error(self._problem)

    def _finish_write(self) -> None:
        """Wait for the write under way, and let all ranks know whether it failed."""
        problem = self._writer.wait()
        if runtime.any_over_ranks(problem is not None):
            if self._best is not None and self._best["iteration"] == self._saved_iteration:
                self._best = self._best_before
            self._saved_iteration, self._problem = None, problem

    def _begin(self) -> bool:
        """Make an empty folder to write into, on the first rank; return on every rank whether that worked."""
        problem: UserError | None = None
        if runtime.rank() == 0:
            try:
                self._lock.renew()
                self._store.remove_unfinished()
                self._store.begin(self.iteration)
            except ConfigError as error:  # another run has taken over the folder with its unfinished checkpoint
                self._problem = problem = error
                print_rank_0(f"warning: {error.formatted}")
            except OSError as error:
                self._problem = problem = write_error(error, self._store.root)
                self._give_up_save(problem)
        return not runtime.any_over_ranks(problem is not None)

    def _give_up_save(self, problem: CheckpointError) -> None:
        """Report why the save under way failed, and free its disk space; called in any thread."""
        print_rank_0(f"warning: {problem.formatted}")
        if runtime.rank() == 0:
            with suppress(OSError):  # a folder that is gone
                if self._lock.is_ours():
                    self._store.remove_unfinished()


@contextmanager
def locked_save_folder(args: RunConfig) -> Iterator[FolderLock | None]:
    """Lock the --save folder for this run, on the first rank; None without --save.

    Raises:
        ConfigError: it belongs to a run that is still alive; on every rank.
    """
    if not args.save:
        print_rank_0("warning: without --save nothing of this run is saved")
        yield None
        return
    lock, conflict = FolderLock(args.save), None
    if runtime.rank() == 0:
        try:
            lock.take()
        except ConfigError as error:
            conflict = error
    if runtime.any_over_ranks(conflict is not None):
        raise _shared_error(conflict)
    try:
        yield lock
    except KeyboardInterrupt:  # ends at once, maybe during a write: released when the process ends
        raise
    except BaseException:
        lock.release()
        raise
    lock.release()


def open_progress(
    args: RunConfig, engine: RunState, checkpoints: Checkpoints, lock: FolderLock | None, start: ResumePoint | None
) -> Progress:
    """Return the progress of a run: where ``start`` left it, or at the beginning."""
    progress = Progress(args, engine, checkpoints, lock)
    if start is not None:
        progress.restore(start)
    if args.save and lock is not None and runtime.rank() == 0:
        CheckpointStore(args.save).remove_unfinished()
    return progress


def _shared_error(error: UserError | None) -> UserError:
    """Return the error of the first rank, or on other ranks a generic one, marked as shared by all ranks."""
    failure = error or CheckpointError("--save cannot be used, for a reason that the first rank reports.")
    failure.is_shared = True
    return failure
