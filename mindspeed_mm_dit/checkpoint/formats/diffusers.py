"""A diffusers folder: ``config.json`` and weights of a DiT, Wan, an image transformer (FLUX) or an AutoencoderKL."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint import dit_names, frequencies
from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.formats import pt, safetensors
from mindspeed_mm_dit.checkpoint.shapes import check_claimed_sizes, described_by, named_kinds, predictor_of, vae_config
from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.checkpoint.store import RUN_FACTS
from mindspeed_mm_dit.configs.dit import DIT, OPTIONS, DiTConfig
from mindspeed_mm_dit.configs.files import UnusableFile, weight_file_in
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.limits import check_between, short_repr
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import PredictorConfig, count_of
from mindspeed_mm_dit.configs.strict import from_mapping, read_json
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.models.autoencoder_kl.files import with_new_names
from mindspeed_mm_dit.models.meta import parameters_of

WEIGHTS = "diffusion_pytorch_model"
_FILES = (
    f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json", f"{WEIGHTS}.bin", f"{WEIGHTS}.bin.index.json",
)  # fmt: skip
INDEX = "model_index.json"
CHANGES = "changed_for_diffusers.json"
TABLE = "y_embedder.embedding_table.weight"
"""Published name of the class embedding table, (classes + 1, D); its last row is the unconditional class."""
_DIT, _VAE = "DiTTransformer2DModel", "AutoencoderKL"
_OLD_DIT = "Transformer2DModel"  # as the published pipelines of 2022 call it
NOT_ITS_OWN = ("is not the network of its config.json", "copy or download the folder again")
LARGEST_FILE = 10_000_000_000
"""Bytes of weights in one file, as in diffusers; larger weights are split into several files with an index."""

UNCONDITIONAL_CLASS = 1000
"""The unconditional class of DiTPipeline, whichever label the network has for it."""

_FIXED = {
    "activation_fn": "gelu-approximate", "attention_bias": True, "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}  # fmt: skip
"""Keys of a DiT's config.json, with their only value in the published network."""


@dataclass(frozen=True)
class _Sizes:
    """The whole numbers in a DiT's config.json, by diffusers' keys."""

    sample_size: int
    num_embeds_ada_norm: int
    in_channels: int
    patch_size: int
    num_attention_heads: int
    attention_head_dim: int
    num_layers: int


@dataclass(frozen=True)
class Changes:
    """Keys of changed_for_diffusers.json: how the network in a pipeline written here differs from the original."""

    right_at: tuple[int, ...]
    """Timesteps at which its changed layer of the timestep code is right."""
    num_classes: int
    """The network's number of classes; all rows of the table from there on are the unconditional class."""

    def __post_init__(self) -> None:
        check_between("num_classes", self.num_classes, 1, UNCONDITIONAL_CLASS)


def fits(path: Path) -> bool:
    """Return whether ``path`` is a diffusers model folder, or a pipeline with ``transformer/`` in it."""
    return (model_folder(path) / "config.json").is_file()


def model_folder(path: Path) -> Path:
    """Return the folder of the network in a diffusers folder, which may be a pipeline."""
    return path if (path / "config.json").is_file() else path / "transformer"


def read(path: Path) -> State:
    """Read the weights by the published names, and config.json."""
    folder = model_folder(path)
    config = read_json(folder / "config.json", "SOURCE")
    stored = _read_stored(folder)
    arrays = stored.arrays
    state = State({"model": arrays}, config=config, is_bfloat16=stored.is_bfloat16, notes=stored.notes)
    if config.get("_class_name") == _VAE:
        return state.with_trees({"model": with_new_names(arrays)})
    if (network := described_by(config, f"{folder}/config.json")) is not None:  # (its names are ours)
        shapes = {name: array.shape for name, array in arrays.items()}
        check_names(parameters_of(network).shapes(), shapes, str(folder), *NOT_ITS_OWN)
        return state
    if config.get("_class_name") not in (_DIT, _OLD_DIT):
        raise CheckpointError(
            f"{folder}/config.json: _class_name = {short_repr(config.get('_class_name'))}",
            f"is none of {', '.join((_DIT, *named_kinds()))} and {_VAE}",
        )
    dit = dit_of(config, folder)
    _check_sizes(dit, arrays, folder)
    weights = dit_names.from_diffusers(arrays, dit, str(folder))
    if (folder / CHANGES).is_file():
        changes = from_mapping(Changes, read_json(folder / CHANGES, "SOURCE"), f"{folder}/{CHANGES}")
        weights = undone(weights, changes)
        config = config | {"num_embeds_ada_norm": len(weights[TABLE]) - 1}
    return replace(state, trees={"model": weights}, config=config)


def changed(weights: Arrays, changes: Changes) -> Arrays:
    """Adapt ``weights`` to DiTPipeline: to its timestep code, and to its label of the unconditional class."""
    *classes, unconditional = weights[TABLE]
    return weights | {
        frequencies.LAYER: frequencies.for_diffusers(weights[frequencies.LAYER], np.array(changes.right_at)),
        TABLE: np.stack([*classes, *[unconditional] * (UNCONDITIONAL_CLASS + 1 - changes.num_classes)]),
    }


def undone(weights: Arrays, changes: Changes) -> Arrays:
    """Undo :func:`changed`: the layer of the timestep code up to rounding, the table bit for bit."""
    table = weights[TABLE]
    return weights | {
        frequencies.LAYER: frequencies.from_diffusers(weights[frequencies.LAYER], np.array(changes.right_at)),
        TABLE: np.concatenate([table[: changes.num_classes], table[-1:]]),
    }


def labels_of(path: Path) -> dict[str, int]:
    """Return the label of each class name in a pipeline's model_index.json; several names may share one."""
    if not (path / INDEX).is_file():
        return {}
    known = read_json(path / INDEX, "SOURCE").get("id2label")
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


def _read_stored(folder: Path) -> safetensors.Stored:
    try:
        weight_file = weight_file_in(folder, _FILES).path
    except UnusableFile as problem:
        raise CheckpointError(str(folder), str(problem)) from None
    names = _indexed(weight_file) if weight_file.suffix == ".json" else {}
    files = [weight_file.parent / file for file in sorted(set(names.values()))] or [weight_file]
    if all(file.suffix == ".safetensors" for file in files):
        return safetensors.read_stored(files, weight_file, names)
    arrays = {name: array for file in files for name, array in pt.read(file).weights.items()}
    safetensors.check_named(names, arrays, weight_file)
    return safetensors.Stored(arrays, {}, False, ())


def _indexed(index: Path) -> dict[str, str]:
    """Return tensor -> file of the several files that an index names, as large networks are stored."""
    names = read_json(index, "SOURCE").get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(str(index), "has no weight_map of files", "copy or download the folder again")
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise CheckpointError(str(index), f"names {file!r}, which is not a file next to it")
        if not (index.parent / file).exists():
            raise CheckpointError(str(index), f"names {file}, which is not there", "copy or download that file too")
    return names


def dit_of(config: dict[str, Any], folder: Path) -> DiTConfig:
    """Return the DiT that the config.json of a folder describes; raises CheckpointError if it is none."""
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(f"{folder}/config.json: {key} = {config[key]!r}", f"a DiT has {expected!r}")
    names = [field.name for field in dataclasses.fields(_Sizes)]
    try:
        sizes = from_mapping(_Sizes, {name: config[name] for name in names if name in config}, f"{folder}/config.json")
        return DiTConfig(
            input_size=sizes.sample_size, num_classes=sizes.num_embeds_ada_norm, in_channels=sizes.in_channels,
            patch_size=sizes.patch_size, hidden_size=sizes.num_attention_heads * sizes.attention_head_dim,
            num_layers=sizes.num_layers, num_heads=sizes.num_attention_heads,
            learn_sigma=(config.get("out_channels") or sizes.in_channels) == 2 * sizes.in_channels,
        )  # fmt: skip
    except ConfigError as error:
        raise CheckpointError(error.what, error.reason, error.cure) from None


def _check_sizes(network: DiTConfig, arrays: Arrays, folder: Path) -> None:
    """Refuse wrong sizes in config.json before anything is counted or allocated by them."""
    blocks = count_of({name: array.shape for name, array in arrays.items()}, "transformer_blocks")
    if network.num_layers != blocks:
        raise CheckpointError(
            f"{folder}/config.json: num_layers = {network.num_layers}",
            f"the weights beside it have {blocks} blocks",
            "copy or download the folder again",
        )
    check_claimed_sizes(network, f"{folder}/config.json: sample_size = {network.input_size}")


def write(path: Path, state: State) -> None:
    """Write config.json and weights; a config.json read from diffusers is written unchanged."""
    shapes = {name: array.shape for name, array in state.weights.items()}
    if state.is_autoencoder:
        arrays, config = state.weights, with_vae_config(state)[0].config
    else:
        network = predictor_of(shapes, state.facts, state.config)
        if isinstance(network, (JointConfig, WanConfig)):  # (their names are diffusers')
            arrays, config = state.weights, state.config or joint_of(state, network).to_diffusers()
        else:
            dit = _published(network, state)
            arrays, config = dit_names.to_diffusers(state.weights, dit), state.config or _dit_json(dit)
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if "model" in state.facts and not state.is_autoencoder:  # (diffusers has no field for the objective)
        run_facts = {name: state.facts[name] for name in ("model", "classes") if name in state.facts}
        (path / RUN_FACTS).write_text(json.dumps(run_facts, indent=2) + "\n", encoding="utf-8")
    _write_parts(path, arrays, state.is_bfloat16)


def joint_of(state: State, inferred: JointConfig | WanConfig) -> JointConfig | WanConfig:
    """Return the network of model.json, or, without one, the network ``inferred`` from the shapes."""
    if "model" not in state.facts:
        return inferred
    network: JointConfig | WanConfig = model_config_from_mapping(state.facts["model"], "model.json").predictor
    return network


def _write_parts(folder: Path, arrays: Arrays, as_bfloat16: bool) -> None:
    """Write weights as one file, or as several of at most LARGEST_FILE bytes with an index."""
    parts: list[Arrays] = [{}]
    for name, array in arrays.items():
        if parts[-1] and sum(tensor.nbytes for tensor in parts[-1].values()) + array.nbytes > LARGEST_FILE:
            parts.append({})
        parts[-1][name] = array
    if len(parts) == 1:
        safetensors.write_arrays(folder / f"{WEIGHTS}.safetensors", arrays, {}, as_bfloat16)
        return
    files = [f"{WEIGHTS}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for file, part in zip(files, parts):
        safetensors.write_arrays(folder / file, part, {}, as_bfloat16)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in arrays.values())},
        "weight_map": {name: file for file, part in zip(files, parts) for name in part},
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")


def with_vae_config(state: State) -> tuple[State, list[str]]:
    """Return the autoencoder with a config.json, and a note on what was assumed for it.

    Raises ConfigError if the usual number of norm groups does not fit; the weights do not determine it.
    """
    if "_class_name" in state.config:
        return state, []
    guess = vae_config({name: array.shape for name, array in state.weights.items()})
    if any(width % guess.norm_num_groups for width in guess.block_out_channels):
        raise ConfigError(
            "--model",
            f"is needed: norm_num_groups cannot be inferred from the weights; the usual {guess.norm_num_groups} does "
            f"not divide the widths {', '.join(map(str, guess.block_out_channels))}",
            "give the autoencoder's config.json",
        )
    note = f"config.json: norm_num_groups = {guess.norm_num_groups} is assumed, as in Stable Diffusion's autoencoder"
    if "scaling_factor" not in state.config:
        note += "; scaling_factor is not known and left out"
    config = {"_class_name": _VAE, **dataclasses.asdict(guess), **state.config}
    return replace(state, config=config), [f"{note} (--model CONFIG_JSON sets both)"]


def _dit_json(network: DiTConfig) -> dict[str, Any]:
    if network.mlp_ratio != 4:
        raise CheckpointError(f"mlp_ratio = {network.mlp_ratio}", "diffusers' DiT has 4 and no setting for it")
    return {
        "_class_name": _DIT, **_FIXED, "norm_eps": 1e-6, "sample_size": network.input_size,
        "num_embeds_ada_norm": network.num_classes, "in_channels": network.in_channels,
        "out_channels": network.out_channels, "patch_size": network.patch_size, "num_layers": network.num_layers,
        "num_attention_heads": network.num_heads, "attention_head_dim": network.hidden_size // network.num_heads,
    }  # fmt: skip


def _published(predictor: PredictorConfig, state: State) -> DiTConfig:
    """Return the DiT with its number of heads; raises ConfigError for a predictor that diffusers does not have."""
    if not isinstance(predictor, DiTConfig):
        raise ConfigError(
            f"predictor {predictor.model_id!r}",
            "has no counterpart among diffusers' models here",
            "convert to safetensors, .pt or .ckpt",
        )
    check_options(predictor)
    if "model" in state.facts:  # (it has settings that show in no shape)
        check_options(model_config_from_mapping(state.facts["model"], "model.json").predictor)
    return dataclasses.replace(predictor, num_heads=_num_heads(predictor, state))


def check_options(network: DiTConfig) -> None:
    """Raise ConfigError, naming it, for an option of the network that diffusers' DiT does not have."""
    for name in OPTIONS:
        value = getattr(network, name)
        if value:
            raise ConfigError(
                f"predictor.{name} = {json.dumps(value)}",
                f"diffusers' {_DIT} has no such option",
                "convert to safetensors, .pt or .ckpt",
            )


def _num_heads(network: DiTConfig, state: State) -> int:
    """Return the number of heads, from config.json, model.json or the published model of these sizes."""
    if state.config:
        return int(state.config["num_attention_heads"])
    if "model" in state.facts:
        return int(model_config_from_mapping(state.facts["model"], "model.json").predictor.num_heads)
    for sizes in DIT.values():
        if (sizes["hidden_size"], sizes["num_layers"]) == (network.hidden_size, network.num_layers):
            return sizes["num_heads"]
    raise ConfigError(
        "--model",
        "is needed: the number of attention heads cannot be inferred from the weights",
        "give the model.json that they were trained with",
    )
