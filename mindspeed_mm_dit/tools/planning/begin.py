"""``mm-dit init --from``: fine-tune an already trained network instead of training a new one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.adapting import SourceWeights, match_labels, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.configs.dit import DIT, DiTConfig
from mindspeed_mm_dit.configs.model import ModelConfig, autoencoder_config_of, model_config_from_mapping
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, nearest
from mindspeed_mm_dit.models.meta import parameters_of, with_tuning
from mindspeed_mm_dit.planning.memory import Placement, train_flop
from mindspeed_mm_dit.tools.planning.example import WEIGHTS, steps_for
from mindspeed_mm_dit.tools.planning.facts import CORE_FLOP_PER_SECOND, ImageFacts, Machine
from mindspeed_mm_dit.tools.planning.get import PUBLISHED
from mindspeed_mm_dit.tools.planning.recommend import GIB, Recommendation, Request, recommend
from mindspeed_mm_dit.tools.planning.starter import DIFFUSIONS, Choice, Starter, precision_and_sharding

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
        raise CheckpointError(
            f"--from = {name} needs its weights in {folder}, which does not hold them. Run: mm-dit get {name}"
        )
    return files[0]


def _num_heads(source: SourceWeights) -> int:
    """Return the number of attention heads, from the files or from the published network of the same size."""
    sizes = (source.predictor.hidden_size, len(parameters_of(source.predictor).blocks))
    published = {(known["hidden_size"], known["num_layers"]): known["num_heads"] for known in DIT.values()}
    if num_heads := source.num_heads or published.get(sizes):
        return num_heads
    raise CheckpointError(
        f"--from = {source.path} does not tell its number of attention heads. Name a checkpoint of a run, or a folder "
        "of diffusers."
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
    placement = Placement(machine.ranks, precision=machine.precision)
    request = Request(placement, machine.num_bytes, batch // machine.ranks)
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
