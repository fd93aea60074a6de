"""A diffusers folder: ``config.json`` and weights of a DiT, Wan, an image transformer (FLUX) or an AutoencoderKL.

A DiT there has other names and another timestep code than the published ones that we have. DiTTransformer2DModel
repeats the timestep and label embedders in every block, and has separate query, key and value. It computes the
positional embedding, so its files have none. The tensors are the same, but not quite the network: both codes of a
timestep are cosines and sines of 128 angles, timestep times frequency. The published frequencies are 10000^(-i / 128),
those of diffusers 10000^(-i / 127) (``downscale_freq_shift``), so the first layer of the timestep embedder gets other
inputs there. For up to about 50 timesteps a linear map turns diffusers' code into the published one. A pipeline gets
the layer changed by the smallest such map; at other timesteps it is about as wrong as unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import Format, StorageSupport
from mindspeed_mm_dit.checkpoint.state import Arrays, State, check_names, infer_predictor, shapes_of
from mindspeed_mm_dit.checkpoint.store import RUN_FACTS, read_facts
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.files import UnusableFile, weight_file_in
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.limits import check_between, shorten_repr
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import Shape
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.integrations.formats import config_json, families
from mindspeed_mm_dit.integrations.formats.config_json import INDEX, low_noise_folder, wan_model_of
from mindspeed_mm_dit.integrations.formats.families import DIT_RULES
from mindspeed_mm_dit.integrations.formats.single_files import (
    Stored,
    check_named,
    read_pt,
    read_stored,
    write_arrays,
)
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import FREQUENCY_WIDTH, sincos_positions_2d, timestep_frequencies
from mindspeed_mm_dit.models.pretrained import with_new_names
from mindspeed_mm_dit.models.weight_adapters import QUANTIZATION, count_of, weight_converter_of

TABLE = "y_embedder.embedding_table.weight"
"""Published name of the class embedding table, (classes + 1, D); its last row is the unconditional class."""
UNCONDITIONAL_CLASS = 1000
"""The unconditional class of DiTPipeline, whichever label the network has for it."""
LAYER = "t_embedder.mlp.0.weight"
"""Published name of the layer that takes the timestep code, (D, 256)."""
STEPS = 50
"""Default of DiTPipeline; trajectories of 25, 10, 5, 2 and 1 steps visit some of the same timesteps."""
_SMALLEST = 1e-3
"""If the smallest singular value of the codes is below this, float32 cannot tell the timesteps apart."""
WRONG_CONFIG_ERROR = ("is not the network of its config.json", "Copy or download the folder again.")


# --- names ------------------------------------------------------------------------------------------------------------


def to_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig) -> Arrays:
    """Rename and split the tensors of a DiT; all of them must be there, and no others."""
    arrays = dict(arrays)
    positions = arrays.pop("pos_embed")
    difference = np.abs(positions.astype(np.float64) - _positions(config)).max()
    if difference > (1e-2 if positions.dtype == np.float16 else 1e-6):
        raise CheckpointError(
            "pos_embed of SOURCE is not the sin-cos code that diffusers computes instead. Convert to .safetensors."
        )
    return families.to_diffusers(arrays, DIT_RULES)


def from_diffusers(arrays: Mapping[str, np.ndarray], config: DiTConfig, what: str) -> Arrays:
    """Undo :func:`to_diffusers`; raises CheckpointError for unknown, missing and misshapen tensors of ``what``."""
    arrays = {name: array for name, array in arrays.items() if name != "pos_embed.pos_embed"}  # before 2024
    check_names(diffusers_shapes(config), shapes_of(arrays), what, *WRONG_CONFIG_ERROR)
    try:
        out = {"pos_embed": _positions(config), **families.to_original(arrays, DIT_RULES)}
    except ValueError as error:
        name, problem = error.args
        raise CheckpointError(f"{what}: {name} {problem}.") from None
    return {name: out[name] for name in parameters_of(config).shapes()}


def diffusers_shapes(config: DiTConfig) -> dict[str, Shape]:
    """Return the shapes of the same DiT by diffusers' names."""
    shapes = {name: shape for name, shape in parameters_of(config).shapes().items() if name != "pos_embed"}
    meta_arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    return shapes_of(families.to_diffusers(meta_arrays, DIT_RULES))


def _positions(config: DiTConfig) -> np.ndarray:
    return sincos_positions_2d(config.hidden_size, config.input_size // config.patch_size)[None]


# --- what a pipeline needs changed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """Keys of changed_for_diffusers.json: how the network in a pipeline written here differs from the original."""

    right_at: tuple[int, ...]
    """Timesteps at which its changed layer of the timestep code is right."""
    num_classes: int
    """The network's number of classes; all rows of the table from there on are the unconditional class."""

    def __post_init__(self) -> None:
        check_between("num_classes", self.num_classes, 1, UNCONDITIONAL_CLASS)


def convert_for_pipeline(weights: Arrays, changes: Changes) -> Arrays:
    """Adapt ``weights`` to DiTPipeline: to its timestep code, and to its label of the unconditional class."""
    *classes, unconditional = weights[TABLE]
    layer = weights[LAYER]
    return weights | {
        LAYER: (layer.astype(np.float64) @ conversion_matrix(np.array(changes.right_at)).T).astype(layer.dtype),
        TABLE: np.stack([*classes, *[unconditional] * (UNCONDITIONAL_CLASS + 1 - changes.num_classes)]),
    }


def convert_from_pipeline(weights: Arrays, changes: Changes) -> Arrays:
    """Undo :func:`convert_for_pipeline`: the layer of the timestep code up to rounding, the table bit for bit."""
    table, layer = weights[TABLE], weights[LAYER]
    original = np.linalg.solve(conversion_matrix(np.array(changes.right_at)), layer.astype(np.float64).T).T
    return weights | {
        LAYER: original.astype(layer.dtype),
        TABLE: np.concatenate([table[: changes.num_classes], table[-1:]]),
    }


def ddim_timesteps(num_train_timesteps: int) -> np.ndarray:
    """Return the timesteps of a DDIM trajectory with diffusers' "leading" spacing, ascending, (STEPS,) int64."""
    return np.arange(STEPS) * (num_train_timesteps // STEPS)


def diffusers_frequencies() -> np.ndarray:
    """Return the frequencies of diffusers' DiT, (128,) float32, rounded as PyTorch rounds them."""
    half = FREQUENCY_WIDTH // 2
    exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half - 1)
    return np.exp(exponent.astype(np.float64)).astype(np.float32)


def sinusoids(timesteps: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Return the code of ``timesteps`` (N,), cosines and then sines of the angles: (N, 256) float64."""
    angles = np.outer(timesteps, frequencies.astype(np.float64))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def conversion_matrix(timesteps: np.ndarray) -> np.ndarray:
    """Return K (256, 256) float64: the weights W K^T give for diffusers' code what W gives for the published one.

    With diffusers' codes X and the published codes Y, X K = Y at ``timesteps`` (N,). Of all such maps, the one with the
    smallest K - 1 is K = 1 + X^+ (Y - X).

    Raises:
        ConfigError: the timesteps are too many, or too close to each other, for one map.
    """
    theirs = sinusoids(timesteps, diffusers_frequencies())
    if np.linalg.svd(theirs, compute_uv=False)[-1] < _SMALLEST:
        raise ConfigError(
            f"diffusion.num_train_timesteps is too small: the {len(timesteps)} timesteps from 0 to {timesteps[-1]} of "
            "a trajectory are too close together for diffusers' timestep code. Convert the network alone (--to "
            "diffusers)."
        )
    ours = sinusoids(timesteps, timestep_frequencies(FREQUENCY_WIDTH))
    return np.eye(FREQUENCY_WIDTH) + np.linalg.pinv(theirs) @ (ours - theirs)


WEIGHTS = "diffusion_pytorch_model"
_FILES = tuple(f"{WEIGHTS}.{ending}" for ending in ("safetensors", "safetensors.index.json", "bin", "bin.index.json"))
CHANGES = "changed_for_diffusers.json"
MAX_FILE_BYTES = 10_000_000_000
"""Bytes of weights in one file, as in diffusers; larger weights are split into several files with an index."""


def fits(path: Path) -> bool:
    """Return whether ``path`` is a diffusers model folder, or a pipeline with ``transformer/`` in it."""
    return (model_folder(path) / "config.json").is_file()


def model_folder(path: Path) -> Path:
    """Return the folder of the network in a diffusers folder, which may be a pipeline."""
    return path if (path / "config.json").is_file() else path / "transformer"


def facts(path: Path) -> dict[str, Any]:
    """Return the facts that were written into the folder, or the model.json that a Wan pipeline amounts to."""
    described = wan_model_of(path)
    return {"model": described} if described else read_facts(model_folder(path))


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> State:
    """Read the weights by the published names, and config.json."""
    folder = model_folder(path)
    config = read_json(folder / "config.json", "SOURCE")
    config.pop(QUANTIZATION, None)  # (what is written from these weights is not quantised)
    stored = _read_stored(folder)
    arrays = stored.arrays
    state = State({"model": arrays}, config=config, is_bfloat16=stored.is_bfloat16, notes=stored.notes)
    if config.get("_class_name") == config_json.VAE_CLASS:
        return state.with_trees({"model": with_new_names(arrays)})
    if (
        network := config_json.config_from_diffusers(config, f"{folder}/config.json")
    ) is not None:  # (its names are ours)
        check_names(parameters_of(network).shapes(), shapes_of(arrays), str(folder), *WRONG_CONFIG_ERROR)
        return replace(state, predictor=network)
    if config.get("_class_name") not in config_json.DIT_CLASSES:
        known = (config_json.DIT_CLASS, *config_json.diffusers_predictors())
        raise CheckpointError(
            f"{folder}/config.json: _class_name = {shorten_repr(config.get('_class_name'))} is none of "
            f"{', '.join(known)} and {config_json.VAE_CLASS}."
        )
    dit = config_json.read_dit_config(config, folder)
    _check_sizes(dit, arrays, folder)
    weights = from_diffusers(arrays, dit, str(folder))
    if (folder / CHANGES).is_file():
        content = read_json(folder / CHANGES, "SOURCE")
        weights = convert_from_pipeline(weights, from_mapping(Changes, content, f"{folder}/{CHANGES}"))
        config = config | {"num_embeds_ada_norm": len(weights[TABLE]) - 1}
    return replace(state, trees={"model": weights}, config=config)


def labels_of(path: Path) -> dict[str, int]:
    """Return the label of each class name in a pipeline's model_index.json; several names may share one."""
    known = read_json(path / INDEX, "SOURCE").get("id2label") if (path / INDEX).is_file() else None
    pairs = known.items() if isinstance(known, dict) else ()
    return {
        name.strip(): int(label)
        for label, names in pairs
        if str(label).isdecimal()
        for name in str(names).split(",")
        if name.strip()
    }


def read_arrays(folder: Path) -> Arrays:
    """Return the weights in a diffusers model folder by diffusers' names, from one file or from several."""
    return _read_stored(folder).arrays


def _read_stored(folder: Path) -> Stored:
    try:
        weight_file = weight_file_in(folder, _FILES).path
    except UnusableFile as problem:
        raise CheckpointError(f"{folder} {problem}. Copy or download the folder again.") from None
    names = _indexed(weight_file) if weight_file.suffix == ".json" else {}
    files = [weight_file.parent / file for file in sorted(set(names.values()))] or [weight_file]
    if all(file.suffix == ".safetensors" for file in files):
        return read_stored(files, weight_file, names)
    arrays = {name: array for file in files for name, array in read_pt(file).weights.items()}
    check_named(names, arrays, weight_file)
    return Stored(arrays, {}, False, ())


def _indexed(index: Path) -> dict[str, str]:
    """Return tensor -> file of the several files that an index names, as large networks are stored."""
    names = read_json(index, "SOURCE").get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no weight_map of files. Copy or download the folder again.")
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{index} names {file!r}, which is not a file next to it.")
        if not (index.parent / file).exists():
            raise CheckpointError(f"{index} names {file}, which is not there. Copy or download that file too.")
    return names


def _check_sizes(network: DiTConfig, arrays: Arrays, folder: Path) -> None:
    """Refuse wrong sizes in config.json before anything is counted or allocated by them."""
    blocks = count_of(shapes_of(arrays), "transformer_blocks")
    if network.num_layers != blocks:
        raise CheckpointError(
            f"{folder}/config.json: num_layers = {network.num_layers}, but the weights next to it have {blocks} "
            "blocks. Copy or download the folder again."
        )
    config_json.check_declared_sizes(network, f"{folder}/config.json: sample_size = {network.input_size}")


# --- writing ----------------------------------------------------------------------------------------------------------


def write(path: Path, state: State) -> None:
    """Write config.json and weights; a config.json read from diffusers is written unchanged."""
    if state.is_autoencoder:
        arrays, config = state.weights, config_json.with_vae_config(state)[0].config
    else:
        network = infer_predictor(shapes_of(state.weights), state.facts, state.predictor)
        if isinstance(network, (JointConfig, WanConfig)):  # (their names are diffusers')
            network = _by_model_json(state, network)
            arrays, config = state.weights, state.config or weight_converter_of(network).to_diffusers(network)
        else:
            dit = config_json.dit_with_heads(network, state)
            arrays, config = to_diffusers(state.weights, dit), state.config or config_json.dit_json(dit)
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if "model" in state.facts and not state.is_autoencoder:  # (diffusers has no field for the objective)
        run_facts = {name: state.facts[name] for name in ("model", "classes") if name in state.facts}
        (path / RUN_FACTS).write_text(json.dumps(run_facts, indent=2) + "\n", encoding="utf-8")
    _write_parts(path, arrays, state.is_bfloat16)


def _by_model_json(state: State, inferred: JointConfig | WanConfig) -> JointConfig | WanConfig:
    """Return the network of model.json, or, without one, the network ``inferred`` from the shapes."""
    if "model" not in state.facts:
        return inferred
    network: JointConfig | WanConfig = model_config_from_mapping(state.facts["model"], "model.json").predictor
    return network


def _write_parts(folder: Path, arrays: Arrays, as_bfloat16: bool) -> None:
    """Write weights as one file, or as several of at most MAX_FILE_BYTES bytes with an index."""
    parts: list[Arrays] = [{}]
    for name, array in arrays.items():
        if parts[-1] and sum(tensor.nbytes for tensor in parts[-1].values()) + array.nbytes > MAX_FILE_BYTES:
            parts.append({})
        parts[-1][name] = array
    if len(parts) == 1:
        write_arrays(folder / f"{WEIGHTS}.safetensors", arrays, {}, as_bfloat16)
        return
    files = [f"{WEIGHTS}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(files, parts):
        write_arrays(folder / file, part, {}, as_bfloat16)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in arrays.values())},
        "weight_map": {name: file for file, part in zip(files, parts) for name in part},
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")


DIFFUSERS = Format(fits, read, write, StorageSupport.ONE_TREE, facts=facts, second_network=low_noise_folder)
