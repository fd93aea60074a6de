"""``mm-dit init --from``: a run that begins with a network that is trained already, in place of a new one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.adapting import SourceWeights, read_source, same_labels
from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import ModelConfig, autoencoder_in, model_config_from_mapping
from mindspeed_mm_dit.configs.presets import DIT
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, nearest
from mindspeed_mm_dit.models.meta import parameters_of, tuned
from mindspeed_mm_dit.planning.arithmetic import train_flop
from mindspeed_mm_dit.planning.memory import Placement
from mindspeed_mm_dit.tools.planning.example import WEIGHTS, steps_for
from mindspeed_mm_dit.tools.planning.facts import CORE_FLOP_PER_SECOND, ImageFacts, Machine
from mindspeed_mm_dit.tools.planning.published import PUBLISHED
from mindspeed_mm_dit.tools.planning.recommend import GIB, Recommendation, Request, recommend
from mindspeed_mm_dit.tools.planning.starter import DIFFUSIONS, Choice, Starter, precision_and_sharding

ADAPTERS = Tuning(("all",), 16, 16)
"""Trained where the whole network does not fit: LoRA of every layer of the blocks."""
LR_OF_SMALL = {128: 1e-3, 256: 3e-4}
"""Learning rate by width, where it is more than that of published networks."""
_OF_IMAGES = ("num_classes", "class_dropout_prob", "input_size", "text_dim", "text_length", "pooled_dim",
              "pooled_encoder", "latent_size")  # fmt: skip
"""Settings of the predictor that images and captions decide; the weights decide the others."""


@dataclass(frozen=True)
class Base:
    """Weights to begin from, with what belongs to them."""

    name: str
    source: SourceWeights
    predictor: DiTConfig
    diffusion: Mapping[str, Any]
    """Section of model.json."""
    vae: str | None
    """Folder of its autoencoder; None: it learned pixels."""

    @property
    def image_size(self) -> int:
        """Side of its images in pixels."""
        return self.predictor.input_size * (autoencoder_in(self.vae, "--vae").downsample_factor if self.vae else 1)


def base_of(given: str, vae: str | None, diffusion: str | None) -> Base:
    """Return the base: a name of ``mm-dit get``, or weights that --init-from reads.

    vae, diffusion: what the user says of it; otherwise its files decide, or what is known of the name.

    Raises a UserError if it is not there, is no whole DiT, or does not tell what belongs to it.
    """
    record = PUBLISHED.get(given)
    if record is None and not Path(given).exists():
        raise ConfigError(f"--from = {given}", "is no name of mm-dit get, and no file or folder",
                          f"{nearest(given, PUBLISHED)}mm-dit get lists the names")  # fmt: skip
    source = read_source(_weights_in(record.place(WEIGHTS), given) if record else given, DiTConfig(32, 1000))
    assert isinstance(source.predictor, DiTConfig)  # (read_source refuses others)
    told = source.facts.get("model") or (record.sections if record else {})
    section = {"model_id": diffusion, **DIFFUSIONS[diffusion].section} if diffusion else told.get("diffusion")
    needed = [PUBLISHED[need].place(WEIGHTS) for need in record.needs] if record else []
    predictor = dataclasses.replace(source.predictor, num_heads=_num_heads(source))
    return Base(given, source, predictor, section or {"model_id": "gaussian_diffusion"},
                vae or _vae_of(source, needed))  # fmt: skip


def adapted_starter(
    starter: Starter, base: Base, images: ImageFacts, classes: Sequence[str], machine: Machine
) -> Starter:
    """Return ``starter`` with the network of ``base``, whole or with adapters as memory allows, and a shorter run.

    Raises ConfigError if not even adapters fit, or if they would leave untrained what tells new classes apart.
    """
    model_json = {**starter.model_json, "diffusion": dict(base.diffusion), "predictor": _predictor(starter, base)}
    whole = model_config_from_mapping(model_json, "model.json")
    batch = starter.flags["--global-batch-size"].value
    model, sharding, way = _tuned(whole, base, batch, classes, machine)
    steps = steps_for(images.count, batch)
    size = parameters_of(whole).num_elements() / 1e6
    minutes = steps * batch * train_flop(whole.predictor) / (machine.cores * CORE_FLOP_PER_SECOND) / 60
    lasts = f"{minutes / 60:,.0f} hours" if minutes >= 120 else f"{math.ceil(minutes)} minute(s)"
    takes = "" if machine.accelerators else f"; about {lasts} on this CPU"
    seen = f"each of {images.count:,} images {steps * batch // images.count:,} times"
    fitting, batch = sharding.reasons["recompute_modules"], starter.flags["--global-batch-size"].value
    shared = sharding.micro_batch_size == batch and not machine.accelerators  # (a rank's share is the default)
    adapters = {"--lora-target-modules": Choice(ADAPTERS.targets[0], way), "--lora-r": Choice(ADAPTERS.rank),
                "--lora-alpha": Choice(ADAPTERS.alpha)}  # fmt: skip
    same_size = starter.design["image_size"].value == base.image_size
    design = {
        **({"image_size": Choice(base.image_size, "of the weights")} if same_size else {}),
        "network": Choice(base.name, f"{size:,.4g} M parameters of {base.source.path}; {way}"),
        "patch_size": Choice(base.predictor.patch_size, "of the weights"),
        "diffusion": Choice(base.diffusion["model_id"], "as the weights have learned"),
    }
    flags = {
        "--init-from": Choice(str(base.source.path), "the weights to begin with"),
        **({} if model is whole else adapters),
        "--train-iters": Choice(steps, f"{seen}{takes}"),
        **({} if shared else {"--micro-batch-size": Choice(sharding.micro_batch_size, fitting)}),
        "--optimizer": Choice("adam", "as the weights were trained"),
        "--lr": Choice(
            LR_OF_SMALL.get(base.predictor.hidden_size, 2e-5 if model is whole else 1e-4),
            "less than a new network takes: this one is trained already",
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
    """Return what --init-from reads of a folder that ``mm-dit get`` made: the folder, or its one file of weights."""
    if (folder / "transformer").is_dir():
        return folder
    files = [file for file in folder.glob("*") if any(file.suffix in known.endings for known in FORMATS.values())]
    if len(files) != 1:
        raise CheckpointError(f"--from = {name}", f"{folder} does not hold its weights", f"mm-dit get {name}")
    return files[0]


def _num_heads(source: SourceWeights) -> int:
    """Return the number of heads: of the files, or of the published network of these sizes."""
    sizes = (source.predictor.hidden_size, len(parameters_of(source.predictor).blocks))
    published = {(known["hidden_size"], known["num_layers"]): known["num_heads"] for known in DIT.values()}
    if found := source.num_heads or published.get(sizes):
        return found
    raise CheckpointError(f"--from = {source.path}", "does not tell its number of attention heads",
                          "name a checkpoint of a run, or a folder of diffusers")  # fmt: skip


def _vae_of(source: SourceWeights, needed: list[Path]) -> str | None:
    """Return the folder of the autoencoder whose latents the weights learned."""
    if "model" in source.facts:
        folder: str | None = source.facts["model"]["ae"].get("from_pretrained")
        return folder
    for place in (source.path / "vae", *needed):
        if (place / "config.json").is_file():
            return str(place)
    raise ConfigError(f"--from = {source.path}", "does not tell which autoencoder made the latents that it learned",
                      "name its folder: --vae weights/sd-vae-ft-ema (mm-dit get sd-vae-ft-ema)")  # fmt: skip


def _predictor(starter: Starter, base: Base) -> dict[str, Any]:
    """Return section predictor: the network of the base, with the conditions and size of these images."""
    of_images = _OF_IMAGES if base.vae else (*_OF_IMAGES, "in_channels")  # (weights of grey images learn colour)
    own = {key: value for key, value in starter.model_json["predictor"].items() if key in of_images}
    usual = vars(DiTConfig(32, 1000)) | dict.fromkeys(("patch_size", "hidden_size", "num_layers", "num_heads"))
    passed_over = (*of_images, "z_dims", "projector_dim", "encoder_depth")
    theirs = {key: value for key, value in vars(base.predictor).items() if key not in passed_over}
    return {"model_id": "dit"} | own | {key: value for key, value in theirs.items() if value != usual[key]}


def _tuned(
    whole: ModelConfig, base: Base, batch: int, classes: Sequence[str], machine: Machine
) -> tuple[ModelConfig, Recommendation, str]:
    """Return the model to train, whole if it fits or else with adapters, its placement, and why."""
    placement = Placement(machine.ranks, precision=machine.precision)
    request = Request(placement, machine.num_bytes, batch // machine.ranks)
    new = _new_to(base, whole, classes)
    beside = machine.machine_bytes if machine.accelerators else 0  # (a CPU trains in the machine's memory anyway)
    offloading = dataclasses.replace(request, machine_bytes=beside)
    try:
        return whole, recommend(whole, offloading if new else request), "all of them are trained"
    except ConfigError as error:
        if new:
            reason = f"does not know these {new}, so all of it must be trained; {error.reason}"
            cure = "use more memory or devices; adapters do for one class, or for classes that it knows by name"
            raise ConfigError(f"--from = {base.name}", reason, cure) from None
    adapted = tuned(whole, ADAPTERS)
    little = f"{machine.num_bytes / GIB:,.4g} GiB are too little to train all"
    return adapted, recommend(adapted, offloading), f"adapters (LoRA) are trained: {little}"


def _new_to(base: Base, whole: ModelConfig, classes: Sequence[str]) -> str:
    """Return which conditions the weights must learn to tell apart; empty: none."""
    if whole.predictor.texts and not base.predictor.texts:
        return "captions"
    kept = same_labels(base.source, whole.predictor, classes)
    return "classes" if len(classes) > 1 and not kept.keys() >= set(range(len(classes))) else ""
