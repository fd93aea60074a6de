"""What a network begins as where weights of another one of its kind are given (--init-from)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.formats import FORMATS, diffusers, of_source
from mindspeed_mm_dit.checkpoint.formats.contract import Room
from mindspeed_mm_dit.checkpoint.published import without_projectors
from mindspeed_mm_dit.checkpoint.shapes import Shapes, predictor_of
from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.checkpoint.store import find_checkpoint, read_facts
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import Begun, Offer, Parameter, PredictorConfig
from mindspeed_mm_dit.errors import CheckpointError, UserError
from mindspeed_mm_dit.models.init import initial_value

_HEADS = ("num_heads", "num_attention_heads")
"""Keys of the number of heads; ``Source.num_heads`` says it, where anything does."""


@dataclass(frozen=True)
class GivenWeights:
    """Weights to begin with, and what is known of them."""

    path: Path
    format: str
    weights: Arrays
    """By their published names: the moving average where there is one."""
    predictor: PredictorConfig
    num_heads: int | None
    """None where nothing says it: it shows in no tensor."""
    facts: Mapping[str, Any]
    """Content of run.json; may be empty."""
    names: Mapping[str, int]
    """Label by the name of the class; empty where names are not known."""

    @property
    def what(self) -> str:
        """How an error calls it."""
        return f"--init-from = {self.path}"


class Beginning(NamedTuple):
    """What one parameter begins as."""

    name: str
    value: np.ndarray
    """float32."""
    how: str
    """What was done to the tensor of the source; empty where it was taken as it is."""


def read_source(given: str | Path, here: PredictorConfig) -> GivenWeights:
    """Read weights of any format, known to be whole and of the kind of ``here``.

    Raises:
        CheckpointError: there are no weights, they are not whole, or of another kind of network.
        PlatformError: a framework that is needed to read them is not installed.
    """
    check_path("--init-from", str(given))
    try:
        path = _place(Path(given))
        kind = of_source(path)
        state = _read(path, kind)
        source = _source(path, kind, state, here)
    except UserError as error:  # which convert and sample share, and call SOURCE
        if error.what.partition(" ")[0] in ("SOURCE", "SOURCE:", "--checkpoint"):
            raise type(error)(f"--init-from = {given}", error.reason, error.cure) from None
        raise
    if source.predictor.model_id != here.model_id:
        raise CheckpointError(
            source.what, f"is a network of kind {source.predictor.model_id!r}, and model.json describes one of kind "
            f"{here.model_id!r}", f"name weights of a {here.model_id!r}",
        )  # fmt: skip
    found = {name: array.shape for name, array in source.weights.items()}
    reason = f"is not a whole network of kind {here.model_id!r}"
    check_names(source.predictor.parameters().shapes(), found, source.what, reason, "copy or download it again")
    return source


def _place(path: Path) -> Path:
    """Return the newest checkpoint of a folder, or the folder of diffusers that a file of weights lies in."""
    if path.is_file() and path.stem == diffusers.WEIGHTS and diffusers.fits(path.parent):
        return path.parent
    return find_checkpoint(path) if path.is_dir() else path


def _read(path: Path, kind: str) -> State:
    """Read one set of weights: of a training checkpoint, which holds the moments too, no more than that."""
    if FORMATS[kind].room is Room.TRAINING:
        return State({"model": read_weights(path)}, read_facts(path))
    state = FORMATS[kind].read(path)
    return state.with_trees({"model": without_projectors(state.trees.get("ema", state.weights))})


def _source(path: Path, kind: str, state: State, here: PredictorConfig) -> GivenWeights:
    if state.is_autoencoder:
        raise CheckpointError("SOURCE", "is an autoencoder, and no predictor", f"name weights of a {here.model_id!r}")
    shapes = {name: array.shape for name, array in state.weights.items()}
    if "model" in state.facts:
        predictor: PredictorConfig = model_config_from_mapping(
            state.facts["model"], f"{path}: its model.json"
        ).predictor
        num_heads: int | None = predictor.num_heads
    else:
        predictor, num_heads = _told_by(shapes, here), state.config.get("num_attention_heads")
    return GivenWeights(path, kind, state.weights, predictor, num_heads, state.facts, _names(path, kind, state.facts))


def _told_by(shapes: Shapes, here: PredictorConfig) -> PredictorConfig:
    """Return what network the shapes of a file tell."""
    if shapes == here.parameters().shapes():
        return here
    try:
        return predictor_of(shapes, {})
    except CheckpointError as error:
        raise CheckpointError(error.what, error.reason, f"name weights of a {here.model_id!r}") from None


def _names(path: Path, kind: str, facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the label of each class by its name; empty where names are not known."""
    return diffusers.labels_of(path) if kind == "pipeline" else by_name(facts.get("classes") or ())


def by_name(classes: Sequence[str]) -> dict[str, int]:
    """Return label by name; empty where every class is called by its number alone."""
    labels = {name: label for label, name in enumerate(classes)}
    return labels if any(name != str(label) for name, label in labels.items()) else {}


def begin(source: GivenWeights, here: PredictorConfig, classes: Sequence[str], seed: int) -> list[Beginning]:
    """Return what each parameter of ``here`` begins as, trained or not, in the order of the network.

    classes: name of each label of this run. seed: decides what is drawn anew, as it does without a source.

    Raises:
        CheckpointError: the source is of a size that cannot be adapted; settings and tensors are named.
    """
    labels = same_labels(source, here, classes)
    found = {name: _begun(source, here, name, wanted, labels, seed) for name, wanted in here.parameters()}
    misfits = [name for name, begun in found.items() if begun is None]
    misfits += [name for name in source.weights if name not in found and not here.may_lack(name)]
    differ = _differences(source, here)
    if misfits or _decides(source, differ):
        more = f"tensors without a counterpart: {', '.join(misfits[:3])}{', ...' if len(misfits) > 3 else ''}"
        raise CheckpointError(
            source.what, f"does not fit this model: {'; '.join([*differ.values(), *([more] if misfits else [])])}",
            f"only {', '.join(here.adaptable)} may differ",
        )  # fmt: skip
    return [Beginning(name, np.asarray(begun.value, np.float32), begun.how) for name, begun in found.items() if begun]


def digest_of_base(weights: Mapping[str, np.ndarray]) -> str:
    """Return a digest of weights by name, float32: the same whatever file, format or framework they come from."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(f"{name} {weights[name].shape} ".encode())
        found.update(np.ascontiguousarray(weights[name], np.float32).data)
    return found.hexdigest()


def _begun(
    source: GivenWeights, here: PredictorConfig, name: str, wanted: Parameter, labels: Mapping[int, int], seed: int
) -> Begun | None:
    draw = lambda: initial_value(name, wanted, seed)  # noqa: E731
    if name not in source.weights:
        return Begun(draw(), "drawn anew: the weights given have none") if here.may_lack(name) else None
    begun = here.begun_from(name, Offer(source.weights[name], source.predictor, wanted.shape, labels, draw))
    return begun if begun is not None and begun.value.shape == wanted.shape else None


def same_labels(source: GivenWeights, here: PredictorConfig, classes: Sequence[str]) -> dict[int, int]:
    """Return label here -> label there: by name where both sides have names, by number where there are as many."""
    ours, theirs = here.conditions.label, source.predictor.conditions.label
    if ours is None or theirs is None:
        return {}
    names = by_name(classes)
    if names and source.names:
        labels = {label: source.names[name] for name, label in names.items() if name in source.names}
        labels = {a: b for a, b in labels.items() if a < ours.num_classes and b < theirs.num_classes}
    else:
        labels = {label: label for label in range(ours.num_classes) if ours.num_classes == theirs.num_classes}
    return labels | ({ours.num_classes: theirs.num_classes} if ours.has_null and theirs.has_null else {})


def _decides(source: GivenWeights, differ: Mapping[str, str]) -> bool:
    """Return whether settings that differ make another network of the same tensors; those guessed by shapes do not."""
    return bool(differ) if "model" in source.facts else "num_heads" in differ


def _differences(source: GivenWeights, here: PredictorConfig) -> dict[str, str]:
    """Return what is said of each setting that differs and cannot be adapted."""
    there, passed_over = vars(source.predictor), (*_HEADS, *here.adaptable)
    differ = {
        name: f"{name} is {there.get(name)} there and {value} here"
        for name, value in vars(here).items()
        if there.get(name) != value and name not in passed_over
    }
    if source.num_heads not in (None, here.num_heads):
        differ["num_heads"] = f"num_heads is {source.num_heads} there and {here.num_heads} here"
    return differ
