"""``mm-dit init --from`` for a text-conditional model: its embedded fine-tuning config, adapted to these images."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.configs.embedded import FLAGS_FILE, embedded_configs
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import with_tuning
from mindspeed_mm_dit.planning.memory import Placement, memory, train_flop
from mindspeed_mm_dit.tools.planning.facts import Machine
from mindspeed_mm_dit.tools.planning.get import PUBLISHED, folder_name
from mindspeed_mm_dit.tools.planning.recommend import GIB, Recommendation, Request, fsdp2_yaml, recommend
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
    return ". ".join(
        f"{name} {value_text(starter.design[name].value)}: {starter.design[name].reason}"
        for name in names
        if name in starter.design
    )


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


WEIGHTS = Path("weights")
"""Default download folder of ``mm-dit get``."""
EPOCHS, STEPS = 160, (500, 10_000)
"""Target number of epochs, and the bounds on the number of steps."""


def example_config(name: str | None) -> Path | None:
    """Return the embedded config folder that fine-tunes the published weights ``name``; None if there is none.

    Raises ConfigError if it is a video model.
    """
    record = PUBLISHED.get(name or "")
    init_from_lines = {
        f"--init-from {WEIGHTS / folder_name(repo)}/transformer" for repo in (record.repos.values() if record else ())
    }
    folders = embedded_configs().values()
    example = next(
        (config for config in folders if init_from_lines & {*(config / FLAGS_FILE).read_text("utf-8").splitlines()}),
        None,
    )
    if example and "--lora-r" not in read_train_args(example / FLAGS_FILE):
        raise ConfigError(
            f"--from = {name} learns videos, and these are images. For videos, run mm-dit train {example.name}, whose "
            "train.args says where clips go."
        )
    return example


def steps_for(images: int, batch: int) -> int:
    """Return the number of steps for about EPOCHS epochs, within STEPS."""
    return min(STEPS[1], max(STEPS[0], EPOCHS * images // batch))


def _memory(model: ModelConfig, sharding: Recommendation, machine: Machine) -> str:
    """Describe the device memory of a micro-batch, and the host memory of offloaded weights."""
    need = memory(model, sharding.placement, online_vae=False).total(sharding.micro_batch_size) / GIB
    on_device = f"by the plan {need:.1f} of {machine.num_bytes / GIB:,.4g} GiB"
    return f"{on_device}, and {sharding.reasons['offload_to_cpu']}" if sharding.placement.offloaded else on_device


def adapted_example(
    name: str, folder: Path, images: int, size: int | None, machine: Machine, dataset: Mapping[str, Any]
) -> tuple[str, Callable[[str], dict[str, str]]]:
    """Return a summary of the choices, and a function that makes the config files for a given output folder.

    folder: the embedded config that fine-tunes the weights ``name``; size: image side in pixels, None for the
    config's; dataset: keys of dataset_param. Raises ConfigError if LoRA does not fit into memory.
    """
    words, lines = read_train_args(folder / FLAGS_FILE), (folder / FLAGS_FILE).read_text("utf-8").splitlines()
    model_json, data = (read_json(folder / file, name) for file in ("model.json", "data.json"))
    if size:
        factor = model_config_from_mapping(model_json, "model.json").ae.downsample_factor
        model_json["predictor"]["latent_size"] = [size // factor] * 2
    rank, batch = (int(words[words.index(flag) + 1]) for flag in ("--lora-r", "--global-batch-size"))
    targets = takewhile(lambda word: not word.startswith("--"), words[words.index("--lora-target-modules") + 1 :])
    model = with_tuning(model_config_from_mapping(model_json, "model.json"), Tuning(tuple(targets), rank, rank))
    images_per_rank = -(-batch // machine.ranks)
    memories: Any = {"device_bytes": machine.num_bytes, "machine_bytes": machine.machine_bytes}
    run = Placement(machine.ranks)
    sharding = recommend(model, Request(run, images_per_rank=images_per_rank, online_vae=False, **memories))
    batch, steps = images_per_rank * machine.ranks, steps_for(images, batch)
    cost = steps * batch * train_flop(model.predictor) / 1e12
    shape = " x ".join(map(str, model.sample_size))
    summary = (
        f"adapters (LoRA) for {name}, {steps:,} steps of {batch} images of {shape}, "
        f"out of {images:,}; {cost:,.4g} TFLOP to train; {_memory(model, sharding, machine)}"
    )
    data |= {"note": summary, "dataset_param": data["dataset_param"] | dataset | {"image_size": model.sample_size[-1]}}
    flag_values = {
        "--train-iters": steps,
        "--micro-batch-size": sharding.micro_batch_size,
        "--global-batch-size": batch,
        "--save-interval": steps // 5,
    }

    def files(outputs: str) -> dict[str, str]:
        values = flag_values | output_flags(outputs)
        flags = [line.partition(" ") for line in lines if not line.startswith("#")]
        train_args = [f"# {summary}", *(f"{flag} {values.get(flag, value)}".rstrip() for flag, _, value in flags), ""]
        return {
            "model.json": json_text(model_json),
            "data.json": json_text(data),
            "fsdp2.yaml": fsdp2_yaml(model, sharding, summary),
            FLAGS_FILE: "\n".join(train_args),
        }

    return summary, files
