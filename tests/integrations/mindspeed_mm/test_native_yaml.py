"""What the native engine is told, in the words of its yaml; no tree is needed."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.run import rows
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import FLAGS as MEANINGS
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import native_keys
from mindspeed_mm_dit.integrations.mindspeed_mm.native import settings
from mindspeed_mm_dit.integrations.mindspeed_mm.native.data import pack_bits, unpack_bits
from mindspeed_mm_dit.integrations.mindspeed_mm.native.host import parse_line
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import parse, without_effect, yaml_for
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import checked_values, flags_of, get, yaml_of
from tests.conftest import ROOT

CONFIG = ["--mm-model", "model.json", "--mm-data", "data.json"]
FLAGS = "--train-iters 100 --micro-batch-size 4 --global-batch-size 32 --lr 1e-3"


def told(flags="", ranks=2):
    return yaml_for(parse([*CONFIG, *FLAGS.split(), *flags.split()], ranks), ranks)


def test_each_flag_has_a_meaning_in_both_routes_and_each_key_one_flag():
    keys = [key.name for key in native_keys().values()]
    assert set(MEANINGS) == {row.name for row in rows()} and len(set(keys)) == len(keys)


@pytest.mark.parametrize(("config", "ranks"), [("", 1), ("imagenet256", 8), ("digits_flow", 1)])
def test_yaml_of_an_example_is_what_plan_prints(config, ranks, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    folder = f"examples/dit/{config}".rstrip("/")
    assert main(["plan", "--write-native", folder, "--world-size", str(ranks)]) == 0
    written = Path(folder, "native.yaml").read_text()
    assert [line for line in written.splitlines() if not line.startswith("#")] == capsys.readouterr().out.splitlines()
    assert f"--world-size {ranks}" in written and f"--nproc_per_node {ranks} " in written


def test_yaml_has_six_sections_and_leaves_defaults_out(monkeypatch):
    content = told("--adam-beta1 0.9 --lr-decay-style constant --weight-decay 0")
    assert list(content) == ["parallel", "model", "data", "features", "training", "tools"]
    assert content["model"]["mm_model"] == "model.json" and content["data"]["dataset_param"]["mm_data"] == "data.json"
    assert not {"adam_beta1", "lr_decay_style", "weight_decay", "lr_warmup_ratio"} & set(content["training"])
    assert get(content, "training.gradient_accumulation_steps") == 4  # 32 / 4 / 2 ranks
    assert str(get(content, "model.model_name_or_path")).startswith("./")  # (else one of the hub)
    monkeypatch.chdir(ROOT / "examples/dit")
    content = told("--init-from base --lora-target-modules attention t_embedder.mlp.0")
    assert get(content, "training.lora.target_modules") == [
        "blocks.{*}.attn.qkv", "blocks.{*}.attn.proj", "t_embedder.mlp.0",
    ]  # fmt: skip
    paths = ["predictor.blocks.{*}", "predictor.blocks.{0-20,25}", "predictor.final_layer", "predictor"]
    assert settings.patterns(paths) == ["blocks.{*}", "blocks.{0-20}", "blocks.25", "final_layer"]
    flags = parse([*CONFIG, *FLAGS.split()], 1)
    sharding = Fsdp2Config(param_dtype="bf16", sub_modules_to_wrap=("predictor.blocks.{*}",))
    assert get(yaml_of(flags, sharding, 1), "training.init_model_with_meta_device") is True
    assert get(yaml_of(flags, None, 1), "training.init_model_with_meta_device") is None


@pytest.mark.parametrize("train_iters", [7, 100, 7_000_000])
def test_warm_up_and_decay_have_the_steps_of_the_flags(train_iters):
    for steps in {1, 3, train_iters // 3, train_iters - 1}:
        content = told(f"--train-iters {train_iters} --lr-warmup-iters {steps} --lr-decay-style constant")
        assert int(train_iters * get(content, "training.lr_warmup_ratio")) == steps  # the engine's formula


@pytest.mark.parametrize(
    "flags", ["--lr-decay-style inverse-square-root", "--lr-decay-style linear --min-lr 1e-5", "--dry-run"]
)
def test_flags_that_the_engine_does_not_have_are_refused(flags):
    pytest.raises(ConfigError, told, flags).match(flags.partition(" ")[0])


def test_shards_must_divide_the_ranks():
    for size in (None, "auto", 1, 2, 4, "4"):
        settings._check_ranks(size, 4, "run.yaml")
    for size in (3, 8, 0, -1, 2.0, True, "all"):
        refused = pytest.raises(ConfigError, settings._check_ranks, size, 4, "run.yaml")
        refused.match(f"parallel.fully_shard_parallel_size = {size!r}")


def test_bits_of_a_batch_survive_a_cast(framework):
    batch = {"noise": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32), "labels": np.arange(2)}
    moved = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in pack_bits(batch).items()}
    for name, x in unpack_bits(moved).items():
        assert x.numpy().tobytes() == batch[name].tobytes()


def test_flags_without_effect_in_the_engine_are_named():
    assert without_effect(parse([*CONFIG, *FLAGS.split()], 1)) == []
    given = "--keep-last 3 --tf32 --distributed-backend gloo --pynative"  # (of which the first has a key)
    flags = parse([*CONFIG, *FLAGS.split(), *given.split()], 1)
    assert without_effect(flags) == ["--distributed-backend", "--pynative", "--tf32"]


@pytest.mark.parametrize(("flags", "key", "value"), [
    ("--context-parallel-size 2", "parallel.ulysses_parallel_size", 2), ("", "training.save_async", True),
    ("--optimizer muon", "training.optimizer", "muon"),
    ("--optimizer adam", "training.optimizer", None), ("--keep-last 3", "training.keep_last", 3),
    ("--optimizer muon --muon-num-ns-steps 6", "training.ns_steps", 6),
    ("--optimizer muon --no-muon-nesterov", "training.muon_nesterov", False),
    ("--freeze y_embedder blocks.{0}", "model.freeze", ["y_embedder", "blocks.0"]), ("", "training.keep_last", 2),
    ("--init-from base --lora-target-modules qkv --lora-r 4", "training.lora.enable", True),
    ("--init-from base --lora-target-modules qkv --lora-r 4", "training.lora.rank", 4),
    ("--init-from base", "model.init_from", "base"),
    ("--no-async-save", "training.save_async", None),
])  # fmt: skip
def test_flags_are_written_by_the_names_of_the_engine(flags, key, value):
    assert get(told(flags), key) == value


def training_section(**values):
    plain = {"global_batch_size": 32, "save_interval": 0, "val_interval": 0, "train_iters": 100, "lr_warmup_ratio": 0.0,
             "lr_decay_ratio": 1.0, "save_async": False, "lora": SimpleNamespace(enable=False)}  # fmt: skip
    return SimpleNamespace(**(plain | values))


def test_yaml_is_checked_like_a_command_line():
    """The checks ask for every flag, those of other optimizers too; the engine's own are of no use to them."""
    content, unsaid = told(), {**settings.OURS, **settings.THEIRS}
    read = SimpleNamespace(training=training_section())
    values = flags_of(read, lambda _, key: unsaid.get(key) if get(content, key) is None else get(content, key))
    flags = checked_values(values, "run.yaml", 2)
    assert (flags.train_iters, flags.lr, flags.optimizer) == (100, 1e-3, "adam")


@pytest.mark.parametrize(("ratio", "steps"), [(0.8125, 6), (0.1, 1), (0.0, 0), (-1.0, 0)])
def test_ratio_of_a_few_steps_is_at_least_one_of_them(ratio, steps):
    read = SimpleNamespace(training=training_section(global_batch_size=8, train_iters=8, lr_decay_ratio=ratio))
    assert flags_of(read, lambda _, key: None)["lr_decay_iters"] == steps


def test_lines_of_the_engine_are_read_as_curves():
    line = "iteration   3/   4 | consumed samples: 24 | learning rate: 1.0E-03 | loss: 8.5E-01 | grad norm: 1.1 |"
    assert parse_line(line) == (3, {"train/learning_rate": 1e-3, "train/loss": 0.85, "train/grad_norm": 1.1})
    line = " ** validation after iteration 2 ** | validation steps: 4 | validation loss: 9.0E-01 |"
    assert parse_line(line) == (2, {"valid/loss": 0.9})
    assert parse_line("Saved checkpoint to here") is None


def test_folder_without_a_model_json_is_refused(tmp_path, capsys):
    for name in ("train.args", "fsdp2.yaml", "data.json"):
        (tmp_path / name).write_bytes((ROOT / "examples/dit" / name).read_bytes())
    assert main(["plan", "--write-native", str(tmp_path), "--world-size", "1"]) == 2
    said = capsys.readouterr()
    assert not said.out and f"--write-native = {tmp_path}/model.json" in said.err


WORDS = "--mm-model m --mm-data d --train-iters 100 --micro-batch-size 4 --lr 1e-3 --lr-decay-style cosine"


def test_values_of_every_host_are_typed_and_an_ignored_schedule_is_refused():
    values = parse([*WORDS.split(), "--lr-warmup-iters", "3"], 2).flags()
    values |= {"ema_decay": "0.5", "num_workers": "0"}  # (as a yaml with quotes has them)
    flags = checked_values(values, "run.yaml", 2)
    assert (flags.ema_decay, flags.num_workers, flags.lr, flags.train_iters) == (0.5, 0, 1e-3, 100)
    flags = parse([*WORDS.split(), "--lr-decay-style", "linear", "--min-lr", "1e-4"], 2)
    pytest.raises(ConfigError, checked_values, flags.flags(), "run.yaml", 2).match("lr_decay_style")


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
    values = {**parse(WORDS.split(), 2).flags(), {**settings.FLAGS, **settings.COUNTED}[key]: value}
    pytest.raises(ConfigError, checked_values, values, "run.yaml", 2).match(f"run.yaml.*{key}")
