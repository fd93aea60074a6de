"""Where a run starts.

At a checkpoint of --load that is complete and fits, with the weights of --init-from, or at random. Also the facts of
a run that its checkpoints store (run.json), and those that changed when a run resumes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit import __version__, framework
from mindspeed_mm_dit.checkpoint import checksums, power_ema
from mindspeed_mm_dit.checkpoint.adapting import InitialValue, SourceWeights, adapt_weights, base_digest, read_source
from mindspeed_mm_dit.checkpoint.store import (
    ADAPTERS,
    BASE,
    BASE_FROM,
    SETTINGS,
    CheckpointStore,
    invalid_fact,
    missing_optimizer_error,
    read_facts,
)
from mindspeed_mm_dit.configs.autoencoder import SCALE
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.configs.tuning import expand_lists
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, UserError
from mindspeed_mm_dit.models.init import initial_value
from mindspeed_mm_dit.models.meta import lora_specs, parameters_of
from mindspeed_mm_dit.optimizers.registry import optimizer_facts, optimizer_from_facts
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.contract import Checkpoints
from mindspeed_mm_dit.training.data_set import check_classes


class ResumePoint(NamedTuple):
    """The checkpoint that a run resumes from."""

    path: Path
    iteration: int
    facts: dict[str, Any]
    """Its run.json; empty if another program wrote the checkpoint."""


def find_resume_point(args: RunConfig, checkpoints: Checkpoints) -> ResumePoint | None:
    """Return the newest undamaged checkpoint of --load, after checking that it fits this run; None for a new run.

    Every rank must call this: they share the reading. No model is needed. ``checkpoints``: the framework's module of
    checkpoints.

    Raises:
        CheckpointError: --load cannot be resumed from, or belongs to another model.
        ConfigError: --save holds checkpoints of another run, which would get mixed with those of this one.
    """
    try:
        start = _newest(args.load, args.save, checkpoints) if args.load else None
        if start is not None:
            check_fits(args, start, checkpoints)
        if args.save and not same_folder(args.load, args.save):
            check_save_folder(CheckpointStore(args.save), start.iteration if start else 0)
    except UserError as error:
        error.is_shared = True  # all ranks look at one folder
        raise
    return start


def _newest(load: str, save: str | None, checkpoints: Checkpoints) -> ResumePoint | None:
    store = CheckpointStore(load)
    if os.path.exists(load) and not os.path.isdir(load) and not os.path.isfile(load):
        raise CheckpointError(f"--load = {load} is not a folder. Name the folder that --save named.")
    iteration, warnings = store.latest(lambda path: _problem_on_any_rank(checkpoints.find_damage, path))
    for line in warnings:
        print_rank_0(f"warning: {line}; falling back to the one before")
    if iteration is not None:
        path = store.path(iteration)
        if not checksums.has_checksums(path):
            print_rank_0(f"note: {path} has no checksums, so it cannot be checked for damage")
        return ResumePoint(path, iteration, read_facts(path))
    content = _content(load)
    if content and not same_folder(load, save):
        raise CheckpointError(
            f"--load = {load} holds no checkpoint of a run (iter_0001000 and the like), but {content}. Name the folder "
            "that --save named. mm-dit convert makes one from weights in another format."
        )
    print_rank_0(f"no checkpoint in {load}{f' (it holds {content})' if content else ''}: starting anew")
    return None


def _problem_on_any_rank(find_damage: Callable[..., str | None], path: Path) -> str | None:
    """Return what is wrong with the checkpoint ``path``, the same on every rank; they share the reading."""
    problem = find_damage(path, framework.runtime.rank(), framework.runtime.world_size())
    if not framework.runtime.any_over_ranks(problem is not None):
        return None
    if framework.runtime.rank() == 0:  # which reports it
        problem = problem or find_damage(path)
    return problem or "another rank reports that it is damaged"


def check_fits(args: RunConfig, start: ResumePoint, checkpoints: Checkpoints) -> None:
    """Raise CheckpointError if the checkpoint is of another model or optimizer, or lacks the optimizer's state.

    Other changes since then are printed.
    """
    path, _, facts = start
    check_classes(facts, args.mm.classes, path)
    _check_power_ema(args.power_ema_stds, facts.get(power_ema.STDS, ()), path)
    if "model" in facts:
        _check_model(args.mm.model, facts["model"], path)
    here = run_facts(args, 0, 0)
    _check_adapters(here.get(ADAPTERS), facts.get(ADAPTERS), path)
    if table := format_changes(changes(facts, here)):
        print_rank_0(table)
    checkpoints.check_architecture(path, parameters_of(args.mm.model).shapes(saved_only=True))
    if not args.no_load_optim:
        if not checkpoints.has_optimizer(path):
            raise missing_optimizer_error(path)
        _check_optimizer(args.optimizer, optimizer_from_facts(facts.get(SETTINGS), path).name, path)
        _check_frozen(here[SETTINGS].get("--freeze", ""), facts.get(SETTINGS), path)


def _check_adapters(here: Mapping[str, Any] | None, there: Mapping[str, Any] | None, path: Path) -> None:
    """Raise CheckpointError if the adapters differ in kind from this run's; their base is checked once it is read."""
    if here is None and there is not None:
        raise CheckpointError(
            f"--load = {path} holds adapters (LoRA), but this run trains the whole network. Pass --lora-target-modules "
            "and --init-from as that run did."
        )
    if here is not None and there is None:
        raise CheckpointError(
            f"--load = {path} holds no adapters (LoRA), but this run trains some. Start from its weights with "
            "--init-from instead of --load."
        )
    for flag in (name for name in here or () if name.startswith("--")):
        if here and there and _plain(here[flag]) != _plain(there.get(flag)):
            raise CheckpointError(
                f"{flag} = {_text(here[flag])} must be {_text(there.get(flag))}, with which the adapters in {path} "
                "were trained. Use that value, or choose another --load and --save."
            )


def _plain(value: Any) -> Any:
    """Return patterns in the form that all hosts share; other values as they are."""
    return expand_lists(map(str, value)) if isinstance(value, list) else value


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _check_frozen(here: str, settings: Any, path: Path) -> None:
    """Raise CheckpointError if the optimizer's state is of a run with other frozen parameters."""
    there = settings.get("--freeze", "") if isinstance(settings, dict) else ""
    if _plain(here.split()) != _plain(there.split()):
        raise CheckpointError(
            f"--freeze = {here} differs from the run in {path}, which froze {there or 'nothing'}, so its optimizer's "
            "state does not fit. Use the same, or pass --no-load-optim to start the state anew."
        )


def _check_power_ema(stds: Sequence[float], saved_stds: Sequence[float], path: Path) -> None:
    """Raise ConfigError if the checkpoint has EMAs of other widths; print a note if they start or end here."""
    power_ema.check_stds(stds, saved_stds, str(path))
    if stds and not saved_stds:
        print_rank_0(
            f"note: {path} has no power-function averages; they begin with its weights, as if these had never changed"
        )
    if saved_stds and not stds:
        print_rank_0(f"note: the power-function averages of {path} end here: --power-ema-stds is not given")


def _check_optimizer(name: str, there: str, path: Path) -> None:
    """Raise CheckpointError if the checkpoint holds the state of another optimizer."""
    if name != there:
        raise CheckpointError(
            f"--load = {path} holds the state of --optimizer {there}, but this run has --optimizer {name}. Use that "
            "one, or pass --no-load-optim to start the state anew."
        )


def same_folder(load: str | None, save: str | None) -> bool:
    """Return whether --load and --save name one folder."""
    return load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save)


def check_save_folder(store: CheckpointStore, iteration: int) -> None:
    """Raise ConfigError if the --save folder holds checkpoints of another run, later than ``iteration``."""
    there = store.iterations()
    if there and there[-1] > iteration:
        raise ConfigError(
            f"--save = {store.root} holds the checkpoints of a run up to iteration {there[-1]}, but this one starts at "
            f"{iteration}. Pass --load {store.root} to go on with that run, or another --save."
        )


def _check_model(model: ModelConfig, saved: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if predictor or diffusion are not those that the checkpoint was trained with."""
    there = model_config_from_mapping(saved, f"{path}/run.json: model")
    changed = differences(there, model, ("predictor", "diffusion"))
    if changed:
        raise CheckpointError(
            f"--load = {path} was trained with another model.json: {'; '.join(changed)}. Use the one saved in "
            f"{path}/run.json, or another --load and --save."
        )


def differences(there: ModelConfig, here: ModelConfig, sections: Sequence[str]) -> list[str]:
    """Return, in words, how ``sections`` of two model.json differ; the dropout of labels and frames may."""
    return [
        f"{section}.{name} is {value!r} there and {other!r} here"
        for section in sections
        for name, value, other in _pairs(getattr(there, section), getattr(here, section))
        if value != other and name not in PREDICTOR_SETTINGS
    ]


def _pairs(there: Any, here: Any) -> list[tuple[str, Any, Any]]:
    """Return (field, value there, value here) of a section; only ``model_id`` if their kinds differ."""
    names = [field.name for field in dataclasses.fields(there)] if type(there) is type(here) else ["model_id"]
    return [(name, getattr(there, name), getattr(here, name)) for name in names]


def _content(folder: str) -> str:
    names = sorted(p.name for p in Path(folder).glob("*") if not p.name.startswith("."))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def print_rank_0(text: str) -> None:
    """Print on the first rank."""
    if framework.runtime.rank() == 0:
        logger.info(text)


_DATA_SETTINGS = (
    *("random_flip", "valid_fraction", "valid_by_class", "caption_dropout_prob"),
    *("num_frames", "train_fps", "clip_start", "crop", "display", "color_profiles", "folder_repeats"),
)
PREDICTOR_SETTINGS = ("class_dropout_prob", "frame_dropout_prob")
_AE_SETTINGS = (*SCALE, "sample_posterior", "do_sample", "dtype")
_TEACHER_SETTINGS = ("model_id", "weight", "dtype")
_TEXT_SETTINGS = ("max_length", "truncate", "zero_padding", "dtype")
"""Fields of config sections that are compared; a section is compared by those that its config has."""


class Change(NamedTuple):
    """A fact that differs between a checkpoint and the run that resumes from it."""

    what: str
    there: str
    here: str


def run_facts(args: RunConfig, iteration: int, consumed_samples: int) -> dict[str, Any]:
    """Return run.json of a run with the flags ``args`` (and the configs in ``args.mm``) at ``iteration``."""
    return {
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        **{row.name: getattr(args, row.name) for row in rows() if row.compared == "fact"},
        **({power_ema.STDS: list(args.power_ema_stds)} if args.power_ema_stds else {}),
        **_adapters(args),
        SETTINGS: _settings(args),
        "model": args.mm.model_json,
        "classes": args.mm.classes,
        **({"captions": args.mm.captions} if args.mm.captions else {}),
        **({"words": args.mm.words} if args.mm.words and not args.init_from else {}),  # (its words are unknown)
        "mindspeed_mm_dit": __version__,
        **framework.runtime.versions(),
    }


def check_restorable(args: RunConfig) -> None:
    """Raise ConfigError for a fact of this run that its resume would not read back from run.json."""
    for key, value in run_facts(args, 0, 0).items():
        try:
            is_restorable = invalid_fact({key: json.loads(json.dumps(value))}) is None
        except (TypeError, ValueError, RecursionError):
            is_restorable = False
        if not is_restorable:
            advice = "Name each class by a text." if key == "classes" else "Change the setting that it comes from."
            raise ConfigError(
                f"{key} = {shorten_repr(value)} in run.json could not be read back when this run resumes. {advice}"
            )


def _adapters(args: RunConfig) -> dict[str, Any]:
    """Return the facts about adapters: their settings, and the base weights that they belong to."""
    if not lora_specs(args.mm.model):
        return {}
    return {ADAPTERS: {**args.mm.model.tuning_facts(), BASE: args.mm.base, BASE_FROM: args.init_from}}


def changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Change]:
    """Compare the facts of a checkpoint with those of this run; a fact missing from either counts as unchanged."""
    before, now = _compared(there), _compared(here)
    return [
        Change(name, str(before[name]), str(value))
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def format_changes(changed: list[Change]) -> str:
    """Return changes as a table with a heading; empty if there are none."""
    if not changed:
        return ""
    rows = [Change("what", "there", "here"), *changed]
    wide = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, wide)).rstrip() for row in rows)
    return "changed since the checkpoint:" + "".join(f"\n    {line}" for line in lines)


def _compared(facts: Mapping[str, Any]) -> dict[str, Any]:
    known = {row.word: facts[row.name] for row in rows() if row.compared == "fact" and row.name in facts}
    settings = facts.get(SETTINGS)
    return {**known, **(settings if isinstance(settings, dict) else {})}


def _settings(args: RunConfig) -> dict[str, Any]:
    model, data = args.mm.model, args.mm.data
    settings = {row.word: getattr(args, row.name) for row in rows() if row.compared == "setting"}
    settings |= optimizer_facts(args.chosen_optimizer())
    settings |= {} if lora_specs(model) else model.tuning_facts()
    if args.lr_decay_style != "constant":
        settings["--min-lr"] = args.min_lr
        settings["--lr-decay-iters"] = args.lr_decay_iters or args.train_iters
    settings["precision"] = str(args.mm.precision or "")
    settings |= _section_facts(model.predictor, "predictor", PREDICTOR_SETTINGS)
    settings |= _section_facts(data.dataset_param, "dataset_param", _DATA_SETTINGS)
    settings["dataloader_param.shuffle"] = data.dataloader_param.shuffle
    settings["dataset_param.buckets"] = data.dataset_param.bucket_text
    settings["pictures"] = args.mm.data_digest
    settings["autoencoder"] = args.mm.autoencoder
    settings |= _section_facts(model.ae, "ae", _AE_SETTINGS)
    for name, sections, compared in (
        ("text_encoder", model.text_encoders, _TEXT_SETTINGS),
        ("teacher", model.teachers, _TEACHER_SETTINGS),
    ):
        for number, section in enumerate(sections):
            settings |= _section_facts(section, f"{name}[{number}]" if number else name, compared)
    return {name: value for name, value in settings.items() if value not in ("", None)}


def _section_facts(config: Any, section: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of those ``names`` that are fields of ``config``, keyed by their names in the files."""
    there = {field.name for field in dataclasses.fields(config)}
    return {f"{section}.{name}": getattr(config, name) for name in names if name in there}


class InitialWeights(NamedTuple):
    """The initial weights of a run."""

    weights: dict[str, np.ndarray] | None
    """Initial value of each parameter, float32 or as a file stores it; None if the seed or a checkpoint decides."""
    base: str = ""
    """Digest of the base weights of adapters; empty without adapters."""


def read_initial_weights(args: RunConfig, start: ResumePoint | None) -> InitialWeights:
    """Return the initial weights of a run, as --init-from decides.

    Every rank must call this: they read a checkpoint folder together. No model is needed.

    Raises:
        UserError: --init-from cannot be read, cannot be adapted to this model, or is not the base of the adapters in
            ``start``.
    """
    model: ModelConfig = args.mm.model
    if args.init_from is None:
        return InitialWeights(None)
    if start is not None and not lora_specs(model):
        print_rank_0(f"note: --init-from = {args.init_from} is not read: the run resumes from {start.path}")
        return InitialWeights(None)
    try:
        source = read_source(args.init_from, model.predictor)
        adapted = adapt_weights(source, model.predictor, args.mm.classes, args.seed)
        weights = {name: value for name, value, _ in adapted}
        base = base_digest(weights) if lora_specs(model) else ""
        if start is not None:
            _check_base(args.init_from, base, start)
    except UserError as error:
        error.is_shared = True  # all ranks read the same file
        raise
    print_rank_0("\n".join(_report_lines(source, adapted, model, args.init_verbose)))
    new = {name: initial_value(name, p, args.seed) for name, p in parameters_of(model).items() if name not in weights}
    return InitialWeights(weights | new, base)


def _check_base(init_from: str, base: str, start: ResumePoint) -> None:
    there = start.facts[ADAPTERS][BASE]
    if base != there:
        raise CheckpointError(
            f"--init-from = {init_from} is not the base of the adapters in {start.path}: its digest is {base[:12]}, "
            f"and that of their base {there[:12]}. Name the weights that the run started from."
        )


def _report_lines(
    source: SourceWeights, adapted: Sequence[InitialValue], model: ModelConfig, every_tensor: bool
) -> Iterator[str]:
    """Yield the lines that report which tensors are loaded and which are new."""
    unchanged = sum(not how for _, _, how in adapted)
    yield f"initial weights: {source.path} ({source.format}): {unchanged} of {len(adapted)} tensors as they are"
    yield from (f"    note: {note}" for note in source.notes)
    for name, value, how in adapted:
        if how or every_tensor:
            yield f"    {name} {tuple(value.shape)}: {how or 'as it is'}"
    if "model" in source.facts:
        there = model_config_from_mapping(source.facts["model"], f"{source.path}: its model.json")
        sections = ("diffusion", "ae") if there.ae.model_id != model.ae.model_id else ("diffusion",)
        for line in differences(there, model, sections):
            yield f"    note: {line}"
    if adapters := lora_specs(model):
        if new := [name for name, _, how in adapted if "drawn anew" in how]:
            names = ", ".join(new[:3])
            yield f"    note: {names} are randomly initialised and frozen, so new classes will be hard to distinguish"
        trained = parameters_of(model).num_elements(trained_only=True)
        yield f"frozen, with adapters in {len(adapters)} layers: {trained:,} parameters are trained"
