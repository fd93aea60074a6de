"""What is chosen for a first run, by the images and by the machine."""

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.source import Budget
from mindspeed_mm_dit.data.buckets import count_shapes, shapes_of
from mindspeed_mm_dit.data.order import split
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.planning.facts import ImageFacts, Machine, text_for
from mindspeed_mm_dit.tools.planning.starter import RUN_SEED, choose

PETS = ImageFacts(count=400, num_classes=2, median_side=480, all_grey=False)
IMAGENET = ImageFacts(count=1_281_167, num_classes=1000, median_side=375, all_grey=False)
VAE = {"model_id": "autoencoder_kl", "from_pretrained": "vae", "scaling_factor": 0.18215, "latent_channels": 4}
VAE["downsample_factor"] = 8


def cpu(cores=2, gib=16):
    return Machine("this machine", gib * 2**30, 0, cores, has_bf16=True)


def gpus(number=1, gib=24, has_bf16=True):
    return Machine("a device", gib * 2**30, number, 16, has_bf16)


def sizes(starter):
    predictor = starter.model.predictor
    return predictor.num_layers, predictor.hidden_size, predictor.patch_size


def test_network_on_a_cpu_trains_in_20_minutes():
    for cores, expected, rates in (
        (2, (4, 128, 4), [4e-3, 3e-3]), (8, (6, 256, 4), [2e-3, 1e-3]), (48, (12, 384, 4), [1e-3, 5e-4]),
    ):  # fmt: skip
        starter, gaussian = choose(PETS, cpu(cores)), choose(PETS, cpu(cores), diffusion="gaussian_diffusion")
        assert [each.flags["--lr"].value for each in (starter, gaussian)] == rates
        assert sizes(starter) == expected and starter.model.sample_size[-1] == 32
        assert starter.flop <= 20 * 60 * cores * 2e10
        assert starter.flags["--train-iters"].value == 2_800 and "--bf16" not in starter.flags
    for cores in (2, 4, 24):  # fewer images get no larger network
        networks = [sizes(choose(ImageFacts(count, 1, 480, False), cpu(cores))) for count in (1, 3, 20, 58, 500, 5_000)]
        assert len(set(networks)) == 1


@pytest.mark.parametrize("rare", [2, 4, 8, 9, 16, 17])
def test_run_goes_on_without_any_one_image_of_a_bucket(rare):
    """The rarest shape may hold exactly a group, and what is held out depends on the number of images."""
    shape = np.array([(32, 48)] * (58 - rare) + [(48, 32)] * rare)
    starter = choose(ImageFacts(58, 1, 32, False, sizes=shape), cpu())
    group, budget = starter.design["bucket_group"].value, Budget(**starter.design["buckets"].value)
    for left_out in range(58):
        left = np.delete(shape, left_out, 0)
        shapes = shapes_of(left, DatasetParam("images", buckets=budget, bucket_group=group))
        train, _ = split(len(left), starter.design["valid_fraction"].value, RUN_SEED)
        assert min(count for _, count in count_shapes(shapes[train])) >= group


def test_lengths_follow_from_the_images_and_the_machine():
    for count, steps in ((60, 2_800), (1_020, 3_100), (1_500, 4_000)):
        assert choose(ImageFacts(count, 2, 480, False), cpu(4)).flags["--train-iters"].value == steps
    starter = choose(ImageFacts(20_000, 2, 480, False), cpu(1))  # where the smallest network takes longer
    assert sizes(starter) == (4, 128, 4) and 500 <= starter.flags["--train-iters"].value < 4_000
    assert starter.flop <= 20 * 60 * 2e10
    few, many = choose(PETS, gpus(), VAE), choose(IMAGENET, gpus(8, 80), VAE)  # as of the example and of the paper
    assert few.flags["--train-iters"].value == 20_000 and few.flags["--global-batch-size"].value == 32
    assert many.flags["--train-iters"].value == 400_000 and many.flags["--global-batch-size"].value == 256


def test_network_on_accelerators_follows_from_images_and_memory():
    middle, eight = ImageFacts(100_000, 9, 300, False), gpus(8, 80)
    rows = ((PETS, gpus(), "S"), (IMAGENET, eight, "XL"), (IMAGENET, gpus(8, 2), "L"), (middle, eight, "L"))
    for images, machine, network in rows:
        starter = choose(images, machine, VAE)
        assert starter.design["network"].value == f"DiT-{network}" and starter.model.sample_size[-1] == 256
        assert starter.model_json["predictor"]["preset"] == f"DiT-{network}/2"
        assert ("--use-torch-fsdp2" in starter.flags) == (machine.accelerators > 1) and "--bf16" in starter.flags


@pytest.mark.parametrize(("side", "machine", "ae", "size", "patch"), [
    (3, cpu(), None, 8, 2), (8, cpu(), None, 8, 2), (28, cpu(), None, 28, 4), (480, cpu(), None, 32, 4),
    (28, gpus(), None, 28, 2), (480, gpus(), None, 64, 4),
    (480, cpu(), VAE, 128, 2), (160, gpus(), VAE, 128, 2), (192, gpus(), VAE, 256, 2),
])  # fmt: skip
def test_sizes_and_patches_follow_from_the_images(side, machine, ae, size, patch):
    starter = choose(ImageFacts(400, 2, side, False), machine, ae)
    assert (starter.model.sample_size[-1], starter.model.predictor.patch_size) == (size, patch)


def test_one_class_has_no_guidance_and_grey_images_no_flips():
    starter = choose(ImageFacts(60, 1, 28, all_grey=True), cpu())
    assert not starter.model.predictor.conditions.has_unconditional and starter.flags["--report-cfg-scale"].value == 1
    assert starter.model.ae.channels == 1 and starter.design["random_flip"].value is False


def test_batch_and_held_out_images_follow_from_the_count():
    rows = ((1, 1, 0), (20, 20, 0), (49, 32, 0), (50, 32, 5), (5_000, 64, 500), (50_000, 256, 2_000))
    for count, batch, held_out in rows:
        images = ImageFacts(count, 1, 64, False)
        starter = choose(images, cpu())
        assert starter.flags["--global-batch-size"].value == batch and images.held_out == held_out
        assert ("--eval-interval" in starter.flags) == (held_out > 0)


def test_batches_are_shared_equally_and_accumulated():
    starter = choose(PETS, gpus(6, 24), VAE)
    batch, micro = (starter.flags[flag].value for flag in ("--global-batch-size", "--micro-batch-size"))
    assert batch == 30 and batch % (6 * micro) == 0
    assert choose(PETS, gpus(64), VAE).flags["--global-batch-size"].value == 64  # (one each, though 32 are usual)
    assert choose(IMAGENET, gpus(8, 12), VAE).flags["--micro-batch-size"].value < 32
    assert choose(PETS, gpus(has_bf16=False), VAE).sharding.placement.precision.compute == "fp32"


@pytest.mark.parametrize(("message", "arguments"), [
    ("--image-size = 33", (PETS, cpu(), None, 33)),
    ("--image-size = 100", (PETS, gpus(), VAE, 100)),
    ("3 images.* 4 devices", (ImageFacts(3, 1, 64, False), gpus(4))),
    ("360 images.* 380 devices", (PETS, gpus(380))),
    ("--device-memory-gib = 0.1", (PETS, gpus(1, 0.1), VAE)),
])  # fmt: skip
def test_images_and_machines_that_do_not_go_together_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        choose(*arguments)


@pytest.mark.parametrize(("count", "steps", "decay", "given"), [
    (140_000, 100_000, 0.9999, (gpus(8, 80), VAE)),
    (134, 10_000, 0.999, (gpus(),)),
    (60, 8_300, 0.995, (gpus(),)),
    (4_000, 2_000, 0.995, (cpu(1), None, 64, "gaussian_diffusion")),
    (20_000, 1_000, 0.99, (cpu(1), None, 64, "gaussian_diffusion")),
    (50_000, 500, 0.98, (cpu(1), None, 128, "gaussian_diffusion")),
])  # fmt: skip
def test_average_spans_less_than_a_fifth_of_the_run(count, given, steps, decay):
    flags = choose(ImageFacts(count, 2, 480, False), *given).flags
    assert (flags["--train-iters"].value, flags["--ema-decay"].value) == (steps, decay)


def of_shapes(shapes, **facts):
    """Images of which so many have each shape."""
    sizes = np.repeat([*shapes], [*shapes.values()], 0)
    side = int(np.median(sizes.min(1)))
    return ImageFacts(len(sizes), facts.pop("num_classes", 2), side, all_grey=False, sizes=sizes, **facts)


def test_shapes_that_squares_would_cut_get_buckets():
    for group, shapes in (
        (4, {(300, 400): 32, (400, 300): 8}),
        (8, {(300, 400): 300, (400, 300): 33}),  # (of which some are held out)
        (4, {(300, 400): 39}),
    ):
        assert choose(of_shapes(shapes), cpu()).design["bucket_group"].value == group
    assert not {"bucket_group", "buckets"} & set(choose(of_shapes({(300, 330): 400}), cpu()).design)


PHOTOGRAPHS = of_shapes(
    {(480, 640): 717, (640, 480): 250, (400, 400): 33}, num_classes=0, text=text_for([["a dog on the left"]], "words")
)
BEGINNINGS = {
    "400 images of two classes on a CPU": (PETS, cpu()),
    "the same with an autoencoder": (PETS, cpu(), VAE),
    "the same on an accelerator": (PETS, gpus()),
    "40 grey images of one class on a CPU": (ImageFacts(40, 1, 28, all_grey=True), cpu()),
    "6,000 images on two accelerators without bf16, gaussian": (
        ImageFacts(6_000, 10, 300, all_grey=False), gpus(2, 40, has_bf16=False), VAE, None, "gaussian_diffusion",
    ),
    "ImageNet on eight accelerators": (IMAGENET, gpus(8, 80), VAE),
    "1,000 captioned photographs of three shapes on a CPU": (PHOTOGRAPHS, cpu()),
    "the same with an autoencoder, on an accelerator": (PHOTOGRAPHS, gpus(1, 4), VAE),
    "4,000 images of 1,024 pixels on one core, gaussian": (
        ImageFacts(4_000, 2, 1_200, all_grey=False), cpu(1), VAE, 1_024, "gaussian_diffusion",
    ),
}  # fmt: skip


def described(starter):
    """Every choice with its reason, and model.json."""
    choices = {**starter.design, **starter.flags}
    lines = [f"{name} = {choice.value}: {choice.reason}" for name, choice in choices.items()]
    return [*lines, f"model.json = {json.dumps(starter.model_json)}"]


def test_choices_of_nine_beginnings_are_the_recorded_ones():
    """A change here is seen by whoever runs ``mm-dit init``: look at it, then write it into beginnings.json."""
    agreed = json.loads(Path(__file__).with_name("beginnings.json").read_text())
    assert {name: described(choose(*given)) for name, given in BEGINNINGS.items()} == agreed
