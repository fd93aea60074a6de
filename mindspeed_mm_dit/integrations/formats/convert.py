"""``mm-dit convert``: a checkpoint, an autoencoder or adapters in another format; every tensor is accounted for."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.formats import FORMATS, StorageSupport, choose_format, format_of_source
from mindspeed_mm_dit.checkpoint.lora import (
    ADAPTER_FORMATS,
    adapter_facts,
    adapter_format_of,
    is_adapter,
    layer_names,
    merge_adapters,
    read_adapter,
    read_adapters,
)
from mindspeed_mm_dit.checkpoint.state import Shapes, State, check_names, infer_predictor, shapes_of, without_projectors
from mindspeed_mm_dit.checkpoint.store import SETTINGS, read_facts, read_newest
from mindspeed_mm_dit.checkpoint.targets import (
    check_state,
    check_target,
    check_trees,
    storable_part,
    write,
    write_atomically,
)
from mindspeed_mm_dit.configs.autoencoder import SCALE
from mindspeed_mm_dit.configs.limits import BASE_DTYPES, shorten_repr
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.run import check_output_folder
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError, UserError, nearest
from mindspeed_mm_dit.integrations.formats.config_json import (
    FIRST,
    FROM_IMAGE,
    FROM_TEXT,
    INDEX,
    SECOND,
    infer_vae_config,
    vae_shapes,
    with_vae_config,
)
from mindspeed_mm_dit.integrations.formats.diffusers_folder import LAYER
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.weight_adapters import weight_converter_of
from mindspeed_mm_dit.optimizers.registry import optimizer_from_facts
from mindspeed_mm_dit.terminal import echo

_WIDE = "float32"
_BELOW_BF16 = [name for name in BASE_DTYPES if name != "bf16"]
"""Formats beside which other tensors are written as SOURCE has them."""
_WITH_DTYPE = ("safetensors", "original")
"""Formats that --dtype goes with."""
DESCRIPTION = """\
Write a checkpoint in another format, bit for bit: to move a run between PyTorch and MindSpore, to convert published
weights, or to use yours in other programs.

  mm-dit convert outputs/run/checkpoints NEW_FOLDER --to mindspore   continue a PyTorch run under MindSpore
  mm-dit convert outputs/run/checkpoints/iter_0001000 NEW_FOLDER --to pytorch     and back
  mm-dit convert DiT-XL-2-256x256.pt DiT-XL-2 --to diffusers
  mm-dit convert DiT-XL-2-256x256.pt DiT-XL-2-256 --to pipeline --model examples/dit/imagenet256/model.json
  mm-dit convert outputs/run/checkpoints model.safetensors --weights ema
  mm-dit convert sd-vae-ft-ema sd-vae.ckpt
  mm-dit convert outputs/lora/checkpoints FOLDER --to diffusers                      adapters (LoRA) for other programs
  mm-dit convert outputs/high/checkpoints FOLDER --low-noise-checkpoint outputs/low/checkpoints     two experts
  mm-dit convert Wan2.1-T2V-1.3B-Diffusers merged.safetensors --merge-lora lora.safetensors:0.8
  mm-dit convert FLUX.1-dev flux_nf4.safetensors --dtype nf4                        a quarter of bfloat16's size

The ending of TARGET chooses a file format: pt (facebookresearch/DiT's), safetensors, ckpt (MindSpore's). --to chooses a
folder format, or other names in a .safetensors:
  pytorch, mindspore   a checkpoint that --load takes, optimizer state included
  diffusers            the network alone
  original             one file under the names of the network's authors, as ComfyUI takes it
  pipeline             for from_pretrained of diffusers' pipeline: network, autoencoder, text encoders, scheduler
--dtype writes the weights of linear layers in few bits: nf4 as bitsandbytes stores it, int8 and fp8 as ComfyUI does, or
bf16; float32 widens all. SOURCE may be in any of these, in torchao's int8 or float8, or GGUF.
Adapters go to diffusers and peft (folders), kohya and native (files; ComfyUI and musubi-tuner read both).
Only the checkpoint folders of PyTorch need PyTorch; nothing needs MindSpore."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("source", metavar="SOURCE", help="file, checkpoint folder, or folder of checkpoints (newest)")
    parser.add_argument("target", metavar="TARGET", help="file or folder to write")
    parser.add_argument("--to", metavar="FORMAT", help="one of the formats above")
    parser.add_argument(
        "--dtype",
        choices=(*BASE_DTYPES, _WIDE),
        help="write the weights of linear layers in this format, in a .safetensors (default: as in SOURCE, and what is "
        "quantised there as float32)",
    )
    parser.add_argument(
        "--weights",
        choices=("ema", "model"),
        help="write only these weights (default: all that TARGET can hold; if that is one set, the EMA)",
    )
    parser.add_argument(
        "--model",
        metavar="JSON",
        help="model.json, or diffusers' config.json of a VAE: what cannot be read from the tensors",
    )
    parser.add_argument(
        "--merge-lora",
        action="append",
        default=[],
        metavar="FILE[:S]",
        help="merge adapters (LoRA) into the weights with strength S; may be given several times",
    )
    parser.add_argument(
        "--low-noise-checkpoint",
        metavar="PATH",
        help="the second expert of Wan 2.2, if SOURCE is the one of high noise: TARGET is a diffusers folder of both",
    )
    parser.add_argument(
        "--boundary",
        type=float,
        metavar="LEVEL",
        help="noise level at which the experts switch (default: as trained)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is a checkpoint")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done."""
    started = time.perf_counter()
    log = lambda line: echo(line, file=sys.stderr)  # noqa: E731
    if args.low_noise_checkpoint is not None:
        summary = _convert_both(args, log)
    else:
        description = read_json(args.model, "--model") if args.model else None
        summary = convert(
            args.source,
            args.target,
            args.to,
            args.weights,
            description,
            args.overwrite,
            log,
            args.merge_lora,
            args.dtype,
        )
    for note in summary.notes:
        echo(f"note: {note}")
    source, target = f"{summary.source} ({summary.source_format})", f"{summary.target} ({summary.target_format})"
    echo(
        f"{source} -> {target}: {', '.join(summary.trees)}; {summary.num_tensors} tensors, "
        f"{summary.num_bytes / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s"
    )
    return 0


def _convert_both(args: argparse.Namespace, log: Callable[[str], object]) -> ConversionSummary:
    """Write both experts of Wan 2.2 as one folder, after checking that they belong together."""
    from mindspeed_mm_dit.sampling.load import describe
    from mindspeed_mm_dit.sampling.request import ModelRequest

    other = args.to not in (None, "diffusers") and args.to
    for flag, value in (("--merge-lora", args.merge_lora), ("--to", other), ("--dtype", args.dtype)):
        if value:
            raise ConfigError(
                f"{flag} = {shorten_repr(value)} does not go with --low-noise-checkpoint. Drop it, or convert the "
                "experts one by one."
            )
    described = describe(
        ModelRequest(
            args.source, model=args.model, low_noise_checkpoint=args.low_noise_checkpoint, boundary=args.boundary
        )
    )
    return convert_experts(
        args.source, args.low_noise_checkpoint, args.target, described.boundary, args.weights, args.overwrite, log
    )


# --- weights ----------------------------------------------------------------------------------------------------------

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


class ConversionSummary(NamedTuple):
    """What a conversion did."""

    source: Path
    source_format: str
    target: Path
    target_format: str
    trees: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]
    """What was left out or added, a sentence each."""


def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    weights: str | None = None,
    description: dict[str, Any] | None = None,
    overwrite: bool = False,
    echo: Callable[[str], object] = lambda line: None,
    loras: Sequence[str] = (),
    dtype: str | None = None,
) -> ConversionSummary:
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
        dtype: format of the weights of linear layers, or float32 for all.

    Raises:
        CheckpointError: tensors are unknown, missing or misshapen, or the target exists.
        ConfigError: no format fits, or the target cannot be written.
        PlatformError: a required framework is not installed.
    """
    convert_one = lambda path: _convert(path, Path(target), to, weights, description, overwrite, echo, loras, dtype)  # noqa: E731
    return convert_one(Path(source)) if Path(source).is_file() else read_newest(source, "SOURCE", convert_one)


def _convert(
    source: Path,
    target: Path,
    to: str | None,
    weights: str | None,
    description: dict[str, Any] | None,
    overwrite: bool,
    echo: Callable[[str], object],
    loras: Sequence[str],
    dtype: str | None,
) -> ConversionSummary:
    saves_training = to is not None and to in FORMATS and FORMATS[to].storage is StorageSupport.TRAINING
    if is_adapter(source) and not (adapter_facts(source) and saves_training):
        if loras:
            raise ConfigError(
                "--merge-lora needs weights to merge into, and SOURCE holds adapters. Name their base as SOURCE."
            )
        if dtype is not None:
            raise ConfigError(f"--dtype = {dtype} is for whole weights, and SOURCE holds adapters (LoRA). Drop it.")
        return convert_adapter(source, target, to, weights != "model", description, overwrite, echo)
    if to in ADAPTER_FORMATS and to not in FORMATS:
        raise ConfigError(
            f"--to = {to} is a format of adapters (LoRA), and SOURCE holds whole weights. Use one of "
            f"{', '.join(FORMATS)}."
        )
    target_format = choose_format(target, to)
    if dtype is not None and target_format not in _WITH_DTYPE:
        raise ConfigError(
            f"--dtype = {dtype} needs a TARGET that ends in .safetensors, which is not --to {target_format}."
        )
    source_format = format_of_source(source)
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
    if state.is_autoencoder:
        if dtype in BASE_DTYPES:
            raise ConfigError(f"--dtype = {dtype} is for networks, and SOURCE is an autoencoder. Drop it.")
        shapes = vae_shapes(infer_vae_config(shapes_of(state.weights)))
        check_trees(state, dict.fromkeys(state.trees, shapes), str(source), "autoencoder_kl")
    else:
        check_state(state, str(source))
    state, merging = _merge_loras(state, loras)
    state, differences = storable_part(state, FORMATS[target_format].storage, weights)
    notes += [*merging, *differences]
    if (
        target_format == "mindspore"
        and "optimizer" in state.trees
        and optimizer_from_facts(state.facts.get(SETTINGS), str(source)).is_class
    ):
        state = state.with_trees({name: tree for name, tree in state.trees.items() if name != "optimizer"})
        notes.append("the optimizer's state is left out: it is of a class of PyTorch. Start with --no-load-optim")
    if FORMATS[source_format].storage is StorageSupport.TRAINING and not checksums.has_checksums(source):
        notes.append("SOURCE has no checksums, so it could not be checked for damage")
    notes += _caveats(state, (source_format, target_format)) + _assumption_notes(state, target_format)
    if state.is_autoencoder:
        state, defaults_for_missing = _with_config(state, target_format)
        notes += defaults_for_missing
    if dtype is not None:
        is_bfloat16 = state.is_bfloat16 if dtype in _BELOW_BF16 else dtype == "bf16"
        state = replace(state, written_as=dtype if dtype in BASE_DTYPES else "", is_bfloat16=is_bfloat16)
    size = "" if dtype else f", {state.num_bytes / 1e6:.1f} MB"
    echo(f"writing {target} ({target_format}): {state.num_tensors} tensors{size}")
    write(target, target_format, state)
    counts = (tuple(state.trees), state.num_tensors, target.stat().st_size if dtype else state.num_bytes)
    return ConversionSummary(source, source_format, target, target_format, *counts, tuple(notes))


def _caveats(state: State, formats: tuple[str, str]) -> list[str]:
    """Return notes on weights that come from, or go to, diffusers."""
    notes = []
    if LAYER in state.weights and "diffusers" in formats:
        notes.append(DIFFUSERS_CAVEAT)
    if "pipeline" in formats and LAYER in state.weights:
        notes.append(PIPELINE_CAVEAT)
    return notes


def _assumption_notes(state: State, target_format: str) -> list[str]:
    """Return a note on the settings of config.json that no tensor shows."""
    if target_format != "diffusers" or state.is_autoencoder or state.config or "model" in state.facts:
        return []
    network = infer_predictor(shapes_of(state.weights), {})
    missing = weight_converter_of(network).defaults_for_missing(network)
    settings = ", ".join(f"{key} = {json.dumps(getattr(network, key))}" for key in missing)
    return (
        [f"config.json: assumed, as in the published networks: {settings} (--model MODEL_JSON sets them)"]
        if settings
        else []
    )


def _with_config(state: State, target_format: str) -> tuple[State, list[str]]:
    """Return the autoencoder with the config.json its target can store, and notes on what is assumed or left out."""
    if target_format == "diffusers":
        return with_vae_config(state)
    if state.config and target_format != "safetensors":
        where = "put a copy next to it, where readers look for it"
        return state, [f"a {target_format} file cannot store config.json: {where}"]
    return state, []


def _merge_loras(state: State, loras: Sequence[str]) -> tuple[State, list[str]]:
    """Return ``state`` with adapters merged into its weights and EMAs, and notes on what that costs."""
    if not loras:
        return state, []
    model = None
    with suppress(KeyError, UserError):  # (of another program, or of parts that are not here)
        model = model_config_from_mapping(state.facts["model"], "SOURCE: its model.json")
    adapters = read_adapters(loras, shapes_of(state.weights), "--merge-lora", model)
    trees = {name: merge_adapters(arrays, adapters) for name, arrays in state.trees.items() if name != "optimizer"}
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
            raise ConfigError(
                "--model is neither a model.json nor diffusers' config.json of an autoencoder. Give one of them."
            )
        return replace(state, config=description)
    model = model_config_from_mapping(description, "--model")
    model = model if any(name.startswith("projectors.") for name in state.weights) else model.without_teachers()
    state.check_family("SOURCE", model.predictor.model_id)
    described = parameters_of(model.predictor).shapes()
    check_names(
        described,
        shapes_of(state.weights),
        "--model",
        "describes another network than SOURCE holds",
        "Give the model.json that the weights were trained with.",
    )
    return replace(state, facts=state.facts | {"model": description})


# --- the two experts of Wan 2.2 as one folder of diffusers, which a pipeline loads -------------------------------

_PIPELINE_NOTE = (
    "for a whole pipeline add vae, text_encoder, tokenizer and scheduler of the published model to the folder"
)


def convert_experts(
    high: str | Path,
    low: str | Path,
    target: str | Path,
    boundary: float,
    weights: str | None = None,
    overwrite: bool = False,
    echo: Callable[[str], object] = lambda line: None,
) -> ConversionSummary:
    """Write ``target``: transformer/ and transformer_2/, each as :func:`convert` does, and model_index.json.

    boundary: noise level at and above which the high-noise expert is used. The caller has checked that the two belong
    together. Raises a UserError as ``convert`` does.
    """
    target, done = Path(target), list[ConversionSummary]()
    for source in (high, low):
        check_target(Path(source), target, overwrite)

    def make(aside: Path) -> None:
        for source, part in ((high, FIRST), (low, SECOND)):
            done.append(convert(source, aside / part, "diffusers", weights, echo=echo))
        network = read_json(aside / FIRST / "config.json", "SOURCE")
        from_image = network["in_channels"] > network["out_channels"]
        index = {"_class_name": FROM_IMAGE if from_image else FROM_TEXT, "boundary_ratio": boundary}
        index |= {part: ["diffusers", "WanTransformer3DModel"] for part in (FIRST, SECOND)}
        (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    write_atomically(target, make, is_folder=True)
    first, second = done
    notes = (*dict.fromkeys((*first.notes, *second.notes)), _PIPELINE_NOTE)
    return first._replace(
        target=target,
        num_tensors=first.num_tensors + second.num_tensors,
        num_bytes=first.num_bytes + second.num_bytes,
        notes=notes,
    )


# --- adapters (LoRA) --------------------------------------------------------------------------------------------------


def convert_adapter(
    source: Path,
    target: Path,
    to: str | None,
    use_ema: bool,
    description: dict[str, Any] | None,
    overwrite: bool,
    echo: Callable[[str], object],
) -> ConversionSummary:
    """Write the adapters in ``source`` as ``target``, in a format that other programs read.

    description: content of the base's model.json; may be None, and is not needed for a run's checkpoint, which has it.

    Raises a UserError if there is no such format, or the adapters do not fit that base.
    """
    form = _adapter_form(target, to)
    check_target(source, target, overwrite, lambda path: adapter_format_of(path) is not None)
    check_output_folder("folder of TARGET", target.parent)
    echo(f"reading {source} (adapters)")
    shapes = _shapes_of_base(source, description)
    adapter = read_adapter(source, layer_names(shapes) if shapes else None, use_ema)
    if shapes:
        adapter.check_fits(shapes)
    arrays = adapter.arrays().values()
    num_bytes = sum(array.nbytes for array in arrays)
    echo(f"writing {target} ({form}): adapters of {len(adapter.layers)} layers, {num_bytes / 1e6:.1f} MB")
    notes: list[str] = []
    known = ADAPTER_FORMATS[form]
    write_atomically(target, lambda aside: notes.extend(known.write(aside, adapter, shapes)), known.is_folder)
    tree = ("adapters, average" if use_ema else "adapters") if adapter_facts(source) else "adapters"
    return ConversionSummary(
        source, "adapters", target, form, (tree,), len(arrays), num_bytes, (*adapter.notes, *notes)
    )


def _adapter_form(target: Path, to: str | None) -> str:
    if to is None or to not in ADAPTER_FORMATS:
        message = "--to is needed, as" if to is None else f"--to = {to} is no format of adapters, and"
        raise ConfigError(
            f"{message} SOURCE holds adapters (LoRA). {nearest(to or '', ADAPTER_FORMATS)}Use one of "
            f"{', '.join(ADAPTER_FORMATS)}; or name the weights of their base as SOURCE, and the adapters by "
            "--merge-lora."
        )
    if ADAPTER_FORMATS[to].is_folder == (target.suffix == ".safetensors"):
        wish = "name a folder" if ADAPTER_FORMATS[to].is_folder else "end in .safetensors"
        raise ConfigError(f"TARGET = {target} must {wish} for --to {to}.")
    return to


def _shapes_of_base(source: Path, description: dict[str, Any] | None) -> Shapes:
    """Return the shapes of the base's weights; {} if unknown."""
    content = description or (read_facts(source).get("model") if adapter_facts(source) else None)
    return parameters_of(model_config_from_mapping(content, "--model")).shapes() if content else {}
