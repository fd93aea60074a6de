"""A folder of checkpoints, of which every one under its final name is complete. No framework.

    iter_0000500/                         complete: renamed into place after the last byte was written
    iter_0000500/checksums.json           of every file in it, taken while they were written
    .iter_0000600.partial/                being written, or left by a crash; never read
    latest_checkpointed_iteration.txt     Megatron's tracker; moves after the rename
    best_checkpointed_iteration.txt       of the checkpoint with the smallest validation loss, under --keep-best

What else stands inside a checkpoint is its backend's business, except ``run.json``, the facts of the run.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint import checksums, power_ema
from mindspeed_mm_dit.checkpoint.checksums import write_durably
from mindspeed_mm_dit.configs.limits import MOST_SAMPLES, shown
from mindspeed_mm_dit.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
BEST_TRACKER = "best_checkpointed_iteration.txt"
SETTINGS = "settings"
"""Key of run.json: value by name, of all that is compared on a resume and has no key of its own."""
ADAPTERS, BASE, BASE_FROM = "adapters", "base", "base_from"
"""Key of run.json of a run that trains adapters: how they were made. And in it: the digest of the weights that they
stand beside, and where these were read."""
RUN_FACTS = "run.json"
BEST = "best"
"""Key of run.json: iteration and validation loss of the best checkpoint so far. And what stands for it in a path:
``FOLDER/best``."""
DAMAGED_CURE = "restore it from a copy, or name the checkpoint before it"
_NAME = re.compile(r"iter_(\d{7,})")
_BEFORE = ".old.partial"
"""Ending of a checkpoint that is set aside while another one takes its place."""


class CheckpointStore:
    """Names, order and life cycle of the checkpoints under ``root``: the newest ``keep_last`` are kept (None: all),
    those of every ``retain_interval``-th iteration, and the best by the facts of the newest."""

    def __init__(self, root: str | Path, keep_last: int | None = 2, retain_interval: int | None = None) -> None:
        self.root, self.keep_last, self.retain_interval = Path(root), keep_last, retain_interval

    def path(self, iteration: int) -> Path:
        """Return where the complete checkpoint of ``iteration`` stands."""
        return self.root / f"iter_{iteration:07d}"

    def begin(self, iteration: int) -> Path:
        """Return an empty folder to write ``iteration`` into; called on one rank."""
        aside = self.partial_path(iteration)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def partial_path(self, iteration: int) -> Path:
        """Return where ``iteration`` is being written."""
        return self.root / f".iter_{iteration:07d}.partial"

    def commit(self, iteration: int, facts: dict[str, Any]) -> Path:
        """Make the checkpoint that :meth:`begin` started visible, move the tracker, drop the oldest."""
        aside, final = self.partial_path(iteration), self.path(iteration)
        checksums.record(aside, {RUN_FACTS: write_durably(aside / RUN_FACTS, json.dumps(facts, indent=1) + "\n")})
        for name in checksums.read(aside):
            if not (aside / name).is_file():
                raise FileNotFoundError(f"{name} is not in {aside}: do all nodes share this disk?")
        self._replace(final, aside)
        write_durably(self.root / TRACKER, f"{iteration}")
        best = facts.get(BEST, {}).get("iteration")
        if best is not None and self.path(best).is_dir():
            write_durably(self.root / BEST_TRACKER, f"{best}")
        # Later ones are left by a run that was resumed from further back; what was just written is never dropped.
        before = [i for i in self.iterations() if i <= iteration]
        for old in before[: -self.keep_last] if self.keep_last else ():
            if old != best and (not self.retain_interval or old % self.retain_interval):
                shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def _replace(self, final: Path, aside: Path) -> None:
        """Rename ``aside`` to ``final``, which a run that was then resumed from further back may have written."""
        before = aside.with_suffix(_BEFORE)
        if final.exists():
            os.rename(final, before)
        try:
            os.rename(aside, final)
        except OSError:
            with suppress(OSError):
                os.rename(before, final)
            raise
        shutil.rmtree(before, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Drop what killed runs and failed saves left half written; called on one rank while nothing is written.

        A checkpoint that was set aside for another one of its iteration, which never took its place, comes back.
        """
        for before in self.root.glob(f".iter_*{_BEFORE}"):
            final = self.root / before.name[1:].removesuffix(_BEFORE)
            if not final.exists():
                os.rename(before, final)
        for aside in self.root.glob(".iter_*.partial"):
            shutil.rmtree(aside, ignore_errors=True)

    def iterations(self) -> list[int]:
        """Return the iterations that have a checkpoint, ascending."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self, problem_of: Callable[[Path], str | None]) -> tuple[int | None, list[str]]:
        """Find the checkpoint to resume from.

        Args:
            problem_of: returns why a checkpoint cannot be read, or None.

        Returns:
            Its iteration (None: there is none) and a line for each newer one that had to be passed over.

        Raises:
            CheckpointError: ``root`` is not a folder of checkpoints, or none of them can be read; starting anew would
                hide the loss.
        """
        self._check_is_a_root()
        passed: list[str] = []
        for iteration in reversed(self.iterations()):
            problem = problem_of(self.path(iteration))
            if problem is None:
                return iteration, passed
            passed.append(f"{self.path(iteration)} is damaged ({problem}); falling back to the one before")
        if passed:
            raise CheckpointError(
                f"--load = {self.root}",
                f"no checkpoint there can be read: {passed[0]}",
                "restore one from a copy, or choose another --load to start anew",
            )
        return None, passed

    def _check_is_a_root(self) -> None:
        if self.root.is_file():
            raise CheckpointError(
                f"--load = {self.root}",
                "is a file; a run is resumed from the folder that --save named",
                "to start from published weights: mm-dit convert FILE NEW_FOLDER --to pytorch, then --load NEW_FOLDER "
                "--no-load-optim",
            )
        if (self.root / RUN_FACTS).exists() or _NAME.fullmatch(self.root.name):
            raise CheckpointError(
                f"--load = {self.root}", "is one checkpoint, not the folder of them", f"pass --load {self.root.parent}"
            )


class BackgroundWriter(ABC):
    """What writes one checkpoint at a time beside the training. A failure is said at once, and ends nothing.

    when_failed: called with the reason as soon as a write has failed, on every rank that knows of it; the first does.
    """

    def __init__(self, in_background: bool, when_failed: Callable[[CheckpointError], object] | None = None) -> None:
        self._in_background = in_background
        self._when_failed = when_failed
        self._problem: CheckpointError | None = None

    @abstractmethod
    def _join(self) -> None:
        """Wait for the write under way, if there is one."""

    def _finish(self, work: Callable[[], object], path: Path) -> None:
        """Do the rest of the write of ``path``, in whatever thread this is called."""
        try:
            work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # (DCP's exception is no Exception)
            self._problem = unwritten(error, path.parent)
            if self._when_failed is not None:
                self._when_failed(self._problem)

    def wait(self) -> CheckpointError | None:
        """Wait for the checkpoint being written; return why it could not be, as far as this rank knows."""
        self._join()
        problem, self._problem = self._problem, None
        return problem


def iteration_of(path: Path) -> int | None:
    """Return the iteration in the name of a checkpoint folder; None for a folder of another name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else None


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of the run that wrote the checkpoint ``path``; empty if another program wrote it.

    Raises CheckpointError where they are not what was written, or cannot be facts of a run.
    """
    problem = checksums.problem_of_file(path / RUN_FACTS)
    if problem is not None:
        raise CheckpointError(str(path), f"is damaged: {problem}", DAMAGED_CURE)
    try:
        facts = json.loads((path / RUN_FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(facts, dict):
        return {}
    for key, is_good in _FACTS.items():
        if key in facts and not is_good(facts[key]):
            raise CheckpointError(
                f"{path / RUN_FACTS}: {key} = {shown(facts[key])}", "is nothing that a run keeps there", DAMAGED_CURE
            )
    named = iteration_of(path)
    if named is not None and facts.get("iteration", named) != named:
        raise CheckpointError(
            f"{path / RUN_FACTS}: iteration = {facts['iteration']}", f"is not that of {path.name}", DAMAGED_CURE
        )
    return facts


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_SAMPLES


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


_FACTS: dict[str, Callable[[Any], bool]] = {
    "iteration": _is_count,
    "consumed_samples": _is_count,
    "model": lambda value: isinstance(value, dict),
    BEST: lambda value: isinstance(value, dict) and _is_count(value.get("iteration")) and _is_number(value.get("loss")),
    "classes": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    power_ema.STDS: power_ema.are_stds,
    ADAPTERS: lambda value: isinstance(value, dict) and isinstance(value.get(BASE), str),
}
"""What run.json may say under the keys that a run goes on from."""


def check_is_no_checkpoint(setting: str, folder: str | Path) -> None:
    """Raise CheckpointError where a run would save into a checkpoint, or into a folder of one."""
    for place in (Path(folder), *Path(folder).parents):
        if _NAME.fullmatch(place.name) or (place / RUN_FACTS).is_file():
            raise CheckpointError(
                f"{setting} = {folder}", f"{place} is one checkpoint, not the folder of them", f"name {place.parent}"
            )


def find_checkpoint(path: str | Path, flag: str = "--checkpoint") -> Path:
    """Return the newest checkpoint in the folder ``path``, which ``flag`` named, or ``path`` itself if it is one.

    ``FOLDER`` with a folder of checkpoints in it, as a run leaves it, means these.
    ``FOLDER/best`` is the one with the smallest validation loss, of a run with --keep-best.
    """
    path = Path(path)
    if path.name == BEST and CheckpointStore(path.parent).iterations():
        return _best(path.parent, flag)
    below = path / "checkpoints"
    store = CheckpointStore(below if CheckpointStore(below).iterations() else path)
    if store.iterations():
        return store.path(store.iterations()[-1])
    if not path.exists():
        words = "is a link to nothing" if path.is_symlink() else "there is no such file or folder"
        raise CheckpointError(f"{flag} = {path}", words)
    return path


def _best(folder: Path, flag: str) -> Path:
    what, cure = f"{flag} = {folder / BEST}", f"name {folder} for the newest, or a checkpoint in it"
    try:
        found = CheckpointStore(folder).path(int((folder / BEST_TRACKER).read_text(encoding="ascii")))
    except (OSError, ValueError):
        raise CheckpointError(what, "its run has kept no best checkpoint (--keep-best)", cure) from None
    if not found.is_dir():
        raise CheckpointError(what, f"is {found.name} by its {BEST_TRACKER}, which is not there", cure)
    return found


def unwritten(problem: BaseException, folder: Path) -> CheckpointError:
    """Return the error that says why a checkpoint could not be written into ``folder``."""
    try:
        free = f" ({shutil.disk_usage(folder).free / 2**30:.2f} GiB are free on that disk)"
    except OSError:  # the folder is gone
        free = ""
    return CheckpointError(
        "--save",
        f"the last checkpoint could not be written: {_root_cause(problem)}{free}",
        "free space on the disk, or give the folder back; checkpoints before it are still good",
    )


def without_optimizer(path: Path) -> CheckpointError:
    """Return the error of a run that wants the optimizer's state of a checkpoint that has none."""
    return CheckpointError(f"--load = {path}", "holds no optimizer's state", "pass --no-load-optim to start it anew")


def unreadable(problem: BaseException, path: Path) -> CheckpointError:
    """Return the error that says why the checkpoint ``path`` could not be read."""
    return CheckpointError(
        f"the checkpoint {path}",
        f"cannot be read: {_root_cause(problem)}",
        "restore it from a copy; where it is moved away, the checkpoint before it is used",
    )


_TORN = "enforce fail at inline_container"
"""In what PyTorch says where the end of a file is not where it has written to."""


def _root_cause(error: BaseException) -> str:
    """Return what went wrong first, preferring the operating system's words to those of the file format."""
    failures = getattr(error, "failures", None)  # DCP's CheckpointException keeps one per rank
    if failures:
        error = next(iter(failures.values()))[0]
    first, deeper = error, error.__cause__ or error.__context__
    while deeper is not None:
        if isinstance(deeper, OSError):
            first = deeper
        deeper = deeper.__cause__ or deeper.__context__
    if _TORN in str(first):  # of another rank, whose error came without the operating system's
        return "a file on the disk is shorter than what was written to it, as on a disk that is full"
    return f"{type(first).__name__}: {first}".splitlines()[0]
