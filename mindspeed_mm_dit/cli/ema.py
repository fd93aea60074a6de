"""``mm-dit ema``: post-hoc EMA, the EMA of a run's weights for a width it did not track, from its saved checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.formats import FORMATS, choose_format, read_trees
from mindspeed_mm_dit.checkpoint.power_ema import EmaProfile
from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.checkpoint.store import CheckpointStore, iteration_of, read_facts, read_newest
from mindspeed_mm_dit.checkpoint.targets import check_state, check_target, storable_part, write
from mindspeed_mm_dit.configs.run import check_output_folder
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.terminal import echo, progress

DESCRIPTION = """\
Make an EMA (moving average of the weights) of a width that the run did not keep: post-hoc EMA, Karras et al. 2024. So
you can try many widths after one run.

  bash examples/dit/pretrain.sh --power-ema-stds 0.05 0.1 --save-retain-interval 100
  mm-dit ema --checkpoint outputs/digits/checkpoints --std 0.15 --output ema_0.15.safetensors
  mm-dit sample --checkpoint ema_0.15.safetensors --model examples/dit/model.json ...

The run keeps EMAs of two widths in every checkpoint; this command combines them into an EMA of any width. More
checkpoints give a closer fit, and the command prints the error of the fit. A width is the standard deviation of the
averaged steps as a fraction of the run: 0.05 looks back over about 10 % of the run, 0.1 over 20 %."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FOLDER",
        help="checkpoints of a run with --power-ema-stds; or one of them, to make the EMA at its iteration",
    )
    parser.add_argument("--std", required=True, type=float, metavar="S", help="width of the EMA, 0.001 to 0.288")
    parser.add_argument("--output", required=True, metavar="TARGET", help="file to write, or folder with --to")
    parser.add_argument("--to", metavar="FORMAT", help="format, as in mm-dit convert; default: by the ending of TARGET")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is a checkpoint")


def run(args: argparse.Namespace) -> int:
    """Write the EMA, and print how close it is."""
    try:
        power_ema.gamma_of_std(args.std)
    except ValueError as error:
        raise ConfigError(f"--std = {args.std:g} {error}.") from None

    result = write_power_ema(
        args.checkpoint,
        args.std,
        args.output,
        args.to,
        args.overwrite,
        progress=lambda checkpoints: progress("averaging", checkpoints, total=len(checkpoints), unit="checkpoint"),
    )
    for note in result.notes:
        echo(f"note: {note}")
    steps = sorted({average.profile.step for average in result.saved})
    echo(
        f"width {args.std:g} at iteration {result.requested.step}, of {len(result.saved)} averages at iterations "
        f"{', '.join(map(str, steps[:3]))}{f' ... {steps[-1]}' if len(steps) > 3 else ''}; "
        f"EMA profile fit error: {result.error:.2%}"
    )
    if result.error > 0.05:
        echo("note: more checkpoints give a closer fit; --save-retain-interval N keeps those of every N-th iteration")
    echo(f"{args.output}: {result.num_tensors} tensors, {result.num_bytes / 1e6:.1f} MB")
    return 0


# --- the EMA ----------------------------------------------------------------------------------------------------------


class SavedEma(NamedTuple):
    """One power-function EMA in one checkpoint."""

    path: Path
    tree: str
    profile: EmaProfile


class EmaResult(NamedTuple):
    """What was written."""

    saved: list[SavedEma]
    """The EMAs found in the checkpoints."""
    requested: EmaProfile
    error: float
    """Error of the averaging profile, as ``power_ema.solve_coefficients`` defines it."""
    num_tensors: int
    num_bytes: int
    notes: list[str]


def write_power_ema(
    source: str | Path,
    std: float,
    target: str | Path,
    to: str | None = None,
    overwrite: bool = False,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> EmaResult:
    """Make the EMA of width ``std`` and write it as ``target``.

    Args:
        source: a folder of checkpoints, for the EMA at its newest iteration; or one checkpoint, for the EMA at its
            iteration (earlier checkpoints of the same run are used too).
        std: width as a fraction of the run, 0.001 to 0.288.
        target: a new file or folder.
        to: format of the target; by default the one of its ending.
        overwrite: replace an existing checkpoint.
        progress: wraps the sequence of checkpoints while they are read.

    Raises:
        CheckpointError: there are no power-function EMAs, a checkpoint is damaged, or the target exists.
        ConfigError: no format fits, or nothing can be written there.
        PlatformError: a required framework is not installed.
    """
    target_format = choose_format(Path(target), to, "--output")
    return read_newest(
        source, "--checkpoint", lambda newest: _averaged(newest, std, Path(target), target_format, overwrite, progress)
    )


def _averaged(newest: Path, std: float, target: Path, target_format: str, overwrite: bool, progress: Any) -> EmaResult:
    saved, facts = list_saved_emas(newest), read_facts(newest)
    profile = EmaProfile(saved[-1].profile.step, std)
    factors, error = power_ema.solve_coefficients([ema.profile for ema in saved], profile)
    check_target(newest.parent, target, overwrite, flags=("--checkpoint", "--output"))
    check_output_folder("folder of --output", target.parent)
    used: dict[Path, dict[str, float]] = {}
    for ema, factor in zip(saved, factors):
        if factor:
            used.setdefault(ema.path, {})[ema.tree] = factor
    facts = {key: value for key, value in facts.items() if key != power_ema.STDS} | {"power_ema_std": std}
    state = State({"model": _sum(progress(list(used.items())))}, facts)
    check_state(state, str(newest))
    state, notes = storable_part(state, FORMATS[target_format].storage, None)
    write(target, target_format, state)
    return EmaResult(saved, profile, error, state.num_tensors, state.num_bytes, notes)


def list_saved_emas(newest: Path) -> list[SavedEma]:
    """Return the EMAs in ``newest`` and in the earlier checkpoints of its run, ascending by step.

    Raises:
        CheckpointError: there are none.
    """
    last = iteration_of(newest)
    store = CheckpointStore(newest.parent)
    steps = [step for step in store.iterations() if last is not None and 0 < step <= last]
    saved = []
    for step in steps:
        stds = read_facts(store.path(step)).get(power_ema.STDS, [])
        trees = power_ema.tree_names(len(stds))
        saved += [SavedEma(store.path(step), tree, EmaProfile(step, std)) for tree, std in zip(trees, stds)]
    if not saved or saved[-1].path != newest:
        raise CheckpointError(
            f"{newest} holds no power-function averages. Train with --power-ema-stds 0.05 0.1, which keeps them."
        )
    return saved


def _sum(used: Iterable[tuple[Path, Mapping[str, float]]]) -> Arrays:
    """Sum the EMAs of all checkpoints times their factors in float64; return float32."""
    total: Arrays = {}
    for path, factors in used:
        for tree, arrays in read_trees(path, list(factors)).items():
            for name, array in arrays.items():
                term = array.astype(np.float64) * factors[tree]
                total[name] = total[name] + term if name in total else term
    return {name: array.astype(np.float32) for name, array in total.items()}
