"""``mm-dit replay``: compute one step of a run again, and say what in it was not finite."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.places import COMMAND
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError

DESCRIPTION = """Compute one step of a run again, from the checkpoint before it. Draws are functions of the position, so
on as many ranks its loss has the digits that were printed. Says the first tensor that is not finite, by module, the
samples of the batch, and the largest activations of each block. Nothing is saved.

  mm-dit replay --checkpoint outputs/digits/checkpoints                    the step that was not finite
  mm-dit replay --checkpoint outputs/digits/checkpoints --iteration 650    any other
  torchrun --nproc_per_node 2 -m mindspeed_mm_dit.cli.main -- replay ...   of a run on two ranks

The flags are those of the run, kept with its checkpoints; what has moved since follows behind "--":

  mm-dit replay --checkpoint DIR --iteration 650 -- --mm-data elsewhere/data.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="folder of --save, or a checkpoint in it")
    parser.add_argument("--iteration", type=int, metavar="N", help="default: the one that was not finite")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the run that are others by now")


def run(args: argparse.Namespace) -> int:
    """Replay a step; 0 if it is finite, 1 if not."""
    from mindspeed_mm_dit.training.position import found  # (imports a framework)

    root, checkpoint = _places(Path(os.path.realpath(args.checkpoint)))
    left = found(root)
    if not left and not CheckpointStore(root).iterations():
        raise CheckpointError(f"--checkpoint = {root}", "holds no checkpoint of a run", "name the folder of --save")
    iteration = args.iteration if args.iteration is not None else left.get("iteration")
    if iteration is None:
        raise ConfigError("--iteration", f"is needed: {root} knows of no step that was not finite")
    checkpoint = _before(iteration, root, checkpoint)
    flags = _flags(_command(root, checkpoint) or left.get(COMMAND), args.flags, root)
    if iteration > flags.train_iters:
        raise ConfigError(f"--iteration = {iteration}", f"the run has --train-iters {flags.train_iters}")
    if flags.ai_framework != "pytorch":
        raise PlatformError(
            f"--ai-framework = {flags.ai_framework}",
            "steps are replayed on PyTorch",
            "mm-dit convert CHECKPOINT NEW_FOLDER --to pytorch, then --checkpoint NEW_FOLDER -- --ai-framework pytorch",
        )
    from mindspeed_mm_dit.framework import activate

    activate(flags.ai_framework)
    from mindspeed_mm_dit.hosts.replay import replay

    return 0 if replay(flags, checkpoint, iteration) else 1


def _places(given: Path) -> tuple[Path, Path | None]:
    """Return the folder of checkpoints, and the one in it that was named, if one was."""
    if not given.is_dir():
        raise CheckpointError(f"--checkpoint = {given}", "there is no such folder", "name the folder of --save")
    return (given.parent, given) if given.name.startswith("iter_") else (given, None)


def _before(iteration: int, root: Path, checkpoint: Path | None) -> Path | None:
    """Return the checkpoint that the steps up to ``iteration`` are taken from; None for the beginning of the run."""
    if iteration < 1:
        raise ConfigError(f"--iteration = {iteration}", "steps are numbered from 1")
    store = CheckpointStore(root)
    if checkpoint is None:
        before = [number for number in store.iterations() if number < iteration]
        return store.path(before[-1]) if before else None
    if checkpoint not in [store.path(number) for number in store.iterations() if number < iteration]:
        raise ConfigError(
            f"--iteration = {iteration}", f"must come after {checkpoint.name}", f"name {root} for the one before it"
        )
    return checkpoint


def _command(root: Path, checkpoint: Path | None) -> Any:
    """Return the command that ``checkpoint``, or where there is none before the step the first after it, comes from."""
    store = CheckpointStore(root)
    known = [checkpoint] if checkpoint else [store.path(number) for number in store.iterations()[:1]]
    return read_facts(known[0]).get(COMMAND) if known else None


def _flags(command: Any, changed: list[str], root: Path) -> argparse.Namespace:
    """Return the flags of the run, with those that have ``changed`` since, in the folder it was started in."""
    from mindspeed_mm_dit.training.flags import quiet, whole_parser
    from mindspeed_mm_dit.training.position import is_command

    if not is_command(command):
        raise CheckpointError(
            f"--checkpoint = {root}",
            "does not say what command it comes from (an older version, or another host, wrote it)",
            "resume it in the standalone host, which keeps its flags with the next checkpoint",
        )
    flags = whole_parser().parse_strictly([*command["arguments"], *changed])
    begun_in = root / command["folder"]
    if (begun_in / flags.mm_model).is_file():
        os.chdir(begun_in)  # where the paths of its flags begin; of a checkpoint that has moved alone, here
    return argparse.Namespace(**{**vars(quiet(flags)), "torch_compile": False})  # (it would hide what modules give)
