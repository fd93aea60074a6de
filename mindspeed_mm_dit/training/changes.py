"""The facts of a run that its checkpoints store (run.json), and those that changed when a run resumes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, BASE, BASE_FROM, SETTINGS, bad_fact
from mindspeed_mm_dit.configs.autoencoder import SCALE
from mindspeed_mm_dit.configs.limits import short_repr
from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.meta import adapters_of
from mindspeed_mm_dit.optimizers.registry import optimizer_facts

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
        **runtime.versions(),
    }


def check_restorable(args: RunConfig) -> None:
    """Raise ConfigError for a fact of this run that its resume would not read back from run.json."""
    for key, value in run_facts(args, 0, 0).items():
        try:
            is_restorable = bad_fact({key: json.loads(json.dumps(value))}) is None
        except (TypeError, ValueError, RecursionError):
            is_restorable = False
        if not is_restorable:
            cure = "name each class by a text" if key == "classes" else "change the setting that it comes from"
            raise ConfigError(
                f"run.json: {key} = {short_repr(value)}", "cannot be read back when this run resumes", cure
            )


def _adapters(args: RunConfig) -> dict[str, Any]:
    """Return the facts about adapters: their settings, and the base weights that they belong to."""
    if not adapters_of(args.mm.model):
        return {}
    return {ADAPTERS: {**args.mm.model.tuned_by(), BASE: args.mm.base, BASE_FROM: args.init_from}}


def changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Change]:
    """Compare the facts of a checkpoint with those of this run; a fact missing from either counts as unchanged."""
    before, now = _compared(there), _compared(here)
    return [
        Change(name, str(before[name]), str(value))
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def table_of(changed: list[Change]) -> str:
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
    settings |= {} if adapters_of(model) else model.tuned_by()
    if args.lr_decay_style != "constant":
        settings["--min-lr"] = args.min_lr
        settings["--lr-decay-iters"] = args.lr_decay_iters or args.train_iters
    settings["precision"] = str(args.mm.precision or "")
    settings |= _section_facts(model.predictor, "predictor", PREDICTOR_SETTINGS)
    settings |= _section_facts(data.dataset_param, "dataset_param", _DATA_SETTINGS)
    settings["dataloader_param.shuffle"] = data.dataloader_param.shuffle
    settings["dataset_param.buckets"] = data.dataset_param.bucket_words
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
