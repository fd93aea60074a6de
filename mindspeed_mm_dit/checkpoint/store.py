"""A folder of checkpoints; each one under its final name is complete. Needs no framework.

    iter_0000500/                         complete: renamed into place after the last byte was written
    iter_0000500/checksums.json           of every file in it, taken while they were written
    .iter_0000600.partial/                being written, or left by a crash; never read
    latest_checkpointed_iteration.txt     Megatron's tracker; moves after the rename
    best_checkpointed_iteration.txt       of the checkpoint with the smallest validation loss, under --keep-best

Each backend decides what else is in a checkpoint, except for ``run.json``, the facts of the run.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_mm_dit.checkpoint import checksums, power_ema
from mindspeed_mm_dit.checkpoint.checksums import write_durably
from mindspeed_mm_dit.configs.files import fetch_command, suggest_path
from mindspeed_mm_dit.configs.limits import MAX_INT64, MAX_SAMPLES, shorten_repr
from mindspeed_mm_dit.configs.tuning import is_tuning
from mindspeed_mm_dit.errors import CheckpointError, UserError

T = TypeVar("T")
TRACKER = "latest_checkpointed_iteration.txt"
BEST_TRACKER = "best_checkpointed_iteration.txt"
SETTINGS = "settings"
"""Key of run.json: the other settings that a resume compares, by name."""
ADAPTERS, BASE, BASE_FROM = "adapters", "base", "base_from"
"""Key of run.json if the run trains adapters: how they were made. Keys inside it: the digest of the base weights, and
where these were read from."""
RUN_FACTS = "run.json"
BEST = "best"
"""Key of run.json: iteration and validation loss of the best checkpoint so far. Also its name in a path:
``FOLDER/best``."""
COMMAND = "command"
"""Key of run.json: the flags of the run, and the folder that it was started in."""
RESTORE_IT = "Restore it from a copy, or name the checkpoint before it."
MISSING_INDEX = "it lacks .metadata, as copies without hidden files do"
_NAME = re.compile(r"iter_(\d{7,})")
_REPLACED_SUFFIX = ".old.partial"
"""Suffix of a checkpoint that is set aside while another one replaces it."""


class CheckpointStore:
    """Names, order and life cycle of the checkpoints under ``root``.

    It keeps the newest ``keep_last`` (None: all), those of every ``retain_interval``-th iteration, and the best one
    according to the facts of the newest.
    """

    def __init__(self, root: str | Path, keep_last: int | None = 2, retain_interval: int | None = None) -> None:
        self.root, self.keep_last, self.retain_interval = Path(root), keep_last, retain_interval
        self._abandoned = set[int]()

    def mark_newer_as_stale(self, iteration: int) -> None:
        """Treat checkpoints newer than ``iteration``, where the run resumes, as stale."""
        self._abandoned = {saved for saved in self.iterations() if saved > iteration}

    def path(self, iteration: int) -> Path:
        """Return the path of the complete checkpoint of ``iteration``."""
        return self.root / f"iter_{iteration:07d}"

    def begin(self, iteration: int) -> Path:
        """Return an empty folder to write ``iteration`` into; called on one rank."""
        aside = self.partial_path(iteration)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def partial_path(self, iteration: int) -> Path:
        """Return the path at which ``iteration`` is being written."""
        return self.root / f".iter_{iteration:07d}.partial"

    def commit(self, iteration: int, facts: dict[str, Any]) -> Path:
        """Rename the checkpoint that :meth:`begin` started into place, move the tracker, delete the oldest."""
        aside, final = self.partial_path(iteration), self.path(iteration)
        checksums.write_checksums(
            aside, {RUN_FACTS: write_durably(aside / RUN_FACTS, json.dumps(facts, indent=1) + "\n")}
        )
        for name in checksums.read(aside):
            if not (aside / name).is_file():
                raise FileNotFoundError(f"{name} is not in {aside}: do all nodes share this disk?")
        self._replace(final, aside)
        write_durably(self.root / TRACKER, f"{iteration}")
        best = facts.get(BEST, {}).get("iteration")
        if best is not None and self.path(best).is_dir():
            write_durably(self.root / BEST_TRACKER, f"{best}")
        self._abandoned.discard(iteration)
        before = [saved for saved in self.iterations() if saved <= iteration and saved not in self._abandoned]
        for old in before[: -self.keep_last] if self.keep_last else ():
            if old != best and (not self.retain_interval or old % self.retain_interval):
                self._remove(old)
        return final

    def _remove(self, iteration: int) -> None:
        """Delete a checkpoint; it is renamed first, so that a reader finds all of it or none."""
        aside = self.partial_path(iteration)
        with suppress(OSError):
            os.rename(self.path(iteration), aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _replace(self, final: Path, aside: Path) -> None:
        """Rename ``aside`` to ``final``, which may exist from before the run was resumed from further back."""
        before = aside.with_suffix(_REPLACED_SUFFIX)
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
        """Delete what killed runs and failed saves left half written; called on one rank while nothing is written.

        A checkpoint that was set aside for another one of its iteration is restored if it was not replaced.
        """
        for before in self.root.glob(f".iter_*{_REPLACED_SUFFIX}"):
            final = self.root / before.name[1:].removesuffix(_REPLACED_SUFFIX)
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

    def latest(self, find_damage: Callable[[Path], str | None]) -> tuple[int | None, list[str]]:
        """Find the checkpoint to resume from.

        Args:
            find_damage: returns why a checkpoint cannot be read, or None.

        Returns:
            Its iteration (None: there is none) and a line for each newer one that was skipped.

        Raises:
            CheckpointError: ``root`` is not a folder of checkpoints, or none of them can be read; starting anew would
                hide the loss.
        """
        self._check_root()
        skipped: list[str] = []
        for iteration in reversed(self.iterations()):
            problem = find_damage(self.path(iteration))
            if problem is None:
                return iteration, skipped
            skipped.append(f"{self.path(iteration)} is damaged ({problem})")
        if skipped:
            raise CheckpointError(
                f"--load = {self.root} has no checkpoint that can be read: {skipped[0]}. Restore one from a copy, or "
                "choose another --load to start anew."
            )
        return None, skipped

    def _check_root(self) -> None:
        if self.root.is_file():
            raise CheckpointError(
                f"--load = {self.root} is a file, but a run is resumed from the folder that --save named. To start "
                f"from published weights, pass --init-from {self.root}."
            )
        if (self.root / RUN_FACTS).exists() or _NAME.fullmatch(self.root.name):
            raise CheckpointError(
                f"--load = {self.root} is one checkpoint, not the folder of them. Pass --load {self.root.parent}."
            )


class BackgroundWriter(ABC):
    """Writes one checkpoint at a time while training goes on. A failure is reported at once and does not end the run.

    when_failed: called with the reason as soon as a write fails, on every rank that knows of it; the first always does.
    """

    def __init__(self, in_background: bool, when_failed: Callable[[CheckpointError], object] | None = None) -> None:
        self._in_background = in_background
        self._when_failed = when_failed
        self._problem: CheckpointError | None = None

    def copy_to_host(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state``, to be written, on its way to the host; unless overridden it is there already."""
        return state

    @abstractmethod
    def _join(self) -> None:
        """Wait for the write under way, if there is one."""

    def _finish(self, work: Callable[[], object], path: Path) -> None:
        """Finish the write of ``path`` in the calling thread, and keep its error for :meth:`wait`."""
        try:
            work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # (DCP's exception is no Exception)
            self._problem = write_error(error, path.parent)
            if self._when_failed is not None:
                self._when_failed(self._problem)

    def wait(self) -> CheckpointError | None:
        """Wait for the checkpoint being written; return why it failed, as far as this rank knows, or None."""
        self._join()
        problem, self._problem = self._problem, None
        return problem


def iteration_of(path: Path) -> int | None:
    """Return the iteration in the name of a checkpoint folder; None for a folder of another name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else None


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of the run that wrote the checkpoint ``path``; empty if another program wrote it.

    Raises CheckpointError if they are damaged, or cannot be the facts of a run.
    """
    problem = checksums.find_file_damage(path / RUN_FACTS)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}. {RESTORE_IT}")
    try:
        facts = json.loads((path / RUN_FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(facts, dict):
        return {}
    check_facts(facts, path / RUN_FACTS)
    named = iteration_of(path)
    if named is not None and facts.get("iteration", named) != named:
        raise CheckpointError(
            f"{path / RUN_FACTS} has iteration = {facts['iteration']}, which is not that of {path.name}. {RESTORE_IT}"
        )
    return facts


def read_classes(folder: str | Path | None) -> tuple[str, ...]:
    """Return the class names in the newest checkpoint of ``folder`` that can be read; empty if there are none."""
    store = CheckpointStore(folder or "")
    for iteration in reversed(store.iterations() if folder else []):
        with suppress(UserError):  # (a resume names the damage)
            return tuple(read_facts(store.path(iteration)).get("classes") or ())
    return ()


def check_facts(facts: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if ``facts``, which the file ``path`` holds, cannot be the facts of a run."""
    if (key := invalid_fact(facts)) is not None:
        raise CheckpointError(f"{path} has {key} = {shorten_repr(facts[key])}, which no run writes there. {RESTORE_IT}")


def invalid_fact(facts: dict[str, Any]) -> str | None:
    """Return the first key of run.json whose value cannot be a fact of a run, or None."""
    return next((key for key, is_good in _FACTS.items() if key in facts and not is_good(facts[key])), None)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SAMPLES


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


_FACTS: dict[str, Callable[[Any], bool]] = {
    "iteration": _is_count,
    "consumed_samples": _is_count,
    "seed": lambda value: type(value) is int and 0 <= value <= MAX_INT64,
    "model": lambda value: isinstance(value, dict),
    SETTINGS: lambda value: isinstance(value, dict),
    COMMAND: lambda value: isinstance(value, dict),
    BEST: lambda value: isinstance(value, dict) and _is_count(value.get("iteration")) and _is_number(value.get("loss")),
    "classes": _are_texts,
    "captions": _are_texts,
    "words": _are_texts,
    power_ema.STDS: power_ema.is_std_list,
    ADAPTERS: lambda value: isinstance(value, dict) and isinstance(value.get(BASE), str) and is_tuning(value),
}
"""Checks of the values in run.json that a resume reads."""


def without_folders(value: Any) -> Any:
    """Return facts as JSON has them, with each absolute path replaced by its last name.

    Of the folder that a command was started in not even the name is left, as it may be that of a user.
    """
    if isinstance(value, dict):
        facts = {key: without_folders(item) for key, item in value.items()}
        is_somewhere = os.path.isabs(str(value.get("folder", "")))
        return facts | {"folder": "."} if is_somewhere else facts
    if isinstance(value, (list, tuple)):
        return [without_folders(item) for item in value]
    return _last_name(value) if isinstance(value, str) else value


def relative_argument(argument: str, folder: str) -> str:
    """Return an argument of a command line; a path inside ``folder`` becomes relative to it."""
    flag, mark, path = _parts(argument)
    is_inside = os.path.isabs(path) and os.path.commonpath([path, folder]) == folder
    return f"{flag}{mark}{os.path.relpath(path, folder)}" if is_inside else argument


def _last_name(argument: str) -> str:
    flag, mark, path = _parts(argument)
    return f"{flag}{mark}{os.path.basename(os.path.normpath(path)) or '.'}" if os.path.isabs(path) else argument


def _parts(argument: str) -> tuple[str, str, str]:
    """Return ("--flag", "=", value), or ("", "", argument) if it is no flag with a value."""
    flag, mark, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return flag, mark + value[: len(value) - len(value.lstrip())], value.lstrip()


def check_is_no_checkpoint(setting: str, folder: str | Path) -> None:
    """Raise CheckpointError if a run would save into a checkpoint, or into a folder inside one."""
    for parent in (Path(folder), *Path(folder).parents):
        if _NAME.fullmatch(parent.name) or (parent / RUN_FACTS).is_file():
            raise CheckpointError(
                f"{setting} = {folder} must be a folder of checkpoints, but {parent} is one checkpoint. Name "
                f"{parent.parent}."
            )


def find_checkpoint(path: str | Path, flag: str = "--checkpoint") -> Path:
    """Return the newest checkpoint in the folder ``path``, which ``flag`` named, or ``path`` itself if it is one.

    If ``FOLDER/checkpoints`` holds checkpoints, as a run leaves them, ``FOLDER`` means these.
    ``FOLDER/best`` is the checkpoint with the smallest validation loss, of a run with --keep-best.
    """
    path = Path(path)
    if path.name == BEST and CheckpointStore(path.parent).iterations():
        return _best(path.parent, flag)
    below = path / "checkpoints"
    store = CheckpointStore(below if CheckpointStore(below).iterations() else path)
    path = store.path(store.iterations()[-1]) if store.iterations() else path
    if is_missing_index(path):
        raise CheckpointError(
            f"{flag} = {path} is damaged: {MISSING_INDEX}. Copy it again as a whole folder, hidden files too."
        )
    if not path.exists():
        problem = "is a link to nothing" if path.is_symlink() else "does not exist"
        advice = fetch_command(path) or f"{suggest_path(path)}Correct the path; only mm-dit get downloads."
        raise CheckpointError(f"{flag} = {path} {problem}. {advice}")
    return path


def is_missing_index(path: Path) -> bool:
    """Return whether a checkpoint of PyTorch was copied by a program that leaves out hidden files."""
    return any(path.glob("*.distcp")) and not (path / ".metadata").exists()


def read_newest(path: str | Path, flag: str, read: Callable[[Path], T]) -> T:
    """Return the result of ``read`` on the newest checkpoint of ``path``; retry if a run deletes one meanwhile."""
    while True:
        checkpoint = find_checkpoint(path, flag)
        store = CheckpointStore(checkpoint.parent)
        iterations = store.iterations() if iteration_of(checkpoint) is not None else []
        try:
            return read(checkpoint)
        except (UserError, OSError):
            if not iterations or set(iterations) <= set(store.iterations()):
                raise


def _best(folder: Path, flag: str) -> Path:
    what, instead = f"{flag} = {folder / BEST}", f"Name {folder} for the newest checkpoint, or one that is in it."
    try:
        checkpoint = CheckpointStore(folder).path(int((folder / BEST_TRACKER).read_text(encoding="ascii")))
    except (OSError, ValueError):
        raise CheckpointError(
            f"{what} does not exist, as its run kept no best checkpoint (--keep-best). {instead}"
        ) from None
    if not checkpoint.is_dir():
        raise CheckpointError(f"{what} is {checkpoint.name} by {BEST_TRACKER}, but that is gone. {instead}")
    return checkpoint


def write_error(problem: BaseException, folder: Path) -> CheckpointError:
    """Return the error that says why a checkpoint could not be written into ``folder``."""
    try:
        free = f" ({shutil.disk_usage(folder).free / 2**30:.2f} GiB are free on that disk)"
    except OSError:  # the folder is gone
        free = ""
    return CheckpointError(
        f"The last checkpoint of --save could not be written: {_root_cause(problem)}{free}. Free space on the disk, or "
        "restore the folder. The checkpoints before it are still good."
    )


def missing_optimizer_error(path: Path) -> CheckpointError:
    """Return the error for a run that needs the optimizer's state of a checkpoint without one."""
    return CheckpointError(f"--load = {path} holds no optimizer's state. Pass --no-load-optim to start it anew.")


def read_error(problem: BaseException, path: Path) -> CheckpointError:
    """Return the error that says why the checkpoint ``path`` could not be read."""
    for cause in _causes(problem):
        if isinstance(cause, CheckpointError):
            return CheckpointError(str(cause))
    return CheckpointError(
        f"The checkpoint {path} cannot be read: {_root_cause(problem)}. Restore it from a copy, or move it away to use "
        "the checkpoint before it."
    )


_TRUNCATED_MESSAGE = "enforce fail at inline_container"
"""Part of PyTorch's message if a file does not end where PyTorch has written to."""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what led to it, the last first."""
    failures = getattr(error, "failures", None)  # DCP's CheckpointException keeps one per rank
    if failures:
        error = next(iter(failures.values()))[0]
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _root_cause(error: BaseException) -> str:
    """Return what went wrong first, preferring an error of the operating system to one of the file format."""
    causes = list(_causes(error))
    first = next((cause for cause in reversed(causes) if isinstance(cause, OSError)), causes[0])
    if _TRUNCATED_MESSAGE in str(first):  # from another rank, without the operating system's error
        return "a file on the disk is shorter than what was written to it, as if the disk were full"
    return f"{type(first).__name__}: {first}".splitlines()[0].rstrip(".")
