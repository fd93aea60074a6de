"""``mm-dit init --from`` for a text-conditional model: its embedded fine-tuning config, adapted to these images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.embedded import FLAGS_FILE, embedded_configs
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import tuned
from mindspeed_mm_dit.planning.arithmetic import train_flop
from mindspeed_mm_dit.planning.memory import Placement, memory
from mindspeed_mm_dit.tools.planning.facts import Machine
from mindspeed_mm_dit.tools.planning.published import PUBLISHED, folder_name
from mindspeed_mm_dit.tools.planning.recommend import GIB, Recommendation, Request, fsdp2_yaml, recommend
from mindspeed_mm_dit.tools.planning.starter_files import json_text, output_flags

WEIGHTS = Path("weights")
"""Default download folder of ``mm-dit get``."""
EPOCHS, STEPS = 160, (500, 10_000)
"""Target number of epochs, and the bounds on the number of steps."""


def example_of(name: str | None) -> Path | None:
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
        raise ConfigError(f"--from = {name}", "learns videos, and these are images",
                          f"mm-dit train {example.name} does; its train.args says where clips go")  # fmt: skip
    return example


def steps_for(images: int, batch: int) -> int:
    """Return the number of steps for about EPOCHS epochs, within STEPS."""
    return min(STEPS[1], max(STEPS[0], EPOCHS * images // batch))


def _memory(model: ModelConfig, sharding: Recommendation, machine: Machine) -> str:
    """Describe the device memory of a micro-batch, and the host memory of offloaded weights."""
    need = memory(model, sharding.placement, online_vae=False).total(sharding.micro_batch_size) / GIB
    on_device = f"by the plan {need:.1f} of {machine.num_bytes / GIB:,.4g} GiB"
    return f"{on_device}, and {sharding.reasons['offload_to_cpu']}" if sharding.placement.offloaded else on_device


def adapted(
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
    model = tuned(model_config_from_mapping(model_json, "model.json"), Tuning(tuple(targets), rank, rank))
    images_per_rank = -(-batch // machine.ranks)
    request = Request(Placement(machine.ranks), machine.num_bytes, images_per_rank, online_vae=False,
                      machine_bytes=machine.machine_bytes)  # fmt: skip
    sharding = recommend(model, request)
    batch, steps = images_per_rank * machine.ranks, steps_for(images, batch)
    cost = steps * batch * train_flop(model.predictor) / 1e12
    shape = " x ".join(map(str, model.sample_size))
    summary = (f"adapters (LoRA) for {name}, {steps:,} steps of {batch} images of {shape}, "
            f"out of {images:,}; {cost:,.4g} TFLOP to train; {_memory(model, sharding, machine)}")  # fmt: skip
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
        return {"model.json": json_text(model_json), "data.json": json_text(data),
                "fsdp2.yaml": fsdp2_yaml(model, sharding, summary), FLAGS_FILE: "\n".join(train_args)}  # fmt: skip

    return summary, files
