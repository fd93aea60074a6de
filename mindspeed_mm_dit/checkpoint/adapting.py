"""Fine-tune from existing weights (--init-from): find the initial value of every parameter of a network."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import FORMATS, StorageSupport, format_of_source, read_weights
from mindspeed_mm_dit.checkpoint.lora import is_adapter
from mindspeed_mm_dit.checkpoint.state import Arrays, State, check_names, infer_predictor, shapes_of, without_projectors
from mindspeed_mm_dit.checkpoint.store import read_facts, read_newest
from mindspeed_mm_dit.configs.autoencoder import WEIGHT_FILES
from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import ParameterSpec, PredictorConfig
from mindspeed_mm_dit.errors import CheckpointError, UserError
from mindspeed_mm_dit.framework.low_bit import StoredArray, as_stored
from mindspeed_mm_dit.models.init import initial_value
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.weight_adapters import AdaptedTensor, SourceTensor, weight_converter_of

_HEADS = ("num_heads", "num_attention_heads")
"""Keys of the number of heads, which is compared by ``SourceWeights.num_heads`` if it is known."""


@dataclass(frozen=True)
class SourceWeights:
    """Existing weights to start from, and what is known about them."""

    path: Path
    format: str
    weights: Arrays
    """By their published names: the EMA if there is one."""
    predictor: PredictorConfig
    num_heads: int | None
    """None if unknown: no tensor's shape shows it."""
    facts: Mapping[str, Any]
    """Content of run.json; may be empty."""
    names: Mapping[str, int]
    """Label of each class by its name; empty if names are not known."""
    is_described: bool
    """Whether model.json or config.json describes the network; otherwise it is inferred from the tensors' shapes."""
    notes: tuple[str, ...] = ()
    """Notes for the user on how they were read."""

    @property
    def what(self) -> str:
        """The name used in errors."""
        return f"--init-from = {self.path}"


class InitialValue(NamedTuple):
    """The initial value of one parameter."""

    name: str
    value: np.ndarray
    """float32, or as the source stores it if that takes fewer bits."""
    how: str
    """How the tensor of the source was changed; empty if it is unchanged."""


def read_source(init_from: str | Path, here: PredictorConfig) -> SourceWeights:
    """Read weights of any format; check that they are complete and of the same kind of network as ``here``.

    Raises:
        CheckpointError: there are no weights, they are incomplete, or they are of another kind of network.
        PlatformError: reading them needs a framework that is not installed.
    """
    check_path("--init-from", str(init_from))

    def read_checkpoint(path: Path) -> SourceWeights:
        if is_adapter(path):
            raise CheckpointError(
                f"--init-from = {path} holds adapters (LoRA), not a whole network. Merge them into their base with "
                f"mm-dit convert BASE whole.safetensors --merge-lora {path}."
            )
        format_name = format_of_source(path)
        return _described_source(path, format_name, _read(path, format_name), here)

    try:
        source = read_newest(_model_path(Path(init_from)), "--init-from", read_checkpoint)
    except UserError as error:  # (from code shared with convert and sample, where the setting is SOURCE)
        named = re.sub(r"^(SOURCE|--checkpoint)( = [^:\s]+)?", lambda _: f"--init-from = {init_from}", str(error))
        raise type(error)(named) from None
    if source.predictor.model_id != here.model_id:
        raise CheckpointError(
            f"{source.what} is a network of kind {source.predictor.model_id!r}, but model.json describes one of kind "
            f"{here.model_id!r}. Name weights of a {here.model_id!r}."
        )
    shapes = shapes_of(source.weights)
    problem = f"is not a whole network of kind {here.model_id!r}"
    check_names(parameters_of(source.predictor).shapes(), shapes, source.what, problem, "Copy or download it again.")
    return source


def _model_path(path: Path) -> Path:
    """Return ``path``, or the diffusers folder that contains it as its file of weights."""
    is_weight_file = path.is_file() and path.name.partition(".")[0] == WEIGHT_FILES[0].partition(".")[0]
    is_part = is_weight_file and "diffusers" in FORMATS and FORMATS["diffusers"].fits(path.parent)
    return path.parent if is_part else path


def _read(path: Path, kind: str) -> State:
    """Read one set of weights, and nothing else of a training checkpoint, which holds the optimizer's moments too."""
    if FORMATS[kind].storage is StorageSupport.TRAINING:
        return State({"model": read_weights(path)}, read_facts(path))
    state = FORMATS[kind].read(path)
    return state.with_trees({"model": without_projectors(state.trees.get("ema", state.weights))})


def _described_source(path: Path, kind: str, state: State, here: PredictorConfig) -> SourceWeights:
    if state.is_autoencoder:
        raise CheckpointError(f"SOURCE is an autoencoder, not a predictor. Name weights of a {here.model_id!r}.")
    described: PredictorConfig | None = state.predictor
    if "model" in state.facts:
        described = model_config_from_mapping(state.facts["model"], f"{path}: its model.json").predictor
    predictor = described or _infer_predictor(state, here)
    num_heads = described.num_heads if described else state.config.get("num_attention_heads")
    names = FORMATS[kind].labels(path) or labels_by_class_name(state.facts.get("classes") or ())
    return SourceWeights(
        path, kind, state.weights, predictor, num_heads, state.facts, names, described is not None, state.notes
    )


def _infer_predictor(state: State, here: PredictorConfig) -> PredictorConfig:
    """Infer the network from the shapes in a file."""
    shapes = shapes_of(state.weights)
    if shapes == parameters_of(here).shapes():
        return here
    try:
        state.check_family("SOURCE")
        return infer_predictor(shapes, {})
    except CheckpointError as error:
        problem = str(error).partition(". ")[0].rstrip(".")
        raise CheckpointError(f"{problem}. Name weights of a {here.model_id!r}.") from None


def labels_by_class_name(classes: Sequence[str]) -> dict[str, int]:
    """Return the label of each class by its name; empty if every name is just the number of its class."""
    labels = {name: label for label, name in enumerate(classes)}
    return labels if any(name != str(label) for name, label in labels.items()) else {}


def _numbers(count: int) -> dict[str, int]:
    return {str(label): label for label in range(count)}


def adapt_weights(
    source: SourceWeights, here: PredictorConfig, classes: Sequence[str], seed: int
) -> list[InitialValue]:
    """Return the initial value of each parameter of ``here``, trained or not, in the order of the network.

    classes: name of each label of this run. seed: of the randomly initialised values, as in a run without a source.

    Raises:
        CheckpointError: the sizes of the source cannot be adapted; the error names settings and tensors.
    """
    labels = match_labels(source, here, classes)
    adapted = {
        name: _adapt_parameter(source, here, name, parameter, labels, seed)
        for name, parameter in parameters_of(here).items()
    }
    misfits = [name for name, tensor in adapted.items() if tensor is None]
    misfits += [
        name for name in source.weights if name not in adapted and not weight_converter_of(here).is_optional(name)
    ]
    differ = _differences(source, here)
    # (without a description all settings but num_heads were inferred from shapes, so misfits show what differs)
    if misfits or (differ if source.is_described else "num_heads" in differ):
        more = f"tensors that cannot be adapted: {', '.join(misfits[:3])}{' and more' if len(misfits) > 3 else ''}"
        raise CheckpointError(
            f"{source.what} does not fit this model: {'; '.join([*differ.values(), *([more] if misfits else [])])}. "
            f"Only {', '.join(weight_converter_of(here).adaptable(here))} may differ."
        )
    return [InitialValue(name, _with_few_bits(tensor.value), tensor.how) for name, tensor in adapted.items() if tensor]


def _with_few_bits(value: np.ndarray) -> np.ndarray:
    """Return an array as float32, or as it is stored if that takes fewer bits: it is widened when it is used."""
    stored = as_stored(value)
    array: Any = np.asarray(value, np.float32) if stored is None else StoredArray(stored)
    return array  # type: ignore[no-any-return]


def base_digest(weights: Mapping[str, np.ndarray]) -> str:
    """Return a digest of weights by name, float32: the same for every file, format and framework they come from."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].shape} ".encode())
        digest.update(np.ascontiguousarray(weights[name], np.float32).data)
    return digest.hexdigest()


def _adapt_parameter(
    source: SourceWeights,
    here: PredictorConfig,
    name: str,
    parameter: ParameterSpec,
    labels: Mapping[int, int],
    seed: int,
) -> AdaptedTensor | None:
    """Return the initial value of one parameter; None if the source has no tensor that fits."""
    initialised = lambda: initial_value(name, parameter, seed)  # noqa: E731
    if name not in source.weights:
        how = "drawn anew: the given weights have none"
        return AdaptedTensor(initialised(), how) if weight_converter_of(here).is_optional(name) else None
    tensor = SourceTensor(source.weights[name], source.predictor, parameter.shape, labels, initialised)
    adapted = weight_converter_of(here).adapt_weight(here, name, tensor)
    return adapted if adapted is not None and adapted.value.shape == parameter.shape else None


def match_labels(source: SourceWeights, here: PredictorConfig, classes: Sequence[str]) -> dict[int, int]:
    """Map this run's labels to those of the source.

    By name if both have names, or the same set of names; otherwise by number, if both have as many classes.
    """
    ours, theirs = here.conditions.label, source.predictor.conditions.label
    if ours is None or theirs is None:
        return {}
    names = labels_by_class_name(classes)
    our_labels, their_labels = names or _numbers(ours.num_classes), source.names or _numbers(theirs.num_classes)
    if (names and source.names) or set(our_labels) == set(their_labels):
        labels = {label: their_labels[name] for name, label in our_labels.items() if name in their_labels}
        labels = {a: b for a, b in labels.items() if a < ours.num_classes and b < theirs.num_classes}
    else:
        labels = {label: label for label in range(ours.num_classes) if ours.num_classes == theirs.num_classes}
    return labels | (
        {ours.num_classes: theirs.num_classes} if ours.has_unconditional and theirs.has_unconditional else {}
    )


def _differences(source: SourceWeights, here: PredictorConfig) -> dict[str, str]:
    """Describe each setting that differs and cannot be adapted, by its name."""
    differ = differing_settings(source.predictor, here)
    if source.num_heads not in (None, here.num_heads):
        differ["num_heads"] = f"num_heads is {source.num_heads} there and {here.num_heads} here"
    return differ


def differing_settings(there: PredictorConfig, here: PredictorConfig) -> dict[str, str]:
    """Describe each setting, other than the number of heads, that differs and cannot be adapted, by its name."""
    adaptable = (*_HEADS, *weight_converter_of(here).adaptable(here))
    return {
        name: f"{name} is {vars(there).get(name)} there and {value} here"
        for name, value in vars(here).items()
        if vars(there).get(name) != value and name not in adaptable
    }
