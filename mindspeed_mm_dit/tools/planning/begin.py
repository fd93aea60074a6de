"""``mm-dit init --from``: fine-tune an already trained network, by a config made here or by the embedded one for it."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.adapting import SourceWeights, match_labels, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.configs.arguments import FLAGS_FILE, embedded_configs, read_train_args
from mindspeed_mm_dit.configs.dit import DIT, DiTConfig
from mindspeed_mm_dit.configs.model import ModelConfig, autoencoder_config_of, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, nearest
from mindspeed_mm_dit.models.meta import parameters_of, with_tuning
from mindspeed_mm_dit.planning import Placement, memory, train_flop
from mindspeed_mm_dit.tools.planning.facts import CORE_FLOP_PER_SECOND, ImageFacts, Machine
from mindspeed_mm_dit.tools.planning.get import PUBLISHED, folder_name
from mindspeed_mm_dit.tools.planning.recommend import GIB, Recommendation, Request, fsdp2_yaml, recommend
from mindspeed_mm_dit.tools.planning.starter import DIFFUSIONS, Choice, Starter, precision_and_sharding

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


ADAPTERS = Tuning(("all",), 16, 16)
"""LoRA on every layer of the blocks; used if full fine-tuning does not fit into memory."""
SMALL_MODEL_LR = {128: 1e-3, 256: 3e-4}
"""Learning rate by width for networks smaller than the published ones."""
_OF_IMAGES = tuple(
    """
    num_classes class_dropout_prob input_size text_dim text_length pooled_dim pooled_encoder latent_size
    """.split()
)
"""Predictor settings that depend on the images and captions; all others come from the weights."""


@dataclass(frozen=True)
class PretrainedModel:
    """Weights to fine-tune, with the objective and autoencoder that they were trained with."""

    name: str
    source: SourceWeights
    predictor: DiTConfig
    diffusion: Mapping[str, Any]
    """Section of model.json."""
    vae: str | None
    """Folder of its autoencoder; None for a pixel-space model."""

    @property
    def image_size(self) -> int:
        """Side of its images in pixels."""
        return self.predictor.input_size * (
            autoencoder_config_of(self.vae, "--vae").downsample_factor if self.vae else 1
        )


def find_base(weights: str, vae: str | None, diffusion: str | None) -> PretrainedModel:
    """Return the base model: a name of ``mm-dit get``, or weights that --init-from reads.

    vae, diffusion: the user's choice; if None, they are taken from its files or from the published record.

    Raises a UserError if the weights do not exist, are not a complete DiT, or leave the autoencoder unknown.
    """
    record = PUBLISHED.get(weights)
    if record is None and not Path(weights).exists():
        raise ConfigError(
            f"--from = {weights} is neither a name of mm-dit get nor a file or folder. "
            f"{nearest(weights, PUBLISHED)}Run mm-dit get for a list of the names."
        )
    source = read_source(_weights_in(record.folder(WEIGHTS), weights) if record else weights, DiTConfig(32, 1000))
    assert isinstance(source.predictor, DiTConfig)  # (read_source refuses others)
    sections = source.facts.get("model") or (record.sections if record else {})
    section = {"model_id": diffusion, **DIFFUSIONS[diffusion].section} if diffusion else sections.get("diffusion")
    needed = [PUBLISHED[need].folder(WEIGHTS) for need in record.needs] if record else []
    predictor = dataclasses.replace(source.predictor, num_heads=_num_heads(source))
    return PretrainedModel(
        weights, source, predictor, section or {"model_id": "gaussian_diffusion"}, vae or _vae_of(source, needed)
    )


def adapted_starter(
    starter: Starter, base: PretrainedModel, images: ImageFacts, classes: Sequence[str], machine: Machine
) -> Starter:
    """Return ``starter`` with the network of ``base`` and a shorter run: full fine-tuning if memory allows, or LoRA.

    Raises ConfigError if not even LoRA fits, or if new classes or captions need full fine-tuning.
    """
    model_json = {**starter.model_json, "diffusion": dict(base.diffusion), "predictor": _predictor(starter, base)}
    whole = model_config_from_mapping(model_json, "model.json")
    batch = starter.flags["--global-batch-size"].value
    model, sharding, trained = _tuned(whole, base, batch, classes, machine)
    steps = steps_for(images.count, batch)
    size = parameters_of(whole).num_elements() / 1e6
    minutes = steps * batch * train_flop(whole.predictor) / (machine.cores * CORE_FLOP_PER_SECOND) / 60
    lasts = f"{minutes / 60:,.0f} hours" if minutes >= 120 else f"{math.ceil(minutes)} minute(s)"
    takes = "" if machine.accelerators else f"; about {lasts} on this CPU"
    repeats = f"each of {images.count:,} images {steps * batch // images.count:,} times"
    fitting, batch = sharding.reasons["recompute_modules"], starter.flags["--global-batch-size"].value
    shared = sharding.micro_batch_size == batch and not machine.accelerators  # (the default: all images of a rank)
    adapters = {
        "--lora-target-modules": Choice(ADAPTERS.targets[0], trained),
        "--lora-r": Choice(ADAPTERS.rank),
        "--lora-alpha": Choice(ADAPTERS.alpha),
    }
    same_size = starter.design["image_size"].value == base.image_size
    design = {
        **({"image_size": Choice(base.image_size, "of the weights")} if same_size else {}),
        "network": Choice(base.name, f"{size:,.4g} M parameters of {base.source.path}; {trained}"),
        "patch_size": Choice(base.predictor.patch_size, "of the weights"),
        "diffusion": Choice(base.diffusion["model_id"], "the objective of the weights"),
    }
    flags = {
        "--init-from": Choice(str(base.source.path), "the weights to fine-tune"),
        **({} if model is whole else adapters),
        "--train-iters": Choice(steps, f"{repeats}{takes}"),
        **({} if shared else {"--micro-batch-size": Choice(sharding.micro_batch_size, fitting)}),
        "--optimizer": Choice("adam", "as the weights were trained"),
        "--lr": Choice(
            SMALL_MODEL_LR.get(base.predictor.hidden_size, 2e-5 if model is whole else 1e-4),
            "lower than for a new network, since this one is already trained",
        ),
        "--lr-decay-style": Choice("constant", "the run can be prolonged"),
        "--lr-warmup-iters": Choice(100),
        "--ema-decay": Choice(0.99, "samples are drawn from an average over some 100 steps"),
        "--sample-interval": Choice(steps // 10, "grids of samples in samples/, beside the checkpoints"),
        **({"--eval-interval": Choice(steps // 10)} if images.held_out else {}),
        "--save-interval": Choice(steps // 5),
        **precision_and_sharding(machine, sharding),
    }
    return Starter(model_json, model, sharding, starter.design | design, starter.flags | flags)


def _weights_in(folder: Path, name: str) -> Path:
    """Return the --init-from value for a folder that ``mm-dit get`` made: the folder, or its single weights file."""
    if (folder / "transformer").is_dir():
        return folder
    files = [file for file in folder.glob("*") if any(file.suffix in known.endings for known in FORMATS.values())]
    if len(files) != 1:
        raise CheckpointError(f"--from = {name} needs its weights in {folder}. Run: mm-dit get {name}")
    return files[0]


def _num_heads(source: SourceWeights) -> int:
    """Return the number of attention heads, from the files or from the published network of the same size."""
    sizes = (source.predictor.hidden_size, len(parameters_of(source.predictor).blocks))
    published = {(known["hidden_size"], known["num_layers"]): known["num_heads"] for known in DIT.values()}
    if num_heads := source.num_heads or published.get(sizes):
        return num_heads
    raise CheckpointError(
        f"--from = {source.path} does not tell its number of attention heads. Name a run's checkpoint or a diffusers "
        "folder."
    )


def _vae_of(source: SourceWeights, needed: list[Path]) -> str | None:
    """Return the folder of the autoencoder whose latents the weights learned."""
    if "model" in source.facts:
        folder: str | None = source.facts["model"]["ae"].get("from_pretrained")
        return folder
    for candidate in (source.path / "vae", *needed):
        if (candidate / "config.json").is_file():
            return str(candidate)
    raise ConfigError(
        f"--from = {source.path} does not tell which autoencoder it was trained with. Name its folder, e.g. --vae "
        "weights/sd-vae-ft-ema after mm-dit get sd-vae-ft-ema."
    )


def _predictor(starter: Starter, base: PretrainedModel) -> dict[str, Any]:
    """Return the predictor section: the network of the base, with the conditions and size of these images."""
    # a pixel-space model may change from grey to colour
    of_images = _OF_IMAGES if base.vae else (*_OF_IMAGES, "in_channels")
    image_settings = {key: value for key, value in starter.model_json["predictor"].items() if key in of_images}
    usual = vars(DiTConfig(32, 1000)) | dict.fromkeys(("patch_size", "hidden_size", "num_layers", "num_heads"))
    passed_over = (*of_images, "z_dims", "projector_dim", "encoder_depth")
    network_settings = {key: value for key, value in vars(base.predictor).items() if key not in passed_over}
    return (
        {"model_id": "dit"}
        | image_settings
        | {key: value for key, value in network_settings.items() if value != usual[key]}
    )


def _tuned(
    whole: ModelConfig, base: PretrainedModel, batch: int, classes: Sequence[str], machine: Machine
) -> tuple[ModelConfig, Recommendation, str]:
    """Return the model to train (full fine-tuning if it fits, otherwise LoRA), its placement, and the reason."""
    request = Request(Placement(machine.ranks, precision=machine.precision), machine.num_bytes, batch // machine.ranks)
    new = _unknown_conditions(base, whole, classes)
    host_memory = machine.machine_bytes if machine.accelerators else 0  # (on a CPU there is nothing to offload)
    offloading = dataclasses.replace(request, machine_bytes=host_memory)
    try:
        return whole, recommend(whole, offloading if new else request), "all of them are trained"
    except ConfigError as error:
        if new:
            raise ConfigError(
                f"--from = {base.name} does not know these {new}, so all of it must be trained, which does not fit. "
                f"{error} Adapters do for one class, or for classes that it knows by name."
            ) from None
    adapted = with_tuning(whole, ADAPTERS)
    little = f"{machine.num_bytes / GIB:,.4g} GiB are too little to train all"
    return adapted, recommend(adapted, offloading), f"adapters (LoRA) are trained: {little}"


def _unknown_conditions(base: PretrainedModel, whole: ModelConfig, classes: Sequence[str]) -> str:
    """Return the conditions that the weights do not know yet ("captions" or "classes"); empty if they know all."""
    if whole.predictor.texts and not base.predictor.texts:
        return "captions"
    known_labels = match_labels(base.source, whole.predictor, classes)
    return "classes" if len(classes) > 1 and not known_labels.keys() >= set(range(len(classes))) else ""
