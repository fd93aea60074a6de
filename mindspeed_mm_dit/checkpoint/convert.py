"""Convert a checkpoint from one format to another; every tensor is accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint import checksums, frequencies
from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.formats import FORMATS, StorageSupport, choose_format, of_source
from mindspeed_mm_dit.checkpoint.formats.diffusers import with_vae_config
from mindspeed_mm_dit.checkpoint.lora.convert import convert_adapter
from mindspeed_mm_dit.checkpoint.lora.files import LORA_FORMATS
from mindspeed_mm_dit.checkpoint.lora.source import adapter_facts, is_adapter, merged, read_all
from mindspeed_mm_dit.checkpoint.published import without_projectors
from mindspeed_mm_dit.checkpoint.relative_paths import without_places
from mindspeed_mm_dit.checkpoint.shapes import Shapes, check_family, predictor_of, vae_config, vae_shapes
from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, SETTINGS, CheckpointStore, of_newest
from mindspeed_mm_dit.checkpoint.targets import Summary, check_target, written
from mindspeed_mm_dit.configs.autoencoder import SCALE
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import Parameters
from mindspeed_mm_dit.configs.run import check_output_folder
from mindspeed_mm_dit.configs.tuning import tuning_in
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.weight_adapters import adapter_of
from mindspeed_mm_dit.optimizers.registry import chosen_in

DIFFUSERS_CAVEAT = (
    "diffusers spaces the 128 timestep frequencies by 1/127, the published DiT by 1/128; its outputs equal ours once "
    "every module's downscale_freq_shift is 0"
)
PIPELINE_CAVEAT = (
    "DiTPipeline generates what mm-dit sample --sampler ddim --cfg-channels all generates from the same noise, in 50 "
    "steps (its default), 25, 10 and 5: for these, the layer of the timestep code is changed, as diffusers spaces its "
    "frequencies differently; with other numbers of steps, or other schedulers, images differ. Reading the folder here "
    "undoes the change, up to rounding. DiTPipeline does not use a learned variance"
)


def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    weights: str | None = None,
    description: dict[str, Any] | None = None,
    overwrite: bool = False,
    echo: Callable[[str], object] = lambda line: None,
    loras: Sequence[str] = (),
) -> Summary:
    """Write the checkpoint ``source`` as ``target``.

    Args:
        source: a file, a checkpoint folder, or a folder of those (the newest is used).
        target: a new file or folder.
        to: format of the target; by default the one of its ending.
        weights: "model" or "ema": only these; by default everything the target can store.
        description: content of model.json or, for a VAE, of diffusers' config.json.
        overwrite: replace an existing checkpoint.
        echo: called with a line before each long step.
        loras: adapters to merge into the weights, each FILE or FILE:STRENGTH.

    Raises:
        CheckpointError: tensors are unknown, missing or misshapen, or the target exists.
        ConfigError: no format fits, or the target cannot be written.
        PlatformError: a required framework is not installed.
    """
    convert_one = lambda path: _convert(path, Path(target), to, weights, description, overwrite, echo, loras)  # noqa: E731
    return convert_one(Path(source)) if Path(source).is_file() else of_newest(source, "SOURCE", convert_one)


def _convert(
    source: Path, target: Path, to: str | None, weights: str | None, description: dict[str, Any] | None,
    overwrite: bool, echo: Callable[[str], object], loras: Sequence[str],
) -> Summary:  # fmt: skip
    if is_adapter(source) and not (adapter_facts(source) and to in _TRAINING_FORMATS):
        if loras:
            raise ConfigError(
                "--merge-lora", "SOURCE holds adapters itself", "name the weights of their base as SOURCE"
            )
        return convert_adapter(source, target, to, weights != "model", description, overwrite, echo)
    if to in LORA_FORMATS and to not in FORMATS:
        raise ConfigError(
            f"--to = {to}",
            "is a form of adapters (LoRA), and SOURCE holds whole weights",
            f"formats of these are: {', '.join(FORMATS)}",
        )
    target_format = choose_format(target, to)
    source_format = of_source(source)
    check_target(source, target, overwrite)
    check_output_folder("folder of TARGET", target.parent)
    echo(f"reading {source} ({source_format})")
    state = FORMATS[source_format].read(source)
    notes = [*state.notes]
    if FORMATS[target_format].storage is not StorageSupport.TRAINING:
        state, left_out = _without_projectors(state)
        notes += left_out
    if description is not None:
        state = _described(state, description)
    check(state, str(source))
    state, merging = _merge_loras(state, loras)
    state, differences = fit(state, FORMATS[target_format].storage, weights)
    notes += [*merging, *differences]
    if FORMATS[source_format].storage is StorageSupport.TRAINING and not checksums.are_in(source):
        notes.append("SOURCE has no checksums, so it could not be checked for damage")
    notes += _caveats(state, (source_format, target_format)) + _assumption_notes(state, target_format)
    if state.is_autoencoder:
        state, defaults_for_missing = _with_config(state, target_format)
        notes += defaults_for_missing
    echo(f"writing {target} ({target_format}): {state.num_tensors} tensors, {state.num_bytes / 1e6:.1f} MB")
    write(target, target_format, state)
    return Summary(source, source_format, target, target_format, tuple(state.trees), state.num_tensors,
                   state.num_bytes, tuple(notes))  # fmt: skip


def _caveats(state: State, formats: tuple[str, str]) -> list[str]:
    """Return notes on weights that come from, or go to, diffusers."""
    notes = []
    if frequencies.LAYER in state.weights and "diffusers" in formats:
        notes.append(DIFFUSERS_CAVEAT)
    if "pipeline" in formats and frequencies.LAYER in state.weights:
        notes.append(PIPELINE_CAVEAT)
    return notes


def _assumption_notes(state: State, target_format: str) -> list[str]:
    """Return a note on the settings of config.json that no tensor shows."""
    if target_format != "diffusers" or state.is_autoencoder or state.config or "model" in state.facts:
        return []
    network = predictor_of(_shapes(state.weights), {})
    missing = adapter_of(network).defaults_for_missing(network)
    settings = ", ".join(f"{key} = {json.dumps(getattr(network, key))}" for key in missing)
    note = f"config.json: assumed, as in the published networks: {settings} (--model MODEL_JSON sets them)"
    return [note] if settings else []


def _with_config(state: State, target_format: str) -> tuple[State, list[str]]:
    """Return the autoencoder with the config.json its target can store, and notes on what is assumed or left out."""
    if target_format == "diffusers":
        return with_vae_config(state)
    if state.config and target_format != "safetensors":
        where = "put a copy next to it, where readers look for it"
        return state, [f"a {target_format} file cannot store config.json: {where}"]
    return state, []


_TRAINING_FORMATS = tuple(name for name, known in FORMATS.items() if known.storage is StorageSupport.TRAINING)


def _merge_loras(state: State, loras: Sequence[str]) -> tuple[State, list[str]]:
    """Return ``state`` with adapters merged into its weights and EMAs, and notes on what that costs."""
    if not loras:
        return state, []
    model = None
    with suppress(KeyError, UserError):  # (of another program, or of parts that are not here)
        model = model_config_from_mapping(state.facts["model"], "SOURCE: its model.json")
    adapters = read_all(loras, _shapes(state.weights), "--merge-lora", model)
    trees = {name: merged(arrays, adapters) for name, arrays in state.trees.items() if name != "optimizer"}
    notes = [note for adapter, _ in adapters for note in adapter.notes]
    if "optimizer" in state.trees:
        notes.append("the optimizer's state is left out: it belongs to the weights without the adapters")
    return replace(state, trees=trees, is_bfloat16=False), notes


def _without_projectors(state: State) -> tuple[State, list[str]]:
    """Return ``state`` without the projectors to a teacher's features, and a note if there were any."""
    stripped = state.with_trees({name: without_projectors(arrays) for name, arrays in state.trees.items()})
    num_removed = len(state.weights) - len(stripped.weights)
    return stripped, [
        f"left out: {num_removed} tensors of projectors (REPA), which no sample needs"
    ] if num_removed else []


def _described(state: State, description: dict[str, Any]) -> State:
    if state.is_autoencoder and "ae" in description:  # a model.json; it has only the scale of a config.json
        section = description["ae"] if isinstance(description["ae"], dict) else {}
        scale = {key: section[key] for key in SCALE if key in section}
        return replace(state, config=state.config | scale)
    if state.is_autoencoder:
        if "_class_name" not in description:
            raise ConfigError("--model", "is neither a model.json nor diffusers' config.json of an autoencoder")
        return replace(state, config=description)
    model = model_config_from_mapping(description, "--model")
    model = model if any(name.startswith("projectors.") for name in state.weights) else model.without_teachers()
    check_family(state.weights, "SOURCE", model.predictor.model_id)
    described = parameters_of(model.predictor).shapes()
    reason, cure = (
        "describes another network than SOURCE holds",
        "give the model.json that the weights were trained with",
    )
    check_names(described, _shapes(state.weights), "--model", reason, cure)
    return replace(state, facts=state.facts | {"model": description})


def check(state: State, what: str) -> None:
    """Raise CheckpointError, naming the tensors, unless all trees belong to the same network."""
    shapes = {tree: _shapes(arrays) for tree, arrays in state.trees.items()}
    first = shapes[next(iter(shapes))]
    if state.is_autoencoder:
        kind, weight_shapes = "autoencoder_kl", vae_shapes(vae_config(first))
        optimizer_shapes: Shapes = {}
    else:
        parameters, kind = _parameters(first, state)
        weight_shapes = parameters.shapes(saved_only=True)
        optimizer_shapes = _optimizer_shapes(parameters, state, what) if "optimizer" in shapes else {}
    for tree, actual in shapes.items():
        expected = optimizer_shapes if tree == "optimizer" else weight_shapes
        reason = f"the tensors of {tree!r} are not those of one {kind} network"
        check_names(expected, actual, what, reason, "copy or download it again")


def _shapes(arrays: Arrays) -> Shapes:
    return {name: array.shape for name, array in arrays.items()}


def _parameters(shapes: Shapes, state: State) -> tuple[Parameters, str]:
    """Return the parameters that a checkpoint was trained with, and the kind of its network."""
    predictor = predictor_of(shapes, state.facts, state.config)
    settings = state.facts.get(SETTINGS)
    tuning = tuning_in(state.facts.get(ADAPTERS) or (settings if isinstance(settings, dict) else {}))
    return tuning.applied(parameters_of(predictor)), predictor.model_id


def _optimizer_shapes(parameters: Parameters, state: State, what: str) -> Shapes:
    optimizer = chosen_in(state.facts.get(SETTINGS), what)
    return {
        f"state.{name}.{kind}": shape
        for name, parameter in parameters.items()
        if parameter.trained
        for kind, shape in optimizer.state_of(parameter).items()
    }


def fit(state: State, storage: StorageSupport, weights: str | None) -> tuple[State, list[str]]:
    """Return the part of ``state`` that the target can store, and a note for each difference."""
    trees, notes = dict(state.trees), []
    if storage is StorageSupport.TRAINING:
        return _for_training(state, weights)
    if weights is not None and weights not in trees:
        raise ConfigError(f"--weights = {weights}", f"SOURCE holds only {', '.join(trees)}")
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
        raise CheckpointError("SOURCE", "is an autoencoder: no run trains it", "convert to a file or to diffusers")
    if weights is not None:
        raise ConfigError(f"--weights = {weights}", "a checkpoint folder holds both", "leave the flag out")
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
        state = replace(state, facts=without_places(state.facts))

    def make(aside: Path) -> None:
        if known.storage is not StorageSupport.TRAINING:
            known.write(aside, state)
            return
        store, iteration = CheckpointStore(aside), int(state.facts.get("iteration", 0))
        known.write(store.begin(iteration), state)
        facts = {"iteration": iteration} | state.facts
        store.commit(iteration, facts)  # (without consumed_samples: those of the iterations)

    written(target, make, is_folder=not known.endings)
