from __future__ import annotations

import json
import shlex

import pytest

from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.training.flags import parse as parse_flags

NEEDED = "--mm-model m.json --mm-data d.json --micro-batch-size 4 --train-iters 10 --lr 1e-4 "


def parse(flags: str, world_size: int = 1, needed: str = NEEDED):
    return checked(parse_flags(shlex.split(needed + flags)), world_size)


def test_batches_default_to_one_micro_batch_on_every_rank():
    assert parse("", world_size=3).global_batch_size == 12
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
        ("--lr-warmup-itres 3", 1, "'--lr-warmup-iters'"),
        ("--min-lr 1", 1, "--min-lr"),
        ("--lr-warmup-iters 10", 1, "below 10, raise --train-iters"),
        ("--lr-warmup-iters 10 --lr-decay-iters 5", 1, "below 5, raise --lr-decay-iters"),
        ("--report-cfg-scale nan", 1, "'nan' is not a number"),
        ("--tensor-model-parallel-size 2", 1, "--tensor-model-parallel-size"),
        ("--context-parallel-size 2", 1, "--context-parallel-size = 2: does not divide the 1 ranks"),
        ("--power-ema-stds 0.05 0.05", 1, "--power-ema-stds = 0.05 0.05"),
    ],
)
def test_wrong_flag_is_refused(flags, world_size, message):
    with pytest.raises(ConfigError) as caught:
        parse(flags, world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "mnist"}, "is none of the built-in images"),
        ({"image_size": 0}, "dataset_param.image_size = 0"),
        ({"valid_fraction": float("nan")}, "valid_fraction = nan"),
        ({"valid_fraction": 1}, "valid_fraction"),
    ],
)
def test_wrong_setting_of_data_json_is_refused(tmp_path, section, message):
    content = {"dataset_param": {"data_folder": "d", "image_size": 8, **section}}
    (tmp_path / "data.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_data_config(tmp_path / "data.json")


def test_typeset_flag_is_refused_as_it_is_written():
    for word in ("\u2013lr", "\u2014lr=1", "\u2212\u2212lr", "--lr\u00a01e-3", "--lr\u202f=1", "-lr"):
        with pytest.raises(ConfigError, match=r"is not how a flag is written: .*\n.*write --lr, and an ordinary space"):
            parse_flags(["--train-iters", "3", word, "1"])


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
    for content, message in (
        (b"--lr 1\n--seed\0 2\n", "train.args, line 2: contains a NUL"),
        (b"\0" * (2 << 20), "2.0 MiB"),
    ):
        (tmp_path / "train.args").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_train_args(tmp_path / "train.args")
