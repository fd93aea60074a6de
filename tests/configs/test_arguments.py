from __future__ import annotations

import json
import re
import shlex

import pytest

from mindspeed_mm_dit.cli import train
from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import main, parser_of
from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.autoencoder_of_images import AutoencoderKLConfig
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.synonyms import SYNONYMS, synonym
from mindspeed_mm_dit.configs.text_encoder import T5Config
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.flags import parse as parse_flags
from mindspeed_mm_dit.training.flags import whole_parser
from tests.conftest import ROOT, run_config

NEEDED = "--mm-model m.json --mm-data d.json --micro-batch-size 4 --train-iters 10 --lr 1e-4 "


def parse(flags: str, world_size: int = 1, needed: str = NEEDED):
    return checked(parse_flags(shlex.split(needed + flags)), world_size)


def test_the_flags_of_tutorial_scripts_are_accepted():
    args = parse("--no-gradient-accumulation-fusion --untie-embeddings-and-output-weights --use-torch-fsdp2 "
                 "--ckpt-format torch_dcp --distributed-backend gloo --mm-tool t.json --min-lr 1e-5 "
                 "--tensor-model-parallel-size 1 --ai-framework pytorch")  # fmt: skip
    assert args.use_torch_fsdp2 and args.min_lr == 1e-5


def test_the_global_batch_defaults_to_one_micro_batch_on_every_rank():
    assert parse("", world_size=3).global_batch_size == 12


def test_the_micro_batch_defaults_to_the_images_of_a_rank():
    without = NEEDED.replace("--micro-batch-size 4", "")
    assert parse("--global-batch-size 64", 8, without).micro_batch_size == 8
    with pytest.raises(ConfigError, match="64: is not divisible by the 6 ranks"):
        parse("--global-batch-size 64", 6, without)
    with pytest.raises(ConfigError, match="--micro-batch-size or --global-batch-size: is required"):
        parse("", 1, without)


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--global-batch-size 12", 2, "micro-batch-size(4) * ranks(2) = 8"),
        ("--lr-warmup-itres 3", 1, "Did you mean '--lr-warmup-iters'"),
        ("--min-lr 1", 1, "must lie between 0 and --lr"),
        ("--lr-warmup-iters 10", 1, "must be smaller than the steps of decay (10)"),
        ("--lr-warmup-iters 10", 1, "Cure: set --lr-warmup-iters below 10, raise --train-iters"),
        ("--lr-warmup-iters 10 --lr-decay-iters 5", 1, "below 5, raise --lr-decay-iters"),
        ("--report-cfg-scale nan", 1, "'nan' is not a number"),
        ("--tensor-model-parallel-size 2", 1, "invalid choice"),
        ("--context-parallel-size 2", 1, "--context-parallel-size = 2: does not divide the 1 ranks"),
    ],
)
def test_a_wrong_flag_is_named_with_its_reason(flags, world_size, message):
    with pytest.raises(ConfigError) as caught:
        parse(flags, world_size)
    assert message in str(caught.value)


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
def test_a_flag_of_another_trainer_is_translated(word, meant):
    with pytest.raises(ConfigError) as caught:
        parse(f"--{word} 1")
    assert re.search(rf"Did you mean [^?]*\b{meant}\b", caught.value.cure)


@pytest.mark.parametrize(
    ("command", "word", "meant"),
    [
        ("sample", "num_inference_steps", "--steps"),
        ("sample", "guidance_scale", "--cfg-scale"),
        ("sample", "height", "--size"),
        ("sample", "output_dir", "--output"),
        ("init", "resolution", "--image-size"),
        ("evaluate", "num-samples", "--num"),
        ("plan", "devices", "--world-size"),
        ("plan", "rank", "--lora-r"),
    ],
)
def test_a_synonym_is_a_flag_of_its_own_command(command, word, meant):
    assert f"{meant!r}" in synonym(f"--{word}", parser_of(command)._option_string_actions)


def test_a_flag_before_the_config_is_told_its_place(capsys):
    assert main(["train", "--lr", "1e-3", "digits"]) == main(["train", "--config", "digits"]) == 2
    assert capsys.readouterr().err.count("mm-dit train CONFIG FLAGS") == 2


def test_every_unknown_flag_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse("--rank 4 --epochs=3 --lr_mult -1")
    assert caught.value.what == "--rank, --epochs, --lr_mult"
    assert "'--lora-r'" in caught.value.cure and "'--train-iters'" in caught.value.cure


SECTIONS = {
    "dataset_param": DatasetParam, "ae": AutoencoderKLConfig, "predictor": DiTConfig, "diffusion": FlowMatchingConfig,
    "text_encoder": T5Config, "fsdp2.yaml": Fsdp2Config,
}  # fmt: skip


def test_every_target_of_a_synonym_exists():
    parsers = [whole_parser(), *map(parser_of, COMMANDS)]
    flags = {flag for parser in parsers for flag in parser._option_string_actions}
    for target in SYNONYMS:
        names = re.findall(r"--[a-z0-9-]+", target)
        keys = re.findall(r"([a-z_]+)\.((?!json|yaml)\w+)", target)
        keys += [(file, key) for key, file in re.findall(r"(\w+) of (fsdp2\.yaml)", target)]
        variables = re.findall("variable ([A-Z_]+)", target)
        assert names or keys or variables, target
        assert flags.issuperset(names) and all(key in SECTIONS[section].__dataclass_fields__ for section, key in keys)
        assert all(name in train.DESCRIPTION for name in variables)


def test_help_tells_megatrons_flags_from_our_own():
    parser = whole_parser()
    text = " ".join(parser.format_help().split())
    assert "the last one, DiT, is this project's own" in text and parser._action_groups[-1].title == "DiT"


@pytest.mark.parametrize("folder", ["", "imagenet256", "imagenet512", "cat_dog"])
def test_every_shipped_train_args_and_data_json_is_read(folder):
    lines = (ROOT / "examples/dit" / folder / "train.args").read_text().splitlines()
    flags = " ".join(line.partition("#")[0] for line in lines)
    args = parse(flags, 8, NEEDED if folder else NEEDED.replace("--micro-batch-size 4", ""))
    assert args.save == args.load
    assert load_data_config(ROOT / "examples/dit" / folder / "data.json").dataset_param.image_size


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"source": "mnist"},
            "is none of the built-in images\n    Cure: Known here: digits, captioned_digits, inverted_digits, ",
        ),
        ({"image_size": 0}, "dataset_param.image_size = 0: must be positive"),
        ({"valid_fraction": float("nan")}, "valid_fraction = nan: expected a number"),
        ({"valid_fraction": 1}, "must lie in [0, 1)"),
    ],
)
def test_a_wrong_setting_of_data_json_is_named(tmp_path, section, message):
    content = {"dataset_param": {"data_folder": "d", "image_size": 8, **section}}
    (tmp_path / "data.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        load_data_config(tmp_path / "data.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("word", ["\u2013lr", "\u2014lr=1", "\u2212\u2212lr", "--lr\u00a01e-3", "--lr\u202f=1", "-lr"])
def test_a_flag_that_was_typeset_is_named_as_it_is_written(word):
    with pytest.raises(ConfigError, match=r"is not how a flag is written: .*\n.*write --lr, and an ordinary space"):
        parse_flags(["--train-iters", "3", word, "1"])


def test_a_width_that_is_listed_twice_is_named():
    args = run_config(global_batch_size=8, train_iters=2, lr=1e-3, power_ema_stds=(0.05, 0.05))
    with pytest.raises(ConfigError, match=r"--power-ema-stds = 0\.05 0\.05: lists a width twice"):
        checked(args, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"--lr 1e-3 # a comment\r\n--report\r\n", ["--lr", "1e-3", "--report"]),
        (b"--save runs/a#1 #--load b\n", ["--save", "runs/a#1"]),
        (b"--save 'my runs # 2' \"c#\"d\n", ["--save", "my runs # 2", "c#d"]),
        (b"\xef\xbb\xbf--report\n\n   # nothing\n", ["--report"]),
        (
            b"--lr 1 \\\r\n --seed 2 \\ \n# all \\\n--save 'a b'\\\n--exp c\\\\\n\\\n",
            ["--lr", "1", "--seed", "2", "--save", "a b", "--exp", "c\\"],
        ),
    ],
)
def test_train_args_are_the_words_of_a_shell(tmp_path, content, words):
    (tmp_path / "train.args").write_bytes(content)
    assert read_train_args(tmp_path / "train.args") == words


def test_train_args_are_a_text_of_some_lines(tmp_path):
    (tmp_path / "train.args").write_bytes(b"--lr 1\n--seed\0 2\n")
    with pytest.raises(ConfigError, match=r"train\.args, line 2: contains a NUL byte"):
        read_train_args(tmp_path / "train.args")
    (tmp_path / "train.args").write_bytes(b"\0" * (2 << 20))
    with pytest.raises(ConfigError, match=r"is no config file: it has 2\.0 MiB"):
        read_train_args(tmp_path / "train.args")
