"""Load a trained model from a checkpoint of any format, ready to generate samples; Wan 2.2's two experts too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.checkpoint.adapting import begin, digest_of_base, read_source, settings_that_differ
from mindspeed_mm_dit.checkpoint.compatibility import LEARNED, check_names, learned_apart
from mindspeed_mm_dit.checkpoint.formats import FORMATS, diffusers, mindspore, of_source, pt, pytorch, safetensors
from mindspeed_mm_dit.checkpoint.lora.source import ScaledLora, adapter_facts, merged, read, read_all
from mindspeed_mm_dit.checkpoint.published import without_projectors
from mindspeed_mm_dit.checkpoint.relative_paths import COMMAND
from mindspeed_mm_dit.checkpoint.shapes import check_family, described_by
from mindspeed_mm_dit.checkpoint.store import BASE, BASE_FROM, of_newest, read_facts
from mindspeed_mm_dit.checkpoint.wan_folder import model_of, second_of
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.files import content_of
from mindspeed_mm_dit.configs.flow_matching import WanFlowConfig
from mindspeed_mm_dit.configs.limits import check_path, number, short_repr
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config, model_config_from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning.memory import MemoryLimit, check_model_fits
from mindspeed_mm_dit.terminal import logger


class Described(NamedTuple):
    """Facts about a checkpoint, known before its weights are read."""

    path: Path
    """The checkpoint itself: the newest one of its folder."""
    config: ModelConfig
    """model.json."""
    classes: tuple[str, ...]
    """Name of each label; empty if unknown."""
    captions: tuple[str, ...] = ()
    """A few of its training captions; empty if unknown."""
    words: tuple[str, ...] = ()
    """All words of its training captions, if its text encoder knows no others; empty if unknown."""


def describe(checkpoint: str | Path, model_json: str | Path | None) -> Described:
    """Return the facts about ``checkpoint``; ``model_json`` may be None if the checkpoint contains it.

    Raises:
        CheckpointError: there are no weights to read.
        ConfigError: model.json is missing or wrong, or the model does not fit this machine.
    """
    check_path("--checkpoint", str(checkpoint))
    return of_newest(checkpoint, "--checkpoint", lambda path: _described(path, model_json))


def _described(path: Path, model_json: str | Path | None) -> Described:
    facts = _facts(path)
    if model_json is not None:
        config = load_model_config(model_json)
        _check_learned(f"--model = {model_json}", config, path, facts)
    elif "model" in facts:
        config = model_config_from_mapping(facts["model"], f"{path}: its model.json")
    else:
        raise ConfigError("--model", f"is needed: {path} contains no model.json")
    config = config.without_teachers()
    check_model_fits(config, MemoryLimit("this machine", host_memory_bytes()))
    known = [tuple(map(str, facts.get(name) or ())) for name in ("classes", "captions", "words")]
    return Described(path, config, *known)


def _check_learned(what: str, config: ModelConfig, path: Path, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError if a model.json, ``what``, contradicts the settings that the weights were trained with."""
    try:
        recorded = model_config_from_mapping(facts["model"], str(path))
    except (KeyError, UserError):  # unknown or unreadable: the case that --model is for
        return
    if apart := learned_apart(config, recorded):
        name, value, recorded_value = apart
        cure = "leave out --model: the checkpoint contains its model.json"
        raise ConfigError(f"{what}: {name} = {value!r}", f"{path} was trained with {recorded_value!r}", cure)


def load_adapters(specs: Sequence[str], config: ModelConfig) -> list[ScaledLora]:
    """Read the adapters that --lora names, FILE or FILE:STRENGTH each, and check that they fit ``config``.

    Logs what was assumed about them.
    """
    adapters = _read_adapters(specs, config)
    for note in (note for adapter, _ in adapters for note in adapter.notes if runtime.rank() == 0):
        logger.warning(f"note: {note}")
    return adapters


def _read_adapters(specs: Sequence[str], config: ModelConfig) -> list[ScaledLora]:
    return read_all(specs, parameters_of(config).shapes(), "--lora", config) if specs else []


def load_model(
    checkpoint: str | Path,
    model_json: str | Path | None,
    use_ema: bool = True,
    adapters: Sequence[ScaledLora] = (),
    *,
    bf16: bool = False,
    torch_compile: bool = False,
    encodes: bool = True,
    guidance: float | None = None,
) -> tuple[Any, ModelConfig]:
    """Return (composite on the device, its config).

    ``model_json`` may be None for a checkpoint of ours, which has its model.json. ``adapters`` are added to the
    weights. ``bf16``: only to generate samples in bfloat16. ``torch_compile``: compile the blocks when they are first
    called. ``encodes``: with autoencoder and text encoders. ``guidance``: strength for a network that takes it as an
    input, instead of the one in its config.
    """

    def read(path: Path) -> tuple[Any, ModelConfig, dict[str, np.ndarray]]:
        _, config, classes, *_ = _described(path, model_json)
        config = replace(config, predictor=config.predictor.with_guidance(guidance))
        model = DiTModel(config, None if encodes else NoAutoencoder(config.ae))
        return model, config, _weights(path, config, classes, use_ema)

    check_path("--checkpoint", str(checkpoint))
    model, config, weights = of_newest(checkpoint, "--checkpoint", read)
    if adapters:
        weights = merged(weights, adapters)
    check_names(
        runtime.shapes(model.predictor), {n: a.shape for n, a in weights.items()}, f"--checkpoint = {checkpoint}"
    )
    runtime.load_arrays(model.predictor, weights)
    runtime.compiled(model.predictor)
    if bf16:
        runtime.bf16_products(model.predictor)
    if torch_compile:
        runtime.compile_blocks(model.blocks)
    return runtime.freeze(model), config


def weaker_network(
    checkpoint: str, config: ModelConfig, use_ema: bool, bf16: bool, torch_compile: bool
) -> Callable[[], Any]:
    """Return a function that loads the network of --guidance-checkpoint, once, after checking that it fits ``config``.

    Raises a UserError if it cannot guide that model: both must take the same inputs and have learned the same task.
    """
    flag = f"--guidance-checkpoint = {short_repr(checkpoint)}"
    if "model" not in of_newest(checkpoint, "--guidance-checkpoint", _facts):
        raise ConfigError(flag, "contains no model.json", "name a checkpoint of a run of mm-dit")
    check_weaker(flag, describe(checkpoint, None).config, config)

    def load() -> Any:
        model, _ = load_model(checkpoint, None, use_ema, bf16=bf16, torch_compile=torch_compile, encodes=False)
        return model.predictor

    return cache(load)


def check_weaker(name: str, there: ModelConfig, config: ModelConfig) -> None:
    """Raise ConfigError, naming the setting ``name``, if a model of ``there`` cannot guide one of ``config``.

    config: resized to the requested size.
    """
    learned = (*LEARNED["diffusion"], "data_time")
    parts: dict[str, Callable[[ModelConfig], Any]] = {
        "other latents": lambda c: (c.ae.model_id, len(c.latent_shape), c.latent_shape[0]),
        "other conditions": lambda c: [{**vars(k), "kind": type(k), "dropout": 0} for k in c.predictor.conditions],
        "another objective": lambda c: [vars(c.diffusion).get(name) for name in learned],
        "other text encoders": lambda c: [{**vars(text), "from_pretrained": ""} for text in c.text_encoders],
    }
    for words, part in parts.items():
        if part(there) != part(config):
            raise ConfigError(
                name,
                f"is of a model with {words}: {part(there)} there, {part(config)} here",
                "name an earlier or smaller checkpoint that was trained with the same data, conditions and objective",
            )
    try:
        there.predictor.resized(config.latent_shape)
    except ConfigError as error:
        raise ConfigError(name, f"cannot generate this size: {error.reason}", error.cure) from None


def experts(
    high: str | Path,
    low: str | Path,
    model_json: str | Path | None,
    use_ema: bool = True,
    adapters: tuple[Sequence[str], Sequence[str]] = ((), ()),
    boundary: float | None = None,
) -> Experts:
    """Return the high- and low-noise experts in two checkpoints, after checking that they belong together.

    adapters: what --lora and --low-noise-lora name. Raises a UserError before weights are read.
    """

    def reader(checkpoint: str | Path, flag: str, config: ModelConfig, names: Sequence[str]) -> Callable[[], Any]:
        load = load_adapters if flag == FLAG else _read_adapters  # (notes on the others are logged with the model)
        loras = load(names, config)

        def read() -> dict[str, np.ndarray]:
            weights = of_newest(checkpoint, flag, lambda path: _weights(path, config, (), use_ema))
            return merged(weights, loras) if loras else weights

        return read

    ours, theirs, level = describe_both(high, low, model_json, boundary)
    sides = ((high, "--checkpoint", ours, adapters[0]), (low, FLAG, theirs, adapters[1]))
    first, second = (reader(*side) for side in sides)
    return Experts(level, str(low), (first, second))


def describe_both(
    high: str | Path, low: str | Path, model_json: str | Path | None, boundary: float | None
) -> tuple[ModelConfig, ModelConfig, float]:
    """Return the configs of two experts and the noise level at which they switch; raises unless they fit."""
    check_path(FLAG, str(low))
    ours = describe(high, model_json).config
    theirs = of_newest(low, FLAG, lambda path: _described(path, None if "model" in _facts(path) else model_json)).config
    return ours, theirs, boundary_between(ours, theirs, boundary, f"{FLAG} = {low}")


def other_expert(checkpoint: str | Path, low: str | Path | None) -> str | Path | None:
    """Return the low-noise expert: ``low``, the second one in a diffusers folder, or None."""
    return second_of(Path(checkpoint)) if low is None else low


def _read_published(path: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the weights in a file or a diffusers folder, whose config.json must describe the same network."""
    state = FORMATS[of_source(path)].read(path)
    described = described_by(state.config, f"--checkpoint = {path}: config.json")
    if described is not None and (differences := settings_that_differ(described, config.predictor)):
        cure = "give the model.json of this network: --model"
        raise CheckpointError(
            f"--checkpoint = {path}", f"does not fit model.json: {'; '.join(differences.values())}", cure
        )
    check_family(state.weights, f"--checkpoint = {path}", config.predictor.model_id)
    for note in state.notes if runtime.rank() == 0 else ():
        logger.warning(f"note: {note}")
    return without_projectors(state.weights)


def _is_diffusers_folder(path: Path) -> bool:
    return path.is_dir() and not pytorch.fits(path) and not mindspore.fits(path) and diffusers.fits(path)


def _weights(path: Path, config: ModelConfig, classes: Sequence[str], use_ema: bool) -> dict[str, np.ndarray]:
    """Return the weights of a checkpoint; if it holds adapters, their base with the adapters merged in.

    Raises CheckpointError if the base is no longer where the run read it.
    """
    adapter = adapter_facts(path)
    if not adapter and (path.suffix == ".safetensors" or _is_diffusers_folder(path)):
        return _read_published(path, config)
    if not adapter:
        return read_weights(path, use_ema)
    facts, what = read_facts(path), f"--checkpoint = {path}"
    command = facts.get(COMMAND, {})
    base_path = path.parent / str(command.get("folder", ".")) / str(adapter.get(BASE_FROM))
    cure = f"name its base: --checkpoint BASE --lora {path}"
    if not base_path.exists():
        raise CheckpointError(what, f"contains adapters, and their base is not at {base_path}", cure)
    tensors = begin(read_source(base_path, config.predictor), config.predictor, classes, int(facts.get("seed", 0)))
    base = {name: value for name, value, _ in tensors}
    if digest_of_base(base) != adapter[BASE]:
        reason = f"contains adapters, and {base_path} is not the base model they were trained on"
        raise CheckpointError(what, reason, cure)
    weights: dict[str, np.ndarray] = read(path, use_ema=use_ema).merged(base)
    return weights


def _facts(path: Path) -> dict[str, Any]:
    """Return the facts of the run in a checkpoint, from run.json or from the file itself."""
    if path.is_dir():
        _check_folder(path)
        described = model_of(path)
        folder = diffusers.model_folder(path) if diffusers.fits(path) else path
        return {"model": described} if described else read_facts(folder)
    return _facts_in(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _facts_in(file: Path, changed: int) -> dict[str, Any]:
    """Read the facts in a file of weights; cached, since the whole file has to be read."""
    for known in (pt, safetensors):
        if known.fits(file):
            return known.read(file).facts
    return {}


def _check_folder(path: Path) -> None:
    """Raise CheckpointError unless a training run wrote the folder ``path``."""
    if pytorch.fits(path) or mindspore.fits(path) or diffusers.fits(path):
        return
    raise CheckpointError(
        f"--checkpoint = {path}",
        f"is not a checkpoint: contains {content_of(path)}; expected folders such as iter_0001000, or the files of one "
        "(.metadata of PyTorch, state.ckpt of MindSpore)",
        "name the --save folder of the run, or a .pt, .safetensors or .ckpt file",
    )


Arrays = dict[str, np.ndarray]
FLAG = "--low-noise-checkpoint"
ONE_NETWORK = ("needs two experts", f"name the other with {FLAG}")
"""Reason and cure of an error about a setting of experts where there is one network."""


@dataclass
class Experts:
    """Two experts; the model being sampled is the high-noise expert."""

    boundary: float
    """Noise level from which on the high-noise expert is used."""
    low: str
    """The checkpoint of the low-noise expert, as named by the user."""
    read: tuple[Callable[[], Arrays], Callable[[], Arrays]]
    """Read the weights of the high-noise expert, and of the low-noise expert."""
    loaded: int = field(default=0, init=False)
    """Whose weights the network has: 0 high noise, 1 low noise."""

    def __post_init__(self) -> None:
        self.boundary = number("--boundary", self.boundary, 0.0, 1.0)

    def networks(self, network: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return both experts as functions; each loads its weights into ``network`` if needed."""

        def expert(which: int) -> Callable[..., Any]:
            def forward(*inputs: Any) -> Any:
                if self.loaded != which:
                    runtime.load_arrays(network, self.read[which]())
                    self.loaded = which
                return network(*inputs)

            return forward

        return expert(0), expert(1)


def boundary_between(high: ModelConfig, low: ModelConfig, requested: float | None, where: str) -> float:
    """Return the noise level at which two experts switch: ``requested``, or where their training windows meet.

    Raises ConfigError, naming ``where``, for experts of different networks, in the wrong order, or that leave a gap.
    """
    _check_alike(high, low, where)
    (bottom, top), (low_bottom, low_top) = high.diffusion.window, low.diffusion.window
    whole = {(bottom, top), (low_bottom, low_top)} & {(0, 1)}
    if not whole and low_bottom >= top:
        raise ConfigError(
            where,
            f"was trained on noise levels from {low_bottom:g} to {low_top:g}, above those of --checkpoint: it is the "
            "high-noise expert",
            "swap the two",
        )
    if not whole and (bottom, top) == (low_bottom, low_top):
        reason = f"is an expert of the same noise levels as --checkpoint, {bottom:g} to {top:g}"
        raise ConfigError(where, reason, "name the checkpoint of the other expert")
    if requested is None:
        if whole or bottom != low_top:
            raise ConfigError(
                "--boundary",
                f"is needed: the experts were trained on {bottom:g} to {top:g} and on {low_bottom:g} to {low_top:g}",
                "Wan 2.2 has 0.875 for texts, 0.9 for images",
            )
        return bottom
    return requested


def _check_alike(high: ModelConfig, low: ModelConfig, where: str) -> None:
    """Raise ConfigError unless two experts differ in their weights, sizes of samples and times of training alone."""
    for config, what in ((high, "--checkpoint"), (low, where)):
        if not isinstance(config.diffusion, WanFlowConfig):
            raise ConfigError(what, "was not trained with wan_flow_match_scheduler, the only objective with experts")
    for section in ("predictor", "diffusion"):
        high_settings, low_settings = vars(getattr(high, section)), vars(getattr(low, section))
        for name, value in high_settings.items():
            if low_settings.get(name) != value and name not in ("latent_size", "timestep_window", "timestep_per"):
                raise ConfigError(
                    where,
                    f"is of another model than --checkpoint: {section}.{name} is {low_settings.get(name)!r}, and there "
                    f"{value!r}",
                    "name two experts of one config folder",
                )
