"""Flags and settings: both sides of every bound, words of other trainers, and what is refused by name."""

import dataclasses
import json
import re
import shlex

import pytest

from mindspeed_mm_dit.cli import train
from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import command_parser, main
from mindspeed_mm_dit.configs.arguments import checked, read_train_args
from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig, PixelConfig
from mindspeed_mm_dit.configs.data import DataloaderParam, load_data_config
from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig, GaussianDiffusionConfig
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.flag import SYNONYMS, synonym
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.text_encoder import T5Config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.gaussian.objective import Clip
from mindspeed_mm_dit.sampling.request import SampleRequest
from mindspeed_mm_dit.training.flags import full_parser
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


def parse(flags: str, world_size: int = 1, needed: str = NEEDED):
    return checked(parse_flags(shlex.split(needed + flags)), world_size)


@pytest.mark.parametrize(("flag", "allowed", "refused"), FLAGS, ids=[flag for flag, *_ in FLAGS])
def test_a_flag_is_accepted_up_to_its_bound_and_refused_beyond(flag, allowed, refused):
    for value in allowed:
        assert parse(f"{flag} {value}").flags()[flag[2:].replace("-", "_")] == float(value)
    for value in refused:
        pytest.raises(ConfigError, parse, f"{flag}={value}").match(flag)
    assert parse("--lr-decay-style constant --lr-warmup-iters 10").lr_warmup_iters == 10


def test_batches_default_to_one_micro_batch_on_every_rank():
    assert parse("", world_size=3).global_batch_size == 12
    without = NEEDED.replace("--micro-batch-size 4", "")
    assert parse("--global-batch-size 64", 8, without).micro_batch_size == 8
    pytest.raises(ConfigError, parse, "--global-batch-size 64", 6, without).match("64.* 6 ranks")
    pytest.raises(ConfigError, parse, "", 1, without).match("--micro-batch-size or --global-batch-size")


@pytest.mark.parametrize(("flags", "world_size", "message"), [
    ("--global-batch-size 12", 2, r"micro-batch-size\(4\) \* ranks\(2\) = 8"),
    ("--lr-warmup-itres 3", 1, "'--lr-warmup-iters'"),
    ("--lr-warmup-iters 10", 1, "below 10.* --train-iters"),
    ("--lr-warmup-iters 10 --lr-decay-iters 5", 1, "below 5.* --lr-decay-iters"),
    ("--tensor-model-parallel-size 2", 1, "--tensor-model-parallel-size"),
    ("--context-parallel-size 2", 1, "--context-parallel-size = 2"),
    ("--power-ema-stds 0.05 0.05", 1, "--power-ema-stds = 0.05 0.05"),
])  # fmt: skip
def test_wrong_flag_is_refused(flags, world_size, message):
    pytest.raises(ConfigError, parse, flags, world_size).match(f"(?s){message}")


WORDS_OF_OTHERS = """
resume=load resume_from_checkpoint=load rank=lora-r network_dim=lora-r network-alpha=lora-alpha learning-rate=lr
learning_rate=lr mixed-precision=bf16 fp16=bf16 epochs=train-iters num_train_epochs=train-iters
max_train_steps=train-iters batch_size=micro-batch-size train-batch-size=global-batch-size seed_everything=seed
lr_scheduler=lr-decay-style LR_warmup_steps=lr-warmup-iters max_grad_norm=clip-grad checkpointing_steps=save-interval
output_dir=save pretrained_model_name_or_path=init-from report_to=tensorboard-dir
gradient_accumulation_steps=global-batch-size adam_weight_decay=weight-decay dataloader_num_workers=num-workers
train_iters=train-iters resolution=image_size train_data_dir=data_folder gradient_checkpointing=recompute_modules
num-layers=num_layers cache_latents=latents
"""


@pytest.mark.parametrize(("word", "meant"), [row.split("=") for row in WORDS_OF_OTHERS.split()])
def test_flag_of_another_trainer_is_translated(word, meant):
    pytest.raises(ConfigError, parse, f"--{word} 1").match(rf"(?s)Did you mean [^?]*\b{meant}\b")


@pytest.mark.parametrize(("command", "word", "meant"), [
    ("sample", "num_inference_steps", "--steps"), ("sample", "guidance_scale", "--cfg-scale"),
    ("sample", "height", "--size"), ("sample", "output_dir", "--output"), ("init", "resolution", "--image-size"),
    ("evaluate", "num-samples", "--num"), ("plan", "devices", "--world-size"), ("plan", "rank", "--lora-r"),
])  # fmt: skip
def test_synonym_is_a_flag_of_its_own_command(command, word, meant):
    assert f"{meant!r}" in synonym(f"--{word}", command_parser(command)._option_string_actions)


def test_flag_before_the_config_is_told_its_place(capsys):
    assert main(["train", "--lr", "1e-3", "digits"]) == main(["train", "--config", "digits"]) == 2
    assert capsys.readouterr().err.count("mm-dit train CONFIG FLAGS") == 2


def test_unknown_and_typeset_flags_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("--rank 4 --epochs=3 --lr_mult -1")
    assert "--rank, --epochs, --lr_mult" in str(caught.value)
    assert "'--lora-r'" in str(caught.value) and "'--train-iters'" in str(caught.value)
    for word in ("\u2013lr", "\u2014lr=1", "\u2212\u2212lr", "--lr\u00a01e-3", "--lr\u202f=1", "-lr"):
        pytest.raises(ConfigError, parse_flags, ["--train-iters", "3", word, "1"]).match("(?s)dashes.*--lr")


SECTIONS = {
    "dataset_param": DatasetParam, "ae": AutoencoderKLConfig, "predictor": DiTConfig, "diffusion": FlowMatchingConfig,
    "text_encoder": T5Config, "fsdp2.yaml": Fsdp2Config,
}  # fmt: skip


def test_every_target_of_a_synonym_exists():
    parsers = [full_parser(), *map(command_parser, COMMANDS)]
    flags = {flag for parser in parsers for flag in parser._option_string_actions}
    for target in SYNONYMS:
        names = re.findall(r"--[a-z0-9-]+", target)
        keys = re.findall(r"([a-z_]+)\.((?!json|yaml)\w+)", target)
        keys += [(file, key) for key, file in re.findall(r"(\w+) of (fsdp2\.yaml)", target)]
        variables = re.findall("variable ([A-Z_]+)", target)
        assert names or keys or variables, target
        assert flags.issuperset(names) and all(key in SECTIONS[section].__dataclass_fields__ for section, key in keys)
        assert all(name in train.DESCRIPTION for name in variables)


def test_unknown_data_set_of_data_json_is_refused(tmp_path):
    content = {"dataset_param": {"data_folder": "d", "image_size": 8, "source": "mnist"}}
    (tmp_path / "data.json").write_text(json.dumps(content))
    pytest.raises(ConfigError, load_data_config, tmp_path / "data.json").match("mnist")


def test_train_args_are_the_words_of_a_shell(tmp_path):
    for content, words in (
        (b"--lr 1e-3 # a comment\r\n--report\r\n", ["--lr", "1e-3", "--report"]),
        (b"--save runs/a#1 #--load b\n", ["--save", "runs/a#1"]),
        (b"--save 'my runs # 2' \"c#\"d\n", ["--save", "my runs # 2", "c#d"]),
        (b"\xef\xbb\xbf--report\n\n   # nothing\n", ["--report"]),
        (b"--lr 1 \\\r\n --seed 2 \\ \n# all \\\n--save 'a b'\\\n--exp c\\\\\n\\\n",
         ["--lr", "1", "--seed", "2", "--save", "a b", "--exp", "c\\"]),
    ):  # fmt: skip
        (tmp_path / "train.args").write_bytes(content)
        assert read_train_args(tmp_path / "train.args") == words
    for content, message in ((b"--lr 1\n--seed\0 2\n", "train.args, line 2"), (b"\0" * (2 << 20), "2.0 MiB")):
        (tmp_path / "train.args").write_bytes(content)
        pytest.raises(ConfigError, read_train_args, tmp_path / "train.args").match(message)


@pytest.mark.parametrize(
    "words, message",
    [
        ("sample", "mm-dit sample needs --checkpoint and --output"),
        ("ema", "mm-dit ema needs --checkpoint, --std and --output"),
        ("train", "mm-dit train needs CONFIG"),
        ("sample --checkpoint", "--checkpoint needs a value"),
        ("sample --checkpoint a --output b --base-dtype q4", "--base-dtype = 'q4' is none of nf4, int8, fp8, bf16"),
        ("sample --checkpoint a --output b --steps x", "--steps must be a whole number, not 'x'"),
        ("sample --checkpoint a --output b --cfg-scale x", "--cfg-scale must be a number, not 'x'"),
    ],
)
def test_what_argparse_refuses_is_a_sentence(words, message, capsys):
    assert main(words.split()) == 2
    assert f"ConfigError: {message}. " in capsys.readouterr().err
