"""Choose the settings of a first run on a user's images, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.dit import PRESETS
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.source import Budget, Shape, format_sizes
from mindspeed_mm_dit.data.buckets import count_shapes, shapes_of
from mindspeed_mm_dit.data.order import split
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.planning import Placement, memory, train_flop
from mindspeed_mm_dit.tools.planning.facts import CPU_MINUTES, MIN_HELD_OUT, ImageFacts, Machine
from mindspeed_mm_dit.tools.planning.recommend import GIB, Recommendation, Request, recommend

SMALL = {"DiT-S": (12, 384, 6), "6 blocks of width 256": (6, 256, 4), "4 blocks of width 128": (4, 128, 4)}
"""Networks for a CPU, largest first: (num_layers, hidden_size, num_heads)."""
BLOCKS = {"qk_norm": True, "rms_norm": True, "swiglu": True, "rope": True}
"""Options of LightningDiT (Yao & Wang 2025), with which a small network tolerates a high learning rate."""
CLEAN_IMAGE = {"prediction_type": "data", "logit_mean": -0.8, "logit_std": 0.8}
"""Objective of a small pixel-space network: x-prediction at timesteps nearer to noise, as in JiT."""
IMAGES_OF_SIZE = {"DiT-XL": 500_000, "DiT-L": 100_000, "DiT-B": 20_000, "DiT-S": 0}
"""Number of images from which a published size is worth its cost: XL was made for 1.28 million; S memorises 400."""
PIXELS, CPU_PIXELS = 64, 32
"""Largest images without an autoencoder, on an accelerator and on a CPU."""
TOKENS, CPU_TOKENS = 256, 64
"""Most tokens of an image, on an accelerator and on a CPU; the published models at 256 pixels have 256."""
SAMPLES_AT, SAMPLES_GROWTH = (400, 640_000), 0.63
"""Samples in a whole run, a power law of the number of images: 1,600 epochs of 400 images; 80 epochs of 1.28 million,
as in the first 400,000 steps of the DiT paper."""
CPU_STEPS, MIN_STEPS = (2_800, 4_000), 500
"""Range of steps of a CPU run, and the minimum if time is short."""
CPU_SAMPLES = 32 * CPU_STEPS[0]
"""Samples that a network must be able to train on within a CPU's time: the usual batch for the fewest steps."""
WORTH_BUCKETS = 0.1
"""Buckets are used if square crops would remove more than this fraction of the images."""
GROUPS, GROUPS_OF_ALL = (32, 16, 8, 4, 2, 1), 5
"""Sizes of bucket groups, largest first, and the minimum number of groups in the data set."""
RUN_SEED = 1234
"""Default of --seed, which determines the held-out images."""


@dataclass(frozen=True)
class StarterObjective:
    """An objective that ``mm-dit init`` offers."""

    section: Mapping[str, str]
    """Section diffusion of model.json."""
    learn_sigma: bool
    sampler: str
    """Sampler of the report, in 25 steps."""
    reason: str


DIFFUSIONS = {
    "flow_matching": StarterObjective(
        {"path": "linear", "prediction_type": "velocity", "timestep_sampling": "logit_normal"},
        learn_sigma=False,
        sampler="heun",
        reason="it samples well in 25 steps, on straight paths (SiT)",
    ),
    "gaussian_diffusion": StarterObjective(
        {}, learn_sigma=True, sampler="dpm++", reason="as the published DiT; diffusers' DiTPipeline can sample it"
    ),
}
"""Objectives by model_id; the first is the default."""


@dataclass(frozen=True)
class Choice:
    """The value of a setting, and the reason for it."""

    value: Any
    reason: str = ""


@dataclass(frozen=True)
class Starter:
    """All settings of a first run."""

    model_json: dict[str, Any]
    """model.json without its note."""
    model: ModelConfig
    """The same, parsed."""
    sharding: Recommendation
    """Its placement on the devices."""
    design: dict[str, Choice]
    """Choices for the JSON files."""
    flags: dict[str, Choice]
    """Flags of train.args in order; None is the value of a flag without argument."""

    @property
    def flop(self) -> float:
        """FLOP of the whole run."""
        samples = self.flags["--train-iters"].value * self.flags["--global-batch-size"].value
        return float(samples * train_flop(self.model.predictor))


def choose(
    images: ImageFacts,
    machine: Machine,
    ae: Mapping[str, Any] | None = None,
    image_size: int | None = None,
    diffusion: str = "flow_matching",
) -> Starter:
    """Choose all settings of a first run.

    ``ae``: section ae of model.json with all its sizes; None: train on pixels. ``diffusion``: one of DIFFUSIONS.

    Raises:
        ConfigError: ``image_size`` cannot be cut into patches, or nothing fits into the memory.
    """
    size = _image_size(images, machine, ae, image_size)

    def in_time(name: str, starter: Starter) -> Starter:
        if machine.accelerators or starter.flop <= machine.flop:
            return starter
        return _with_network(name, size, images, machine, ae, diffusion, part=machine.flop / starter.flop)

    *larger, smallest = _networks(images, machine)
    for name in larger:
        try:
            starter = _with_network(name, size, images, machine, ae, diffusion)
        except ConfigError:  # it does not fit
            continue
        if machine.accelerators or CPU_SAMPLES * train_flop(starter.model.predictor) <= machine.flop:
            return in_time(name, starter)
    return in_time(smallest, _with_network(smallest, size, images, machine, ae, diffusion))


def _networks(images: ImageFacts, machine: Machine) -> list[str]:
    """Return the networks to try, largest first."""
    if not machine.accelerators:
        return list(SMALL)
    return [name for name, count in IMAGES_OF_SIZE.items() if images.count >= count]


def _with_network(
    name: str,
    size: Choice,
    images: ImageFacts,
    machine: Machine,
    ae: Mapping[str, Any] | None,
    diffusion: str,
    part: float = 1.0,
) -> Starter:
    """Choose all other settings for the network ``name``; ``part``: fraction of the usual number of steps."""
    patch, factor = _patch_size(size.value, machine, ae), ae["downsample_factor"] if ae else 1
    buckets, usual = _buckets(images, size.value, patch.value * factor)
    model_json = _model_json(name, size.value, patch.value, images, ae, diffusion)
    if usual[0] != usual[1]:
        model_json["predictor"]["latent_size"] = [side // factor for side in usual]
    if _has_blocks(machine, diffusion):
        model_json["predictor"] |= BLOCKS
        model_json["diffusion"] |= {} if ae else CLEAN_IMAGE
    learned = "; of pixels it learns the clean image (JiT)" if "logit_mean" in model_json["diffusion"] else ""
    model = model_config_from_mapping(model_json, "model.json")
    batch = _batch(images, machine)
    steps = _steps(images, machine, batch.value, part)
    placement = Placement(machine.ranks, precision=machine.precision)
    sharding = recommend(model, Request(placement, machine.num_bytes, batch.value // machine.ranks))
    design = {
        "ae": _autoencoder(ae),
        **({"text_encoder": Choice(images.text.name, images.text.reason)} if images.text else {}),
        "image_size": size,
        **buckets,
        "patch_size": patch,
        "network": _network(name, images, machine, diffusion),
        "diffusion": Choice(diffusion, DIFFUSIONS[diffusion].reason + learned),
        f"{'caption' if images.text else 'class'}_dropout_prob": _dropout(images),
        "random_flip": _flip(images),
        "valid_fraction": Choice(
            images.valid_fraction,
            f"{images.held_out:,} images to validate on{'' if images.text else ', the same fraction of each class'}"
            if images.held_out
            else f"nothing is held out of fewer than {MIN_HELD_OUT} images",
        ),
    }
    flags = {
        "--train-iters": steps,
        "--global-batch-size": batch,
        **_micro_batch(model, machine, sharding, batch.value, buckets),
        **_optimizer_flags(model, machine, steps.value, _has_blocks(machine, diffusion)),
        **_output_flags(images, steps.value, batch.value, DIFFUSIONS[diffusion].sampler),
        **precision_and_sharding(machine, sharding),
    }
    return Starter(model_json, model, sharding, design, flags)


def _autoencoder(ae: Mapping[str, Any] | None) -> Choice:
    if ae is None:
        return Choice("pixel", "no --vae is named, so the images themselves are learned, at a small size")
    return Choice(ae["model_id"], f"its latents are {ae['downsample_factor']} times smaller in height and width")


def _image_size(images: ImageFacts, machine: Machine, ae: Mapping[str, Any] | None, requested: int | None) -> Choice:
    side = f"the middle image's shorter side has {images.median_side} pixels"
    if requested is not None:
        return Choice(requested, f"as --image-size says; {side}")
    if ae is not None:
        if not machine.accelerators:
            return Choice(128, f"256 costs a CPU four times as much (--image-size 256); {side}")
        return Choice(256 if images.median_side >= 192 else 128, f"the published models have 256; {side}")
    most = PIXELS if machine.accelerators else CPU_PIXELS
    if images.median_side < most:
        return Choice(max(8, images.median_side // 4 * 4), side)
    return Choice(
        most, f"what {'an accelerator' if machine.accelerators else 'a CPU'} learns soon without --vae; {side}"
    )


def _buckets(images: ImageFacts, size: int, unit: int) -> tuple[dict[str, Choice], Shape]:
    """Return the bucket settings for ``size`` squared pixels ({} for square crops), and the most frequent shape."""
    if images.sizes is None:
        return {}, (size, size)
    cut = float((1 - images.sizes.min(1) / images.sizes.max(1)).mean())
    train, _ = split(images.count, images.valid_fraction, RUN_SEED)
    budget = Budget(size**2, unit)
    for group in GROUPS if cut > WORTH_BUCKETS else ():
        shapes = shapes_of(images.sizes, DatasetParam("images", buckets=budget, bucket_group=group))
        counts = count_shapes(shapes[train])
        fewest = min(count for _, count in counts)
        if group * GROUPS_OF_ALL <= images.count and (group == 1 or fewest >= 2 * group):
            choice = Choice(
                {"area": budget.area, "multiple_of": unit},
                f"images keep their shapes, here {format_sizes([shape for shape, _ in counts])}; squares would cut "
                f"{cut:.0%} off them",
            )
            usual = max(counts, key=lambda pair: pair[1])[0]
            return {
                "buckets": choice,
                "bucket_group": Choice(group, f"images of one shape in a row; the rarest shape has {fewest}"),
            }, usual
    return {}, (size, size)


def _patch_size(image_size: int, machine: Machine, ae: Mapping[str, Any] | None) -> Choice:
    factor, most = ae["downsample_factor"] if ae else 1, TOKENS if machine.accelerators else CPU_TOKENS
    fitting = [patch for patch in (2, 4, 8) if image_size % (factor * patch) == 0]
    if not fitting:
        raise ConfigError(
            f"--image-size = {image_size} is no multiple of {2 * factor}, so it cannot be cut into patches. Use "
            f"{max(1, round(image_size / (2 * factor))) * 2 * factor}."
        )
    tokens = {patch: (image_size // factor // patch) ** 2 for patch in fitting}
    patch = next((patch for patch in fitting if tokens[patch] <= most), fitting[-1])
    return Choice(patch, f"{tokens[patch]} tokens an image; smaller patches show more detail and cost much more")


def _model_json(
    name: str, image_size: int, patch: int, images: ImageFacts, ae: Mapping[str, Any] | None, diffusion: str
) -> dict[str, Any]:
    section: dict[str, Any] = {"model_id": "pixel", "channels": 1 if images.all_grey else 3} if ae is None else dict(ae)
    preset = f"{name}/{patch}"
    if preset in PRESETS:
        sizes: dict[str, Any] = {"preset": preset}
    else:
        sizes = {"patch_size": patch, **dict(zip(("num_layers", "hidden_size", "num_heads"), SMALL[name]))}
    if images.text:
        steered = images.text.predictor
    else:
        steered = {"num_classes": images.num_classes, "class_dropout_prob": _dropout(images).value}
    return {
        "ae": section,
        **({"text_encoder": images.text.section} if images.text else {}),
        "diffusion": {"model_id": diffusion, **DIFFUSIONS[diffusion].section},
        "predictor": {
            "model_id": "dit",
            "input_size": image_size // section.get("downsample_factor", 1),
            "in_channels": section["channels"] if ae is None else section["latent_channels"],
            **sizes,
            **steered,
            "learn_sigma": DIFFUSIONS[diffusion].learn_sigma,
        },
    }


def _has_blocks(machine: Machine, diffusion: str) -> bool:
    """Return whether to use BLOCKS: not on accelerators, which use published sizes, nor for diffusers' DiT."""
    return not machine.accelerators and diffusion == "flow_matching"


def _network(name: str, images: ImageFacts, machine: Machine, diffusion: str) -> Choice:
    if machine.accelerators:
        return Choice(name, f"the published size for {images.count:,} images that fits {machine.name}")
    blocks = ", with LightningDiT's blocks" if _has_blocks(machine, diffusion) else ""
    return Choice(
        name, f"the largest that {machine.cores} core(s) train in about {CPU_MINUTES} minutes (estimate){blocks}"
    )


def _dropout(images: ImageFacts) -> Choice:
    if images.text:
        return Choice(0.1, "captions left out, so that samples can be guided")
    if images.num_classes == 1:
        return Choice(0.0, "one class: there is nothing to guide towards")
    return Choice(0.1, "labels left out, as published, so that samples can be guided")


def _flip(images: ImageFacts) -> Choice:
    if images.text and images.text.mentions_sides:
        return Choice(False, "captions say left or right, which mirroring would make wrong")
    if images.all_grey:
        return Choice(False, "grey images are often letters, digits or scans, which mirroring spoils")
    return Choice(True, "twice the images; set it to false where left and right matter (letters, signs)")


def _batch(images: ImageFacts, machine: Machine) -> Choice:
    usual = 256 if images.count >= 50_000 else 64 if images.count >= 5_000 else 32
    training = images.count - images.held_out
    batch = min(max(usual, machine.ranks), training) // machine.ranks * machine.ranks
    if not batch:
        raise ConfigError(f"IMAGES has {training} images to train on, fewer than {machine.ranks} devices. Add more.")
    if batch != usual:
        return Choice(batch, f"there are {training} images to train on, and {machine.ranks} rank(s)")
    return Choice(batch, "as published" if usual == 256 else "few images: rather more steps than larger ones")


def _steps(images: ImageFacts, machine: Machine, batch: int, part: float) -> Choice:
    if machine.accelerators:
        samples = SAMPLES_AT[1] * (max(images.count, 100) / SAMPLES_AT[0]) ** SAMPLES_GROWTH
        usual_steps = samples / batch
    else:
        fewest, most = CPU_STEPS
        usual_steps = min(most, max(fewest, 100 * images.count / batch))
    if part < 1:
        steps = max(MIN_STEPS, _two_digits(usual_steps * part))
        return Choice(steps, f"what {machine.cores} core(s) compute in about {CPU_MINUTES} minutes")
    steps = _two_digits(usual_steps)
    times = max(1, round(steps * batch / images.count))
    return Choice(steps, f"each of {images.count:,} images some {times:,} times")


def _two_digits(number: float) -> int:
    scale = 10 ** (len(str(int(number))) - 2)
    return int(number // scale * scale)


def _micro_batch(
    model: ModelConfig, machine: Machine, sharding: Recommendation, batch: int, buckets: Mapping[str, Choice]
) -> dict[str, Choice]:
    size = sharding.micro_batch_size
    if size == batch and not machine.accelerators and not buckets:
        return {}  # the default is all images of a rank, which also suits MindSpore's two ranks on a CPU
    if buckets:  # (a micro-batch has images of one shape)
        size = math.gcd(size, buckets["bucket_group"].value)
    need = memory(model, sharding.placement).total(size) / GIB
    reason = f"by the plan {need:.1f} of the {machine.num_bytes / GIB:.0f} GiB of {machine.name}"
    return {"--micro-batch-size": Choice(size, reason)}


def _optimizer_flags(model: ModelConfig, machine: Machine, steps: int, with_muon: bool) -> dict[str, Choice]:
    width = model.predictor.hidden_size
    rate = {128: 4e-3, 256: 2e-3}.get(width, 1e-3) if with_muon else {128: 3e-3, 256: 1e-3}.get(width, 5e-4)
    decays = ((0.9999, 100_000), (0.999, 10_000), (0.995, 2_000), (0.99, 1_000), (0.98, 0))
    decay = next(decay for decay, least in decays if steps >= least)
    second = {} if machine.accelerators else {"--adam-beta2": Choice(0.95, "as LightningDiT; forgets sooner")}
    if with_muon:
        second["--optimizer"] = Choice("muon", "shapes come in about half of AdamW's steps, each a half longer")
    return {
        "--lr": Choice(1e-4, "as published")
        if machine.accelerators
        else Choice(rate, "a small network and a short run take more than the published 1e-4"),
        **second,
        "--lr-decay-style": Choice("constant", "as published; the run can be prolonged")
        if machine.accelerators
        else Choice("cosine", "down to 0 at the end"),
        "--weight-decay": Choice(0, "as published"),
        "--ema-decay": Choice(decay, f"samples are drawn from an average over some {1 / (1 - decay):,.0f} steps"),
    }


def _output_flags(images: ImageFacts, steps: int, batch: int, sampler: str) -> dict[str, Choice]:
    """Return the flags for logging, validation, checkpoints and the report."""
    flags = {"--log-interval": Choice(min(100, steps // 50))}
    if images.held_out:
        flags["--eval-interval"] = Choice(steps // 10, "on the images held out")
        flags["--eval-iters"] = Choice(min(8, max(1, images.held_out // batch)), "batches of them")
    scale = 3 if images.text else 2
    guidance = Choice(1, "none: there is one class") if images.num_classes == 1 else Choice(scale, "of the samples")
    return {
        **flags,
        "--save-interval": Choice(steps // 5),
        "--report": Choice(None, "samples.png and loss.png at the end"),
        "--report-sampler": Choice(sampler),
        "--report-steps": Choice(25),
        "--report-cfg-scale": guidance,
    }


def precision_and_sharding(machine: Machine, sharding: Recommendation) -> dict[str, Choice]:
    """Return the flags for bfloat16 and for fsdp2.yaml, where they are needed."""
    flags = {}
    if machine.precision.compute == "bf16":
        flags["--bf16"] = Choice(None, "twice the rate or more; the weights stay float32")
    if sharding.placement.offloaded:
        flags["--use-torch-fsdp2"] = Choice(None, f"as fsdp2.yaml says: {sharding.reasons['offload_to_cpu']}")
    elif machine.precision.mode == "fsdp2" or sharding.placement.recompute:
        flags["--use-torch-fsdp2"] = Choice(None, "as fsdp2.yaml says")
    return flags
