"""Values of the native engine's yaml are held to what the flags of the same meaning take; no tree is needed."""

import pytest

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import parse
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import COUNTED, FLAGS, checked_values

WORDS = "--mm-model m --mm-data d --train-iters 100 --micro-batch-size 4 --lr 1e-3 --lr-decay-style cosine"


def test_values_of_every_host_are_taken_and_typed():
    values = parse([*WORDS.split(), "--lr-warmup-iters", "3"], 2).flags()
    values |= {"ema_decay": "0.5", "num_workers": "0"}  # (as a yaml with quotes has them)
    flags = checked_values(values, "run.yaml", 2)
    assert (flags.ema_decay, flags.num_workers, flags.lr, flags.train_iters) == (0.5, 0, 1e-3, 100)


REFUSED = [
    ("training.lr", 0), ("training.lr", float("nan")), ("training.train_iters", 0), ("training.micro_batch_size", -2),
    ("training.log_interval", 0), ("training.seed", -1), ("training.save_interval", -1),
    ("training.gradient_accumulation_steps", 0), ("training.lr_warmup_ratio", -50), ("training.lr_decay_ratio", 0),
    ("training.lr_decay_style", "polynomial"), ("training.lr_decay_style", "inverse-square-root"),
    ("training.lr_min", 1.0), ("training.adam_beta1", 1.5), ("model.ema_decay", 1.5), ("model.ema_decay", None),
    ("model.bf16", "yes"), ("data.dataset_param.num_workers", "two"), ("data.dataset_param.eval_iters", 2.5),
    ("tools.tensorboard_dir", 3),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_value_that_its_flag_does_not_take_is_refused(key, value):
    values = {**parse(WORDS.split(), 2).flags(), {**FLAGS, **COUNTED}[key]: value}
    pytest.raises(ConfigError, checked_values, values, "run.yaml", 2).match(f"run.yaml: .*{key}")


def test_schedule_that_the_engine_would_ignore_is_refused():
    flags = parse([*WORDS.split(), "--lr-decay-style", "linear", "--min-lr", "1e-4"], 2)
    pytest.raises(ConfigError, checked_values, flags.flags(), "run.yaml", 2).match("lr_decay_style")
