"""What a checkpoint says of its run, edited by hand or damaged; and folders and pipes that a command writes to."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mindspeed_mm_dit.checkpoint.store import RUN_FACTS, check_is_no_checkpoint, read_facts
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.outputs import check_output_file, check_output_folder
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from tests.conftest import GOLDEN, ROOT

ALPHA = {"base": "a", "--lora-target-modules": ["qkv"], "--lora-r": 8, "--lora-alpha": 16}
ODD = [("iteration", -7), ("iteration", "two"), ("iteration", 3), ("iteration", True), ("consumed_samples", "x"),
       ("consumed_samples", 10**30), ("consumed_samples", -5), ("model", [1]), ("model", None), ("classes", 5),
       ("classes", {"a": 1}), ("classes", [1, 2]), ("seed", -1), ("seed", 1.5),
       ("adapters", ALPHA | {"--lora-alpha": "many"}), ("adapters", ALPHA | {"--lora-alpha": 10**400}),
       ("adapters", ALPHA | {"--lora-alpha": -1}), ("adapters", ALPHA | {"--lora-r": [8]}), ("adapters", {"base": "a"}),
       ("settings", []), ("command", "train"), ("power_ema_stds", "x"), ("power_ema_stds", [0.05, 7])]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ODD)
def test_a_fact_that_cannot_be_is_named_with_its_key(tmp_path, key, value):
    path = tmp_path / "iter_0000002"
    path.mkdir()
    (path / RUN_FACTS).write_text(json.dumps({"iteration": 2, "consumed_samples": 16, key: value}))
    with pytest.raises(CheckpointError, match=rf"run\.json: {key} = "):
        read_facts(path)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, '{"iteration": 2}'.encode("utf-16"), b'{"n": ' + b"9" * 5000 + b"}"]
)
def test_facts_that_are_no_json_are_none(tmp_path, content):
    (tmp_path / RUN_FACTS).write_bytes(content)
    assert read_facts(tmp_path) == {}


@pytest.mark.parametrize("place", ["iter_0000002", "iter_0000002/new", "run"])
def test_a_run_does_not_save_into_a_checkpoint(tmp_path, place):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_FACTS).write_text("{}")
    with pytest.raises(CheckpointError, match="is one checkpoint, not the folder of them"):
        check_is_no_checkpoint("--save", tmp_path / place)
    check_is_no_checkpoint("--save", tmp_path / "checkpoints")


def test_a_folder_that_is_looked_at_is_not_made(tmp_path):
    check_output_folder("--save", tmp_path / "a" / "b", make=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--save = .*cannot be made: .*file is a file"):
        check_output_folder("--save", tmp_path / "file" / "b", make=False)


def test_a_link_is_judged_by_where_it_leads(tmp_path):
    (tmp_path / "link.png").symlink_to("/proc/nowhere/x.png")
    with pytest.raises(ConfigError, match=r"--output = .*link\.png: the folder /proc/nowhere cannot be made"):
        check_output_file("--output", tmp_path / "link.png")


def test_train_args_are_a_text_of_some_lines(tmp_path):
    (tmp_path / "train.args").write_bytes(b"--lr 1\n--seed\0 2\n")
    with pytest.raises(ConfigError, match=r"train\.args, line 2: contains a NUL byte"):
        read_train_args(tmp_path / "train.args")
    (tmp_path / "train.args").write_bytes(
        b"\xef\xbb\xbf--lr 1 \\\r\n --seed 2 \\ \n# all \\\n--save 'a b'\\\n--exp c\\\\\n\\\n"
    )
    assert read_train_args(tmp_path / "train.args") == ["--lr", "1", "--seed", "2", "--save", "a b", "--exp", "c\\"]
    (tmp_path / "train.args").write_bytes(b"\0" * (2 << 20))
    with pytest.raises(ConfigError, match=r"is no config file: it has 2\.0 MiB"):
        read_train_args(tmp_path / "train.args")


def test_a_data_json_is_no_model_json(tmp_path, capsys):
    words = ["convert", str(GOLDEN / "dit_tiny_p2.pt"), str(tmp_path / "x.safetensors"), "--model"]
    assert main([*words, str(ROOT / "examples/dit/data.json")]) == 2
    assert "ConfigError: --model: " in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("redirect", "code"), [("> /dev/full", 2), ("| true", 0)])
def test_an_output_that_takes_nothing_is_no_traceback(tmp_path, redirect, code):
    command = f"{sys.executable} -m mindspeed_mm_dit.cli.main plan --model {ROOT}/examples/dit/model.json {redirect}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr
