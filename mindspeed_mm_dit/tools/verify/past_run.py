"""Past runs, to recompute steps of: a folder of checkpoints, or the run card of a published run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.store import COMMAND, CheckpointStore, read_facts, without_folders
from mindspeed_mm_dit.configs.files import UnusableFile, check_file
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm_dit.pages import write
from mindspeed_mm_dit.tools.verify.prove import ROUNDINGS
from mindspeed_mm_dit.tools.verify.table import Bound, Finding
from mindspeed_mm_dit.training.dry_run import is_command, read_not_finite
from mindspeed_mm_dit.training.flags import parse
from mindspeed_mm_dit.training.log import read_steps


@dataclass(frozen=True)
class PastRun:
    """A folder of --save."""

    root: Path
    checkpoint: Path | None
    """The checkpoint that was named, if any."""
    left: Mapping[str, Any]
    """The record of a step that was not finite."""
    flag: str
    """The flag that named it."""

    @classmethod
    def open(cls, flag: str, path: str) -> PastRun:
        """Return the run whose folder, or a checkpoint in it, ``flag`` names; raises CheckpointError for others."""
        folder = Path(os.path.realpath(path))
        if not folder.is_dir():
            raise CheckpointError(f"{flag} = {folder} is not a folder. Name the folder of --save.")
        root, checkpoint = (folder.parent, folder) if folder.name.startswith("iter_") else (folder, None)
        if checkpoint is None and CheckpointStore(root / "checkpoints").iterations():
            root /= "checkpoints"  # (as a run leaves them)
        run = cls(root, checkpoint, read_not_finite(root), flag)
        if not run.left and not run.iterations:
            raise CheckpointError(f"{flag} = {root} holds no checkpoint of a run. Name the folder of --save.")
        return run

    @property
    def iterations(self) -> list[int]:
        """The iterations that have a checkpoint, ascending."""
        return CheckpointStore(self.root).iterations()

    def before(self, iteration: int) -> Path | None:
        """Return the checkpoint to repeat the steps up to ``iteration`` from; None for the beginning of the run.

        Raises ConfigError if ``iteration`` is below 1, or does not come after the checkpoint that was named.
        """
        if iteration < 1:
            raise ConfigError(f"--iteration = {iteration} must be at least 1.")
        earlier = [CheckpointStore(self.root).path(number) for number in self.iterations if number < iteration]
        if self.checkpoint is None:
            return earlier[-1] if earlier else None
        if self.checkpoint not in earlier:
            raise ConfigError(
                f"--iteration = {iteration} must come after the checkpoint {self.checkpoint.name}. Name {self.root} to "
                "start from an earlier one."
            )
        return self.checkpoint

    def facts(self, checkpoint: Path | None) -> dict[str, Any]:
        """Return run.json of ``checkpoint``, or of the first checkpoint if it is None."""
        known = [checkpoint] if checkpoint else [CheckpointStore(self.root).path(n) for n in self.iterations[:1]]
        return read_facts(known[0]) if known else {}

    def flags(self, checkpoint: Path | None, changed: Sequence[str]) -> RunConfig:
        """Return the flags of the run that wrote ``checkpoint``, with those ``changed`` since; go to its folder."""
        command = self.facts(checkpoint).get(COMMAND) or self.left.get(COMMAND)
        return flags_of(command, changed, self.root, f"{self.flag} = {self.root}")


def flags_of(command: Any, changed: Sequence[str], root: Path, what: str) -> RunConfig:
    """Return the flags of a run's ``command``, and change to the folder that it was started in, relative to ``root``.

    Raises CheckpointError if ``command`` is not the command of a run; ``what`` says where it was read.
    """
    if not is_command(command):
        raise CheckpointError(
            f"{what} does not record its command, because an older version or another host wrote it. Resume it in the "
            "standalone host, which saves its flags with the next checkpoint."
        )
    flags = parse([*command["arguments"], *changed])
    start_folder = root / command["folder"]
    if (start_folder / flags.mm_model).is_file():
        os.chdir(start_folder)  # its flags' paths start there; here, if only the checkpoint was moved
    return flags


NOISY_STEPS = 2
"""Number of times the steps are computed with every number perturbed; the largest error counts."""
LOGGED = Bound(
    f"Measured: twice the largest error of {NOISY_STEPS} times the same steps in which the weights, the outputs of "
    f"every module, and every gradient were perturbed at random by up to {ROUNDINGS} roundings; and the "
    "digits that a log prints.",
    least=lambda reference: 5e-7,
)
NORM = Bound(LOGGED.why, least=lambda reference: 5.1e-4 / max(float(np.abs(reference)), 1e-30))
RUN = {"loss": LOGGED, "gradient norm": NORM}
"""The quantities of a step in a log, with their bounds."""
MAX_ITERATIONS = 10
_JSON = re.compile(r"^```json\n(.*?)^```$", re.M | re.S)
Log = Mapping[int, tuple[float, float]]
"""Mean loss of the interval that ends with a step, and gradient norm of that step."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run: a folder of checkpoints, or its card."""

    facts: Mapping[str, Any]
    """run.json."""
    flags: RunConfig
    log: Log
    past: PastRun | None = None
    """None for a card; its steps are recomputed from the beginning."""
    newest: Path | None = None
    """The last checkpoint, or the one that was requested."""

    @classmethod
    def open(cls, path: str, log: str | None, changed: Sequence[str]) -> PublishedRun:
        """Return the run at ``path``; ``log``: the log of a folder's run; None: its --tensorboard-dir.

        Raises UserError if ``path`` is not a run, or if there is no log.
        """
        if Path(path).is_file():
            facts, root = _read_card(Path(path)), Path(path).resolve().parent
            known = read_steps(log or path)
            return cls(facts, flags_of(facts[COMMAND], changed, root, f"--run = {path}"), known)
        log = str(Path(log).resolve()) if log else None
        past = PastRun.open("--run", path)
        newest = past.checkpoint or (CheckpointStore(past.root).path(past.iterations[-1]) if past.iterations else None)
        flags = past.flags(newest, changed)
        log = log or flags.parts["tensorboard_dir"]
        if not log:
            raise ConfigError(f"--log is needed, because {past.root} does not record where the log of the run is.")
        return cls(past.facts(newest), flags, read_steps(log), past, newest)

    def before(self, iteration: int) -> Path | None:
        """Return the checkpoint before the log interval that ends with ``iteration``; None: the beginning."""
        return self.past.before(self.first(iteration)) if self.past else None

    def first(self, iteration: int) -> int:
        """Return the first step of that interval."""
        return (iteration - 1) // self.flags.log_interval * self.flags.log_interval + 1

    def iterations_to_check(self, requested: Sequence[int]) -> list[int]:
        """Return the ``requested`` iterations; if empty, the first logged one after each checkpoint, ten at most.

        Raises ConfigError for an iteration that is not logged.
        """
        for iteration in requested:
            if iteration not in self.log:
                near = ", ".join(map(str, sorted(self.log, key=lambda step: abs(step - iteration))[:3]))
                raise ConfigError(f"--at = {iteration} is not in the log. The nearest iterations in it are {near}.")
        first = {self.before(iteration): iteration for iteration in sorted(self.log, reverse=True)}
        return sorted(requested) or sorted(first.values())[:MAX_ITERATIONS]


def _read_card(path: Path) -> Mapping[str, Any]:
    """Return the run.json in a card; raises DataError if the file is not a card."""
    try:
        check_file(path)
        match = _JSON.search(path.read_text(encoding="utf-8"))
        facts = json.loads(match[1]) if match else None
    except (OSError, ValueError, RecursionError, UnusableFile):
        facts = None
    if not isinstance(facts, dict) or COMMAND not in facts:
        raise DataError(f"--run = {path} is not a run card. Name a folder of --save, or a file that --card wrote.")
    return facts


def write_card(path: Path, run: PublishedRun, findings: Sequence[Finding], table: Mapping[str, str]) -> None:
    """Write the card of ``run``: its run.json, ten lines of its log, and which were recomputed (``findings``).

    table: facts for the top of the card, e.g. the digest of the weights.
    """
    again = sorted({int(finding.which) for finding in findings})
    lines = [
        f" iteration {step:8d}/{run.flags.train_iters:8d} | mean of {run.flags.log_interval} | loss: {loss:.6E} |"
        f" grad norm: {grad_norm:.3f} |"
        for step in _selected(list(run.log), again)
        for loss, grad_norm in [run.log[step]]
    ]
    facts = json.dumps(without_folders(run.facts), indent=1)
    write(path, "card.md", name=path.name, facts=table, lines=lines, again=again, run=facts)


def row_of(finding: Finding) -> tuple[str, str, str, str, str, str]:
    """Return verdict, iteration, kind, our value, the log's value, and how the two compare."""
    digits = ".6E" if finding.kind == "loss" else ".3f"
    ours, logged = format(finding.ours, digits), format(finding.reference, digits)
    how = f"error {finding.error:.1e}, bound {finding.tolerance:.1e}"
    if ours == logged or finding.error <= RUN[finding.kind].least(np.asarray(finding.reference)):
        how = "the same digits" if ours == logged else "the same except for the last digit"
    return "PASS" if finding.good else "FAIL", finding.which, finding.kind, ours, logged, how


def line_of(finding: Finding) -> str:
    """Return :func:`row_of` as a line of text."""
    word, step, kind, ours, logged, how = row_of(finding)
    return f"{word}  iteration {step:>6}  {kind:13}  {ours} here, {logged} in the log: {how}"


def _selected(logged: Sequence[int], required: Sequence[int]) -> list[int]:
    """Return ten iterations of a log: the first, the last, the ``required`` ones, and others evenly between."""
    rest = [step for step in logged if step not in required]
    count = min(MAX_ITERATIONS - min(len(required), MAX_ITERATIONS), len(rest))
    between = [rest[round(n * (len(rest) - 1) / max(count - 1, 1))] for n in range(count)]
    return sorted({*required, *between, logged[0], logged[-1]})
