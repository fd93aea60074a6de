"""Describe a checkpoint of any format, before its weights are read, and load the described model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, base_digest, differing_settings, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS, StorageSupport, format_of, read_weights
from mindspeed_mm_dit.checkpoint.lora import (
    Adapter,
    ScaledLora,
    adapter_facts,
    joined_adapters,
    merge_adapters,
    read_adapter,
    read_adapters,
)
from mindspeed_mm_dit.checkpoint.state import (
    LEARNED_SETTINGS,
    check_names,
    first_differing_setting,
    shapes_of,
    without_projectors,
)
from mindspeed_mm_dit.checkpoint.store import BASE, BASE_FROM, COMMAND, read_facts, read_newest
from mindspeed_mm_dit.configs.diffusion import WanFlowConfig
from mindspeed_mm_dit.configs.files import list_first_names
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config, model_config_from_mapping
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.planning import MemoryLimit, check_model_fits
from mindspeed_mm_dit.sampling.request import ModelRequest
from mindspeed_mm_dit.terminal import logger

Arrays = dict[str, np.ndarray]
CHECKPOINT, LOW = "--checkpoint", "--low-noise-checkpoint"
WEAKER = "--guidance-checkpoint"
NEEDS_TWO = f"needs two experts. Name the other with {LOW}."
"""End of an error about a setting of experts, after its value, where there is one network."""


@dataclass(frozen=True)
class CheckpointDescription:
    """What a checkpoint is, known before its weights are read."""

    config: ModelConfig
    """model.json."""
    classes: tuple[str, ...] = ()
    """Name of each label; empty if unknown."""
    captions: tuple[str, ...] = ()
    """A few of its training captions; empty if unknown."""
    words: tuple[str, ...] = ()
    """All words of its training captions, if its text encoder knows no others; empty if unknown."""
    path: Path = Path()
    """The checkpoint itself: the newest one of its folder."""
    weights: Literal["ema", "model"] = "ema"
    adapters: Sequence[ScaledLora] = ()
    """Adapters to add to its weights."""
    base_dtype: str = ""
    """Format of few bits for its linear layers; empty: float32."""
    low: CheckpointDescription | None = None
    """The low-noise expert of Wan 2.2; this one is then the high-noise expert."""
    boundary: float = 0.0
    """Noise level from which on the high-noise expert is used."""


def describe(request: ModelRequest, flag: str = CHECKPOINT) -> CheckpointDescription:
    """Return what the checkpoint of ``request``, which ``flag`` named, is.

    Raises:
        CheckpointError: there are no weights to read.
        ConfigError: model.json is missing or wrong, the model does not fit this machine, adapters are of another
            network, or two experts do not belong together.
    """
    described = read_newest(
        request.checkpoint, flag, lambda path: _described(path, request.model, flag, request.base_dtype or "")
    )
    predictor = described.config.predictor.with_guidance(request.network_guidance)
    config = replace(described.config, predictor=predictor)
    adapters = _read_adapters(request.lora, config, "--low-noise-lora" if flag == LOW else "--lora")
    dtype = request.base_dtype or ""
    described = replace(described, config=config, weights=request.weights, adapters=adapters, base_dtype=dtype)
    second = request.low_noise_checkpoint or (_second_of(Path(request.checkpoint)) if flag == CHECKPOINT else None)
    if second is None:
        for name, value in (("--boundary", request.boundary), ("--low-noise-lora", request.low_noise_lora or None)):
            if value is not None:
                raise ConfigError(f"{name} = {shorten_repr(value)} {NEEDS_TWO}")
        return described
    model, weights, loras = request.model, request.weights, request.low_noise_lora
    low = describe(ModelRequest(second, model=model, weights=weights, lora=loras, base_dtype=request.base_dtype), LOW)
    boundary = _boundary_between(config, low.config, request.boundary, f"{LOW} = {second}")
    return replace(described, low=low, boundary=boundary)


def _second_of(checkpoint: Path) -> Path | None:
    """Return the low-noise expert in a folder of both, or None."""
    kind = format_of(checkpoint)
    return FORMATS[kind].second_network(checkpoint) if kind else None


NO_WEIGHTS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".mp4", ".txt", ".json", ".yaml", ".args")
"""Endings of files that are named in place of weights by mistake."""


def _described(path: Path, model_json: str | Path | None, flag: str, base_dtype: str) -> CheckpointDescription:
    facts = _facts(path)
    if model_json is not None and not (flag == LOW and "model" in facts):
        config = load_model_config(model_json)
        _check_learned(f"--model = {model_json}", config, path, facts)
    elif "model" in facts:
        config = model_config_from_mapping(facts["model"], f"{path}: its model.json")
    elif flag == WEAKER:
        raise ConfigError(f"{flag} = {path} contains no model.json. Name a checkpoint of a run of mm-dit.")
    else:
        if path.is_file() and path.suffix.lower() in NO_WEIGHTS:
            raise CheckpointError(
                f"{flag} = {path} is no file of weights. Name the --save folder of a run, or a .pt, .safetensors, "
                ".ckpt or .gguf file."
            )
        raise ConfigError(
            f"--model is needed, because {path} contains no model.json. Name the model.json of its network."
        )
    config = config.without_teachers()
    check_model_fits(config, MemoryLimit("this machine", host_memory_bytes()), base_dtype)
    classes, captions, words = (tuple(map(str, facts.get(name) or ())) for name in ("classes", "captions", "words"))
    return CheckpointDescription(config, classes, captions, words, path)


def _check_learned(what: str, config: ModelConfig, path: Path, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError if a model.json, ``what``, contradicts the settings that the weights were trained with."""
    try:
        recorded = model_config_from_mapping(facts["model"], str(path))
    except (KeyError, UserError):  # unknown or unreadable: the case that --model is for
        return
    if apart := first_differing_setting(config, recorded):
        name, value, recorded_value = apart
        raise ConfigError(
            f"{what} has {name} = {value!r}, and {path} was trained with {recorded_value!r}. Leave out --model: the "
            "checkpoint contains its model.json."
        )


def _read_adapters(files: Sequence[str], config: ModelConfig, flag: str) -> list[ScaledLora]:
    """Read adapters, FILE or FILE:STRENGTH each, which must fit ``config``, and log what was assumed about them."""
    adapters = read_adapters(files, parameters_of(config).shapes(), flag, config) if files else []
    for note in (note for adapter, _ in adapters for note in adapter.notes if runtime.rank() == 0):
        logger.warning(f"note: {note}")
    return adapters


def load_model(
    description: CheckpointDescription, *, bf16: bool = False, torch_compile: bool = False, encodes: bool = True
) -> Any:
    """Return the composite on the device.

    bf16: only to generate samples in bfloat16. torch_compile: compile the blocks when they are first called. encodes:
    with autoencoder and text encoders.
    """
    autoencoder = None if encodes else NoAutoencoder(description.config.ae)
    if not description.base_dtype:
        model, weights = DiTModel(description.config, autoencoder), weights_of(description)
    else:
        weights, adapters = base_and_adapters(description)
        if adapters and description.low is not None:
            raise ConfigError(
                f"--base-dtype = {description.base_dtype} stores two experts in few bits only without adapters. Leave "
                "it out, or merge the adapters: mm-dit convert --merge-lora."
            )
        joined = joined_adapters(adapters)
        joined.check_fits(shapes_of(weights))
        model = DiTModel(description.config, autoencoder, base_dtype=description.base_dtype, adapters=joined.specs())
        weights = weights | joined.arrays()
    check_names(runtime.shapes(model.predictor), shapes_of(weights), f"--checkpoint = {description.path}")
    runtime.load_arrays(model.predictor, weights)
    runtime.jit_forward(model.predictor)
    if bf16:
        runtime.cast_matmul_weights_to_bf16(model.predictor)
    if torch_compile:
        runtime.compile_blocks(model.blocks)
    return runtime.prepare_frozen(model)


# --- several networks -------------------------------------------------------------------------------------------------


class Experts:
    """The two experts of Wan 2.2 (A14B): one network for high noise, one for low noise.

    Both have the same architecture, so only one is in memory. Its weights are swapped when the other expert is called,
    once per batch of samples.
    """

    def __init__(self, description: CheckpointDescription) -> None:
        assert description.low is not None
        self.boundary, self._sides, self._loaded = description.boundary, (description, description.low), 0

    def networks(self, network: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return both experts as functions; each loads its weights into ``network`` if needed."""

        def expert(which: int) -> Callable[..., Any]:
            def forward(*inputs: Any) -> Any:
                if self._loaded != which:
                    runtime.load_arrays(network, weights_of(self._sides[which]))
                    self._loaded = which
                return network(*inputs)

            return forward

        return expert(0), expert(1)


def _boundary_between(high: ModelConfig, low: ModelConfig, requested: float | None, where: str) -> float:
    """Return the noise level at which two experts switch: ``requested``, or where their training windows meet.

    Raises ConfigError, naming ``where``, for experts of different networks, in the wrong order, or that leave a gap.
    """
    _check_alike(high, low, where)
    (bottom, top), (low_bottom, low_top) = high.diffusion.window, low.diffusion.window
    whole = {(bottom, top), (low_bottom, low_top)} & {(0, 1)}
    if not whole and low_bottom >= top:
        raise ConfigError(
            f"{where} was trained on noise levels from {low_bottom:g} to {low_top:g}, above those of --checkpoint, "
            "so it is the high-noise expert. Swap the two."
        )
    if not whole and (bottom, top) == (low_bottom, low_top):
        raise ConfigError(
            f"{where} is an expert of the same noise levels as --checkpoint, {bottom:g} to {top:g}. Name the "
            "checkpoint of the other expert."
        )
    if requested is None:
        if whole or bottom != low_top:
            raise ConfigError(
                f"--boundary is needed, because the experts were trained on {bottom:g} to {top:g} and on "
                f"{low_bottom:g} to {low_top:g}. Wan 2.2 uses 0.875 for texts, and 0.9 for images."
            )
        return bottom
    return requested


def _check_alike(high: ModelConfig, low: ModelConfig, where: str) -> None:
    """Raise ConfigError unless two experts differ in their weights, sizes of samples and times of training alone."""
    for config, what in ((high, "--checkpoint"), (low, where)):
        if not isinstance(config.diffusion, WanFlowConfig):
            raise ConfigError(f"{what} was not trained with wan_flow_match_scheduler, the only objective with experts.")
    for section in ("predictor", "diffusion"):
        high_settings, low_settings = vars(getattr(high, section)), vars(getattr(low, section))
        for name, value in high_settings.items():
            if low_settings.get(name) != value and name not in ("latent_size", "timestep_window", "timestep_per"):
                raise ConfigError(
                    f"{where} has {section}.{name} = {low_settings.get(name)!r}, and --checkpoint has {value!r}. Name "
                    "two experts of one config folder."
                )


class LazyModel:
    """A described model whose network is loaded when it is first used, without its encoders."""

    def __init__(self, description: CheckpointDescription, **options: bool) -> None:
        self.description, self._options = description, options

    @cached_property
    def predictor(self) -> Any:
        """The network."""
        return load_model(self.description, encodes=False, **self._options).predictor


def check_weaker(weaker: Any, config: ModelConfig) -> None:
    """Raise ConfigError unless the model ``weaker`` can guide one of ``config``, resized to the requested size."""
    described = getattr(weaker, "description", None)
    if not isinstance(described, CheckpointDescription):
        raise ConfigError(f"{WEAKER} = {shorten_repr(weaker)} is not a model. Pass what mindspeed_mm_dit.load returns.")
    what = f"{WEAKER} = {described.path}"
    if described.low is not None:
        raise ConfigError(f"{what} has two experts, and guidance takes one network. Name a checkpoint of one.")
    learned = (*LEARNED_SETTINGS["diffusion"], "data_time")
    parts: dict[str, Callable[[ModelConfig], Any]] = {
        "other latents": lambda c: (c.ae.model_id, len(c.latent_shape), c.latent_shape[0]),
        "other conditions": lambda c: [{**vars(k), "kind": type(k), "dropout": 0} for k in c.predictor.conditions],
        "another objective": lambda c: [vars(c.diffusion).get(name) for name in learned],
        "other text encoders": lambda c: [{**vars(text), "from_pretrained": ""} for text in c.text_encoders],
    }
    for words, part in parts.items():
        if part(described.config) != part(config):
            raise ConfigError(
                f"{what} is of a model with {words}: {part(described.config)} there, {part(config)} here. Name an "
                "earlier or smaller checkpoint that was trained with the same data, conditions and objective."
            )
    try:
        described.config.predictor.resized(config.latent_shape)
    except ConfigError as error:
        raise ConfigError(f"{what} cannot generate this size: {error}") from None


# --- weights ---------------------------------------------------------------------------------------------------------


def weights_of(description: CheckpointDescription) -> Arrays:
    """Return the weights of a checkpoint with its adapters merged in, and if it holds adapters, their base with them.

    Raises CheckpointError if the base is no longer where the run read it.
    """
    weights, adapters = base_and_adapters(description)
    return merge_adapters(weights, adapters) if adapters else weights


def _read_published(path: Path, kind: str, config: ModelConfig) -> Arrays:
    """Return the weights in a file or a diffusers folder, whose config.json must describe the same network."""
    state = FORMATS[kind].read(path)
    if state.predictor is not None and (differences := differing_settings(state.predictor, config.predictor)):
        raise CheckpointError(
            f"--checkpoint = {path} does not fit model.json: {'; '.join(differences.values())}. Name the model.json of "
            "this network by --model."
        )
    state.check_family(f"--checkpoint = {path}", config.predictor.model_id)
    for note in state.notes if runtime.rank() == 0 else ():
        logger.warning(f"note: {note}")
    return without_projectors(state.weights)


def base_and_adapters(description: CheckpointDescription) -> tuple[Arrays, list[ScaledLora]]:
    """Return the weights of a network, and the adapters of its checkpoint and its request, which are to be added.

    Raises CheckpointError if the base is no longer where the run read it.
    """
    weights, trained = _base_of(description)
    return weights, [*([ScaledLora(trained, 1.0)] if trained else []), *description.adapters]


def _base_of(description: CheckpointDescription) -> tuple[Arrays, Adapter | None]:
    """Return the weights in a checkpoint; of one with adapters, those of their base, and the adapters."""
    path, predictor, use_ema = description.path, description.config.predictor, description.weights == "ema"
    adapter, kind = adapter_facts(path), format_of(path)
    if not adapter and kind and FORMATS[kind].storage is StorageSupport.ONE_TREE:
        return _read_published(path, kind, description.config), None
    if not adapter:
        return read_weights(path, use_ema), None
    facts, what = read_facts(path), f"--checkpoint = {path}"
    command = facts.get(COMMAND, {})
    base_path = path.parent / str(command.get("folder", ".")) / str(adapter.get(BASE_FROM))
    hint = f"Name their base with --checkpoint BASE --lora {path}."
    if not base_path.exists():
        raise CheckpointError(f"{what} contains adapters, and their base is not at {base_path}. {hint}")
    tensors = adapt_weights(
        read_source(base_path, predictor), predictor, description.classes, int(facts.get("seed", 0))
    )
    base = {name: value for name, value, _ in tensors}
    if base_digest(base) != adapter[BASE]:
        raise CheckpointError(
            f"{what} contains adapters, and {base_path} is not the base model they were trained on. {hint}"
        )
    return base, read_adapter(path, use_ema=use_ema)


def _facts(path: Path) -> dict[str, Any]:
    """Return the facts of the run in a checkpoint, from run.json or from the file itself."""
    if not path.is_dir():
        return _facts_in(path, path.stat().st_mtime_ns)
    if (kind := format_of(path)) is not None:
        return FORMATS[kind].facts(path)
    raise CheckpointError(
        f"--checkpoint = {path} contains {list_first_names(path)}, but neither folders such as iter_0001000 nor the "
        "files of one (.metadata of PyTorch, state.ckpt of MindSpore). Name the --save folder of the run, or a .pt, "
        ".safetensors or .ckpt file."
    )


@lru_cache(maxsize=1)
def _facts_in(file: Path, changed: int) -> dict[str, Any]:
    """Read the facts in a file of weights; cached, since the whole file has to be read."""
    kind = format_of(file)
    return FORMATS[kind].facts(file) if kind else {}
