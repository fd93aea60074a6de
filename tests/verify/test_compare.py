"""mm-dit compare: equal sides pass; an operator that is broken on one of them is found, and its layer named.

The sides here are two copies of this project on one framework, or PyTorch and MindSpore where both are to be had
(MM_DIT_MINDSPORE_PYTHON names the interpreter of the second).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.cli.compare import _print, add_arguments, check_arguments, run_sides
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import PlatformError, UserError
from mindspeed_mm_dit.verify.compare import compare_losses, first_past
from mindspeed_mm_dit.verify.page import Comparison, write_report
from mindspeed_mm_dit.verify.processes import ROOT, Side, Training, batch_size_of, find_python, training_flags
from mindspeed_mm_dit.verify.table import Finding, relative_error
from tests.training.launch import Configs


def _python_with(package: str, variable: str) -> str | None:
    return sys.executable if importlib.util.find_spec(package) else os.environ.get(variable)


PYTHONS = {
    "pytorch": _python_with("torch", "MM_DIT_PYTORCH_PYTHON"),
    "mindspore": _python_with("mindspore", "MM_DIT_MINDSPORE_PYTHON"),
}
FAULTS = {
    "pytorch": (
        "framework/pytorch/ops.py",
        "from torch.nn.functional import scaled_dot_product_attention as attention\n",
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "def attention(q, k, v): return scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.51)\n",
    ),
    "mindspore": ("framework/mindspore/ops.py", "q * q.shape[-1] ** -0.5,", "q * q.shape[-1] ** -0.51,"),
}  # fmt: skip


def python_of(framework: str) -> str:
    python = PYTHONS[framework]
    if python is None:
        pytest.skip(f"no interpreter with {framework} here, and MM_DIT_{framework.upper()}_PYTHON names none")
    return python


@pytest.fixture(scope="module")
def configs(tmp_path_factory, digits_folder) -> Configs:
    return Configs.create(tmp_path_factory.mktemp("configs"), digits_folder, hidden_size=32, num_layers=2, num_heads=2)


def arguments(configs: Configs, output: Path, *flags: str):
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", f"{configs.folder}/model.json", "--output", str(output), *flags])


def broken_copy(folder: Path, framework: str) -> Path:
    file, line, broken = FAULTS[framework]
    shutil.copytree(ROOT / "mindspeed_mm_dit", folder / "mindspeed_mm_dit", ignore=shutil.ignore_patterns("__pyc*"))
    source = folder / "mindspeed_mm_dit" / file
    assert source.read_text().count(line) == 1
    source.write_text(source.read_text().replace(line, broken))
    return folder


ONLY_FORWARD_AND_BACKWARD = ("--steps", "0", "--sample-steps", "0")


@pytest.mark.ranks
@pytest.mark.parametrize("framework", ["pytorch", "mindspore"])
def test_a_broken_operator_is_found_and_its_layer_named(framework, configs, tmp_path, capsys):
    python = python_of(framework)
    sides = (
        Side("whole", framework, python),
        Side("broken", framework, python, root=broken_copy(tmp_path / "copy", framework)),
    )
    assert run_sides(arguments(configs, tmp_path / "r.html", *ONLY_FORWARD_AND_BACKWARD), sides) == 1
    said = capsys.readouterr().out
    assert "first layer past tolerance: predictor.blocks.0.attn\n" in said and "verdict: FAIL" in said
    assert "<code class=FAIL>predictor.blocks.0.attn</code>" in (tmp_path / "r.html").read_text()


@pytest.mark.ranks
def test_equal_sides_pass_with_weights_from_a_checkpoint(configs, tmp_path, capsys):
    framework = "pytorch" if PYTHONS["pytorch"] else "mindspore"
    python = python_of(framework)
    run = Side("run", framework, python)
    model, data = f"{configs.folder}/model.json", f"{configs.folder}/data.json"
    flags = training_flags(model, data, Path("none"), 2, 1234, 8, None)
    fresh = run.train([*flags, "--save", f"{tmp_path}/checkpoints"], tmp_path).losses[1]

    args = arguments(configs, tmp_path / "r.html", "--checkpoint", f"{tmp_path}/checkpoints", "--steps", "2",
                     "--sample-steps", "2", "--batch-size", "8")  # fmt: skip
    assert run_sides(args, (Side("a", framework, python), Side("b", framework, python))) == 0
    page = (tmp_path / "r.html").read_text()
    assert page.count("data:image/png;base64,") == 5  # layers, gradients, losses, two of samples
    assert "http" not in page and "images/s" in page and "numpy" in page
    assert "step 2" in page
    assert f"{fresh:.6e}" not in page  # the training began with the checkpoint's weights
    assert "verdict: PASS" in capsys.readouterr().out


@pytest.mark.ranks
def test_pytorch_and_mindspore_agree(configs, tmp_path):
    pythons = [f"--{name}-python={python_of(name)}" for name in ("pytorch", "mindspore")]
    flags = ["--model", f"{configs.folder}/model.json", "--output", f"{tmp_path}/r.html", "--batch-size", "8"]
    assert main(["compare", *flags, "--steps", "5", "--sample-steps", "3", *pythons]) == 0


# --- the parts -------------------------------------------------------------------------------------------


def test_the_first_layer_past_tolerance_is_the_smallest_that_gets_agreeing_inputs():
    layers = [
        Finding("norm1", 1e-7, 1e-5),
        Finding("proj", 1e-2, 1e-5, input_error=1e-2),  # wrong only because of what it is fed
        Finding("attn", 1e-2, 1e-5, input_error=1e-7),
        Finding("block", 1e-3, 1e-5, input_error=1e-7),
    ]
    assert first_past(layers).name == "attn"
    assert first_past(layers[:1]) is None
    assert first_past([Finding("x", float("nan"), 1e-5, input_error=1.0)]).name == "x"


def test_an_error_is_relative_and_never_hides_what_is_not_a_number():
    assert relative_error(np.array([1.0, 1.1]), np.array([1.0, 1.0])) == pytest.approx(0.1 / 2**0.5)
    assert relative_error(np.array([np.nan]), np.array([1.0])) == np.inf
    assert relative_error(np.zeros(2), np.zeros(3)) == np.inf


def test_a_step_that_one_side_lacks_is_an_infinite_difference():
    assert [f.error for f in compare_losses({1: 2.0, 2: 1.0}, {1: 2.0})] == [0.0, np.inf]


def test_training_flags_are_the_runs_own_without_saving_and_on_its_schedule(tmp_path):
    (tmp_path / "train.args").write_text(
        "# cost\n--train-iters 800 --lr 2e-3\n--save=x --report\n--micro-batch-size 64"
    )
    flags = training_flags("m.json", "d.json", tmp_path / "train.args", 20, 7, None, None)
    assert "--save" not in flags and "x" not in flags and "--report" not in flags
    assert " ".join(flags).endswith("--lr-decay-iters 800 --train-iters 20 --log-interval 1 --seed 7")
    assert batch_size_of(flags) == 64


def test_the_speed_is_the_median_of_the_second_half():
    assert Training({}, {1: 9000.0, 2: 100.0, 3: 200.0}).images_per_second(10) == pytest.approx(10 / 0.15)


def test_no_interpreter_is_an_error_that_names_the_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match=r"(?s)neither .* nor .*\.venv-mindspore.*\n.*--mindspore-python PYTHON"):
        find_python("mindspore", None)
    with pytest.raises(PlatformError, match="--pytorch-python = nowhere/python: cannot run"):
        find_python("pytorch", "nowhere/python")


def test_a_side_that_fails_says_why(configs, tmp_path):
    side = Side("broken", "pytorch", sys.executable)
    with pytest.raises(UserError, match=r"broken .*ConfigError: .*unknown flag"):
        side.train(["--mm-model", "m", "--mm-data", "d", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1",
                    "--nonsense"], tmp_path)  # fmt: skip
    assert (tmp_path / "broken_failed.log").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "-1"], "must not be negative"),
        (["--data", "nowhere.json"], "--data = nowhere.json: is not there"),
        (["--output", "r.md"], "is not a .html"),
        (["--output", "/dev/null/r.html"], "--output = /dev/null/r.html: the folder /dev/null cannot be made"),
        (["--sample-steps", "2000"], "--sample-steps = 2000: is more than the 1000 timesteps"),
        (["--batch-size", "0"], "--batch-size = 0"),
        (["--train-args", "nowhere.args"], "--train-args = nowhere.args: is not there"),
        (["--checkpoint", "nowhere"], "--checkpoint = nowhere"),
        (["--model", "nowhere.json"], "--model = nowhere.json"),
    ],
)
def test_a_mistake_is_named_before_time_is_spent(configs, flags, message):
    given = arguments(configs, Path("r.html"), *flags)
    with pytest.raises(UserError, match=message):
        check_arguments(given)


def test_losses_alone_that_part_fail_and_page_and_terminal_say_what_to_try(tmp_path, capsys):
    good, bad = [Finding("output/blocks.0", 4e-7, 1e-5)], [Finding("loss/1", 2e-3, 1e-5)]
    runs = [Training({1: 1.0}, {1: 1.0})] * 2
    for outputs, noted in ((good, True), ([Finding("output/blocks.0", 1e-3, 1e-5)], False)):
        findings = {"output": outputs, "gradient": good, "loss": bad}
        comparison = Comparison(("a", "b"), ({}, {}), {}, findings, runs, [1.0, 1.0], None)
        write_report(tmp_path / "r.html", comparison)
        _print(comparison)
        page, said = (tmp_path / "r.html").read_text(), capsys.readouterr().out
        assert not comparison.good and "verdict: FAIL" in said and "<span class=FAIL>FAIL</span>" in page
        assert ("smaller --lr" in said, "smaller --lr" in page) == (noted, noted)
