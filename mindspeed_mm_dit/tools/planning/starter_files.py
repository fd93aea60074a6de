"""Write the choices of ``starter.choose`` as the four files of a config folder, with their reasons."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from mindspeed_mm_dit.tools.planning.recommend import fsdp2_yaml
from mindspeed_mm_dit.tools.planning.starter import Starter

_OF_MODEL = ("ae", "text_encoder", "image_size", "patch_size", "network", "diffusion", "class_dropout_prob")
_OF_DATA = ("buckets", "bucket_group", "caption_dropout_prob", "random_flip", "valid_fraction")


def files_of(starter: Starter, dataset: Mapping[str, Any], description: str, outputs: str) -> dict[str, str]:
    """Return the text of each file, by its name.

    dataset: further keys of the section dataset_param; description: of the images, for the notes; outputs: the run's
    output folder.
    """
    return {
        "model.json": json_text({"note": _note(starter, _OF_MODEL), **starter.model_json}),
        "data.json": json_text(_data(starter, dataset, description)),
        "fsdp2.yaml": fsdp2_yaml(starter.model, starter.sharding, f"{description}. Used with --use-torch-fsdp2."),
        "train.args": _train_args(starter, description, outputs),
    }


def json_text(content: Mapping[str, Any]) -> str:
    """Return the text of a JSON config file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _note(starter: Starter, names: tuple[str, ...]) -> str:
    return ". ".join(f"{name} {value_text(starter.design[name].value)}: {starter.design[name].reason}"
                     for name in names if name in starter.design)  # fmt: skip


def _data(starter: Starter, dataset: Mapping[str, Any], description: str) -> dict[str, Any]:
    names = _OF_DATA if "buckets" in starter.design else ("image_size", *_OF_DATA)
    chosen = {name: starter.design[name].value for name in names if name in starter.design}
    labelled = not (dataset.get("single_class") or dataset.get("captions"))
    by_class = {"valid_by_class": True} if chosen["valid_fraction"] and labelled else {}
    return {
        "note": f"{description}. {_note(starter, _OF_DATA)}",
        "dataset_param": {"dataset_type": "image_folder", **dataset, **chosen, **by_class},
        "dataloader_param": {"shuffle": True, "prefetch_batches": 4},
    }


def _train_args(starter: Starter, description: str, outputs: str) -> str:
    lines = [f"# {description}.", f"# Cost: {starter.flop / 1e12:,.4g} TFLOP."]
    for flag, choice in starter.flags.items():
        if choice.reason:
            lines.append(f"# {choice.reason}")
        lines.append(flag if choice.value is None else f"{flag} {shlex.quote(value_text(choice.value))}")
    lines.append("# run the same command again to resume from the last checkpoint")
    lines += [f"{flag} {value}" for flag, value in output_flags(outputs).items()]
    return "\n".join(lines) + "\n"


def output_flags(outputs: str) -> dict[str, str]:
    """Return the output flags of a run below the folder ``outputs``, with shell-quoted values."""
    folders = {"--save": "checkpoints", "--load": "checkpoints", "--tensorboard-dir": "tensorboard"}
    return {flag: shlex.quote(f"{outputs}/{folder}") for flag, folder in folders.items()}


def value_text(value: Any) -> str:
    """Format a chosen value as it is written in its file."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:g}" for name, number in value.items())
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
