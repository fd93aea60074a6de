"""Both sides of every bound: the last value that is allowed is accepted, the first beyond it is refused by name."""

import dataclasses
import shlex

import pytest

from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig, PixelConfig
from mindspeed_mm_dit.configs.data import DataloaderParam
from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.gaussian.objective import Clip
from mindspeed_mm_dit.sampling.request import SampleRequest
from mindspeed_mm_dit.training.flags import parse as parse_flags

DIT = DiTConfig(input_size=8, num_classes=10, hidden_size=8, num_layers=1, num_heads=2)
DATASET = DatasetParam(data_folder="images", image_size=8)
VAE = AutoencoderKLConfig(from_pretrained="vae")
TINY, NEARLY_ONE = 1e-300, 1 - 2**-53

BOUNDS = [
    (DIT, "input_size", [2], [0, 1]),  # a patch is 2 wide
    (DIT, "num_classes", [1], [0]), (DIT, "in_channels", [1], [0]), (DIT, "patch_size", [1, 8], [0, 16]),
    (DIT, "hidden_size", [4], [0, 2, 6]), (DIT, "num_layers", [1], [0]), (DIT, "num_heads", [1, 8], [0, 16]),
    (DIT, "mlp_ratio", [0.125], [0.124]),  # of a width of 8
    (DIT, "class_dropout_prob", [0.0, NEARLY_ONE], [-TINY, 1.0]),
    (GaussianDiffusionConfig(), "num_train_timesteps", [21], [1, 2, 20]),
    (GaussianDiffusionConfig(noise_schedule="squaredcos_cap_v2"), "num_train_timesteps", [2], [1]),
    (PixelConfig(), "channels", [1, 3], [0, 2, 4]),
    (VAE, "latent_channels", [1], [0]), (VAE, "downsample_factor", [1], [0]),
    (VAE, "scaling_factor", [1e-6, -1e6], [0.0, 9e-7, 1.1e6]),
    (DATASET, "image_size", [1], [0]), (DATASET, "valid_fraction", [0.0, NEARLY_ONE], [-TINY, 1.0, float("nan")]),
    (DataloaderParam(), "prefetch_batches", [1], [0]),
    (SampleRequest(), "seed", [0, 2**63 - 1], [-1, 2**63]),
    (Clip(), "clip", [TINY, 1e300], [0.0, -1.0, float("inf"), float("nan")]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "name", "allowed", "refused"), BOUNDS, ids=[name for _, name, *_ in BOUNDS])
def test_a_setting_is_accepted_up_to_its_bound_and_refused_beyond(config, name, allowed, refused):
    for value in allowed:
        assert getattr(dataclasses.replace(config, **{name: value}), name) == value
    for value in refused:
        pytest.raises(ConfigError, dataclasses.replace, config, **{name: value}).match(f" = {value}")


NEEDED = "--mm-model m.json --mm-data d.json --micro-batch-size 4 --train-iters 10 --lr 1e-3 "

FLAGS = [
    ("--train-iters", ["1"], ["0"]), ("--micro-batch-size", ["1"], ["0"]), ("--seed", ["0"], ["-1"]),
    ("--global-batch-size", ["4", "8"], ["0", "2", "6"]), ("--num-workers", ["0"], ["-1"]),
    ("--lr", ["1e-38"], ["0", "1e-39", "-1", "nan", "inf"]),
    ("--min-lr", ["0", "1e-3"], ["-1e-9", "1.0001e-3", "nan"]),
    ("--lr-warmup-init", ["0", "1e-3"], ["-1e-9", "1.0001e-3", "nan"]),
    ("--lr-warmup-iters", ["0", "9"], ["-1", "10"]), ("--lr-decay-iters", ["1"], ["0"]),
    ("--adam-beta1", ["0", "0.9999999"], ["-1e-9", "1", "nan"]),
    ("--adam-beta2", ["0", "0.9999999"], ["-1e-9", "1", "nan"]),
    ("--adam-eps", ["1e-38"], ["0", "1e-39"]), ("--weight-decay", ["0"], ["-1e-9", "inf", "nan"]),
    ("--clip-grad", ["0"], ["-1e-9", "inf", "nan"]), ("--ema-decay", ["0", "0.9999999"], ["-1e-9", "1"]),
    ("--save-interval", ["1"], ["0"]), ("--eval-interval", ["1"], ["0"]), ("--eval-iters", ["0"], ["-1"]),
    ("--log-interval", ["1"], ["0"]), ("--keep-last", ["1"], ["0"]), ("--report-steps", ["1"], ["0"]),
    ("--peak-tflops", ["1e-3"], ["0"]),
]  # fmt: skip


def parse(flags):
    return checked(parse_flags(shlex.split(NEEDED + flags)), world_size=1)


@pytest.mark.parametrize(("flag", "allowed", "refused"), FLAGS, ids=[flag for flag, *_ in FLAGS])
def test_a_flag_is_accepted_up_to_its_bound_and_refused_beyond(flag, allowed, refused):
    for value in allowed:
        assert parse(f"{flag} {value}").flags()[flag[2:].replace("-", "_")] == float(value)
    for value in refused:
        pytest.raises(ConfigError, parse, f"{flag}={value}").match(flag)
    assert parse("--lr-decay-style constant --lr-warmup-iters 10").lr_warmup_iters == 10
