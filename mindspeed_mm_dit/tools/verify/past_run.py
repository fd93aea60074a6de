"""A past run, as its folder of checkpoints records it: its command, and the checkpoints to repeat steps from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.store import COMMAND, CheckpointStore, read_facts
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.training.dry_run import is_command, read_not_finite
from mindspeed_mm_dit.training.flags import parse


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
            raise CheckpointError(f"{flag} = {folder}", "there is no such folder", "name the folder of --save")
        root, checkpoint = (folder.parent, folder) if folder.name.startswith("iter_") else (folder, None)
        if checkpoint is None and CheckpointStore(root / "checkpoints").iterations():
            root /= "checkpoints"  # (as a run leaves them)
        run = cls(root, checkpoint, read_not_finite(root), flag)
        if not run.left and not run.iterations:
            raise CheckpointError(f"{flag} = {root}", "holds no checkpoint of a run", "name the folder of --save")
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
            raise ConfigError(f"--iteration = {iteration}", "steps are numbered from 1")
        earlier = [CheckpointStore(self.root).path(number) for number in self.iterations if number < iteration]
        if self.checkpoint is None:
            return earlier[-1] if earlier else None
        if self.checkpoint not in earlier:
            name = self.checkpoint.name
            raise ConfigError(
                f"--iteration = {iteration}", f"must come after {name}", f"name {self.root} for the one before it"
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
            what, "does not record its command (an older version, or another host, wrote it)",
            "resume it in the standalone host, which saves its flags with the next checkpoint",
        )  # fmt: skip
    flags = parse([*command["arguments"], *changed])
    start_folder = root / command["folder"]
    if (start_folder / flags.mm_model).is_file():
        os.chdir(start_folder)  # its flags' paths start there; here, if only the checkpoint was moved
    return flags
