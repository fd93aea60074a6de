"""Write a state in any format: check it, choose what the format can store, and rename the new file into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mindspeed_mm_dit.checkpoint.formats import FORMATS, StorageSupport
from mindspeed_mm_dit.checkpoint.state import Shapes, State, check_names, infer_predictor, shapes_of
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, SETTINGS, CheckpointStore, without_folders
from mindspeed_mm_dit.configs.predictor import ParameterSpecs
from mindspeed_mm_dit.configs.tuning import tuning_from_facts
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers.registry import optimizer_from_facts


def check_state(state: State, what: str) -> None:
    """Raise CheckpointError, naming the tensors, unless all trees belong to the same predictor."""
    if state.predictor is None and "model" not in state.facts:
        state.check_family("SOURCE")
    predictor = infer_predictor(shapes_of(state.weights), state.facts, state.predictor)
    settings = state.facts.get(SETTINGS)
    tuning = tuning_from_facts(state.facts.get(ADAPTERS) or (settings if isinstance(settings, dict) else {}))
    parameters = tuning.applied(parameters_of(predictor))
    expected = dict.fromkeys(state.trees, parameters.shapes(saved_only=True))
    if "optimizer" in expected:
        expected["optimizer"] = _optimizer_shapes(parameters, state, what)
    check_trees(state, expected, what, predictor.model_id)


def _optimizer_shapes(parameters: ParameterSpecs, state: State, what: str) -> Shapes:
    optimizer = optimizer_from_facts(state.facts.get(SETTINGS), what)
    return {
        f"state.{name}.{kind}": shape
        for name, parameter in parameters.items()
        if parameter.trained
        for kind, shape in optimizer.state_of(parameter).items()
    }


def check_trees(state: State, expected: dict[str, Shapes], what: str, kind: str) -> None:
    """Raise CheckpointError unless each tree has exactly the ``expected`` tensors, those of one ``kind`` of network."""
    for tree, arrays in state.trees.items():
        problem = f"has tensors of {tree!r} that are not those of one {kind} network"
        check_names(expected[tree], shapes_of(arrays), what, problem, "Copy or download it again.")


def storable_part(state: State, storage: StorageSupport, weights: str | None) -> tuple[State, list[str]]:
    """Return the part of ``state`` that the target can store, and a note for each difference."""
    trees, notes = dict(state.trees), []
    if storage is StorageSupport.TRAINING:
        return _for_training(state, weights)
    if weights is not None and weights not in trees:
        raise ConfigError(f"--weights = {weights} is not in SOURCE, which holds only {', '.join(trees)}.")
    if storage is StorageSupport.ONE_TREE or weights is not None:
        chosen = weights or ("ema" if "ema" in trees else "model")
        stored = {chosen: trees[chosen]}
    else:
        stored = {
            name: tree for name, tree in trees.items() if name in ("model", "ema") or storage is StorageSupport.ANYTHING
        }
    left_out = [name for name in trees if name not in stored]
    if left_out:
        notes.append(f"left out: {', '.join(left_out)}" + (f"; kept: {', '.join(stored)}" if len(stored) == 1 else ""))
    if len(stored) == 1:  # a single set of weights need not say which it is
        stored = {"model": next(iter(stored.values()))}
    return state.with_trees(stored), notes


def _for_training(state: State, weights: str | None) -> tuple[State, list[str]]:
    """Return ``state`` with what --load needs, both sets of weights, and a note for each difference."""
    trees, notes = dict(state.trees), []
    if state.is_autoencoder:
        raise CheckpointError("SOURCE is an autoencoder, which no run trains. Convert it to a file or to diffusers.")
    if weights is not None:
        raise ConfigError(
            f"--weights = {weights} is for one set of weights, but a checkpoint folder holds both. Leave it out."
        )
    for name, other in (("ema", "model"), ("model", "ema")):
        if name not in trees:
            trees[name] = trees[other]
            notes.append(f"{name} is a copy of {other}, the only weights in SOURCE")
    if "optimizer" not in trees:
        notes.append("no optimizer state: start the run with --no-load-optim")
    first = [name for name in ("model", "ema") if name in trees]
    return state.with_trees({name: trees[name] for name in (*first, *trees)}), notes


def write(target: Path, target_format: str, state: State) -> None:
    """Write to a temporary path, then rename it to ``target``. Facts are written without absolute paths.

    (A pipeline stores no facts, and still needs the path of its autoencoder.)
    """
    known = FORMATS[target_format]
    if target_format != "pipeline":
        state = replace(state, facts=without_folders(state.facts))

    def make(aside: Path) -> None:
        if known.storage is not StorageSupport.TRAINING:
            known.write(aside, state)
            return
        store, iteration = CheckpointStore(aside), int(state.facts.get("iteration", 0))
        known.write(store.begin(iteration), state)
        facts = {"iteration": iteration} | state.facts
        store.commit(iteration, facts)  # (without consumed_samples: those of the iterations)

    write_atomically(target, make, is_folder=not known.endings)


def check_target(
    source: Path,
    target: Path,
    overwrite: bool,
    is_ours: Callable[[Path], bool] = lambda path: False,
    flags: tuple[str, str] = ("SOURCE", "TARGET"),
) -> None:
    """Refuse to replace anything but a checkpoint, or what ``is_ours`` accepts, and that only with ``overwrite``.

    ``flags``: where the user named ``source`` and ``target``.
    """
    here, there, what = source.resolve(), target.resolve(), f"{flags[1]} = {target}"
    if here == there or there in here.parents or here in there.parents:
        raise CheckpointError(f"{what} overlaps with {flags[0]}. Choose another path.")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{what} exists. Choose another path, or add --overwrite.")
    is_checkpoint = CheckpointStore(target).iterations() or any(known.fits(target) for known in FORMATS.values())
    if target.is_dir() and not is_checkpoint and not is_ours(target):
        raise CheckpointError(f"{what} is a folder, but not a checkpoint. Choose another path.")


def write_atomically(target: Path, make: Callable[[Path], object], is_folder: bool) -> None:
    """Let ``make`` write a file, or fill an empty folder, at a temporary path; then rename it to ``target``.

    Raises CheckpointError if it cannot be written.
    """
    aside = target.with_name(f".{target.name}.partial")
    _remove(aside)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if is_folder:
            aside.mkdir()
        make(aside)
        _move(aside, target)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free / 2**30
        raise CheckpointError(
            f"TARGET = {target} cannot be written: {error} ({free:.2f} GiB are free on that disk). Free some space, or "
            "choose another path."
        ) from error
    finally:
        _remove(aside)


def _move(aside: Path, target: Path) -> None:
    """Replace ``target`` by ``aside`` once all of it is on the disk."""
    for file in [aside] if aside.is_file() else [path for path in aside.rglob("*") if path.is_file()]:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    if aside.is_file():
        os.replace(aside, target)
        return
    old = target.with_name(f".{target.name}.old")
    _remove(old)
    if target.exists():
        os.rename(target, old)
    os.rename(aside, target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
