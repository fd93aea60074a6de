"""Values of the native engine's yaml are held to what the flags of the same meaning take; no tree is needed."""

from __future__ import annotations

import pytest

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.wings.mindspeed_mm.native.commandline import parse
from mindspeed_mm_dit.wings.mindspeed_mm.native.keys import checked_values
from mindspeed_mm_dit.wings.mindspeed_mm.native.settings import COUNTED, FLAGS

WORDS = "--mm-model m --mm-data d --train-iters 100 --micro-batch-size 4 --lr 1e-3 --lr-decay-style cosine"


def test_what_every_host_takes_is_taken_and_typed() -> None:
    values = parse([*WORDS.split(), "--lr-warmup-iters", "3"], 2).flags()
    values |= {"ema_decay": "0.5", "num_workers": "0"}  # (as a yaml with quotes has them)
    flags = checked_values(values, "run.yaml", 2)
    assert (flags.ema_decay, flags.num_workers, flags.lr, flags.train_iters) == (0.5, 0, 1e-3, 100)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("training.lr", 0, "training.lr = 0: is not a positive number"),
        ("training.lr", float("nan"), "training.lr = nan: is not a positive number"),
        ("training.train_iters", 0, "training.train_iters = 0: is not a positive whole number"),
        ("training.micro_batch_size", -2, "training.micro_batch_size = -2: is not a positive whole number"),
        ("training.log_interval", 0, "training.log_interval = 0: is not a positive whole number"),
        ("training.seed", -1, "training.seed = -1: is not a whole number of at least 0"),
        ("training.save_interval", -1, r"training.save_interval \(--save-interval\) = -1: is not a positive whole"),
        ("training.gradient_accumulation_steps", 0, r"gradient_accumulation_steps \(--global-batch-size\) = 0"),
        ("training.lr_warmup_ratio", -50, r"training.lr_warmup_ratio \(--lr-warmup-iters\) = -50: is not"),
        ("training.lr_decay_ratio", 0, r"training.lr_decay_ratio \(--lr-decay-iters\) = 0: is not a positive"),
        ("training.lr_decay_style", "polynomial", "training.lr_decay_style = 'polynomial': is none of constant, "),
        ("training.lr_decay_style", "inverse-square-root", r"\(--lr-decay-style = inverse-square-root\)"),
        ("training.lr_min", 1.0, r"training.lr_min \(--min-lr = 1.0\): must lie between 0 and --lr \(0.001\)"),
        ("training.adam_beta1", 1.5, r"training.adam_beta1 \(--adam-beta1 = 1.5\): must lie in"),
        ("model.ema_decay", 1.5, r"model.ema_decay = 1.5: is not a number in \[0, 1\)"),
        ("model.ema_decay", None, r"model.ema_decay = null: is not a number in \[0, 1\)"),
        ("model.bf16", "yes", "model.bf16 = 'yes': is not true or false"),
        ("data.dataset_param.num_workers", "two", "num_workers = 'two': is not a whole number from 0 to 1024"),
        ("data.dataset_param.eval_iters", 2.5, "data.dataset_param.eval_iters = 2.5: is not a whole number"),
        ("tools.tensorboard_dir", 3, "tools.tensorboard_dir = 3: is not a text"),
    ],
)
def test_a_value_that_the_flag_of_the_same_meaning_does_not_take_is_named_by_its_key(
    key: str, value: object, said: str
) -> None:
    values = {**parse(WORDS.split(), 2).flags(), {**FLAGS, **COUNTED}[key]: value}
    with pytest.raises(ConfigError, match=f"run.yaml: .*{said}"):
        checked_values(values, "run.yaml", 2)


def test_what_the_engine_would_pass_over_in_a_schedule_is_named() -> None:
    flags = parse([*WORDS.split(), "--lr-decay-style", "linear", "--min-lr", "1e-4"], 2)
    with pytest.raises(ConfigError, match=r"training.lr_decay_style \(--lr-decay-style = linear\): .*end at 0"):
        checked_values(flags.flags(), "run.yaml", 2)
