"""mm-dit compare: equal sides pass; an operator that is broken on one of them is found, and its module named."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sweep import FEW_MODELS, sweep
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import PlatformError, UserError
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays
from mindspeed_mm_dit.tools.verify import compare
from mindspeed_mm_dit.tools.verify.against import SMALL
from mindspeed_mm_dit.tools.verify.cli.compare import add_arguments, check_arguments, run_sides
from mindspeed_mm_dit.tools.verify.compare import Side, training_flags
from mindspeed_mm_dit.tools.verify.module_recorder import describe_first_wrong
from mindspeed_mm_dit.tools.verify.processes import Task, batch_size_of, find_python, weights_of, write_weights
from mindspeed_mm_dit.tools.verify.table import Finding, judge_steps, relative_error, worst
from tests.conftest import GOLDEN
from tests.mindspore.launch import PYTHON, needs_mindspore
from tests.tools.tables import refusals
from tests.tools.verify import forked_tasks
from tests.tools.verify.foreign import rows

PLANTS = Path(__file__).with_name("plants.py")


@pytest.fixture
def forked(monkeypatch):
    """Have the processes of sides forked."""
    for name in ("run_tasks", "run_python"):
        monkeypatch.setattr(compare, name, getattr(forked_tasks, name))


def arguments(tiny, output, *flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", f"{tiny.folder}/model.json", "--output", str(output), *flags])


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("framework", "python"), [("pytorch", sys.executable), pytest.param("mindspore", PYTHON, marks=needs_mindspore)]
)
def test_broken_operator_is_found_and_its_module_named(framework, python, tiny, tmp_path, forked):
    whole, broken = Side(framework, python, "whole"), Side(framework, python, "the_scale_of_attention", PLANTS)
    flags = ("--steps", "0", "--sample-steps", "0")
    assert run_sides(arguments(tiny, tmp_path / "r.html", *flags), (whole, broken)) == 1
    assert "<p class=FAIL>forward: module blocks.0.attn</p>" in (tmp_path / "r.html").read_text()


@pytest.mark.ranks
def test_equal_sides_pass_with_weights_of_a_checkpoint(tiny, tmp_path, forked):
    model, data = f"{tiny.folder}/model.json", f"{tiny.folder}/data.json"
    write_weights(tmp_path / "other.safetensors", weights_of(load_model_config(model), None, 7))
    flags = training_flags(model, data, Path("none"), 1, 1234, 8, None)
    task = Task(("--ai-framework", "pytorch", *flags), f"{tmp_path}/fresh", steps=1, randomise_zeros=False)
    (from_the_seed,) = Side("pytorch", sys.executable, "fresh").take([task], tmp_path)
    words = f"--checkpoint {tmp_path}/other.safetensors --steps 1 --sample-steps 2 --batch-size 8"
    args = arguments(tiny, tmp_path / "r.html", *words.split())
    assert run_sides(args, tuple(Side("pytorch", sys.executable, name) for name in "ab")) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    losses = {each["name"]: each["norm"] for each in found["quantities"] if each["name"].startswith("loss/")}
    assert losses.keys() == {"loss/1"}
    assert losses["loss/1"] != pytest.approx(from_the_seed.losses[0].mean())  # it began with the checkpoint's weights


@pytest.mark.extended
@pytest.mark.ranks
@needs_mindspore
def test_pytorch_and_mindspore_agree(tiny, tmp_path):
    pythons = [f"--pytorch-python={sys.executable}", f"--mindspore-python={PYTHON}"]
    flags = ["--model", f"{tiny.folder}/model.json", "--output", f"{tmp_path}/r.html", "--batch-size", "8"]
    assert main(["compare", *flags, "--steps", "2", "--sample-steps", "2", *pythons]) == 0


def test_first_wrong_module_is_the_smallest_with_right_inputs():
    findings = [
        Finding("input//0", 1e-7, 1e-5), Finding("input/proj/0", 1e-2, 1e-5), Finding("output/norm1", 1e-7, 1e-5),
        Finding("output/proj", 1e-2, 1e-5), Finding("output/attn", 1e-2, 1e-5), Finding("output/block", 1e-3, 1e-5),
    ]  # fmt: skip
    back = [Finding("given/b", 1.0, 1e-5), Finding("back/b", 1.0, 1e-5), Finding("back/a", 1.0, 1e-5)]
    assert describe_first_wrong(findings) == "forward: module attn, first seen in proj"  # (which is fed what is wrong)
    assert describe_first_wrong([Finding("output/x", float("nan"), 1e-5)]) == "forward: module x"
    assert "forward: the data: input 2" in describe_first_wrong([Finding("input//2", 1.0, 1e-5), *findings])
    assert describe_first_wrong(back) == "backward: module a"
    assert "after backward" in describe_first_wrong(findings[:1])


def test_error_is_relative_and_infinite_for_nan():
    assert relative_error(np.array([1.0, 1.1]), np.array([1.0, 1.0])) == pytest.approx(0.1 / 2**0.5)
    assert relative_error(np.array([np.nan]), np.array([1.0])) == np.inf
    assert relative_error(np.zeros(2), np.zeros(3)) == np.inf
    first, both = {"loss/1": np.ones(1)}, {"loss/1": np.ones(1), "loss/2": np.ones(1)}
    assert [f.error for f in judge_steps(first, both)] == [0.0, np.inf]
    masks = np.array([0.0, -np.inf, 2.0])
    assert relative_error(masks, masks) == 0 and relative_error(-masks, masks) == np.inf
    lost, far = Finding("gradient/a", np.inf, np.inf), Finding("gradient/b", 0.5, 1e-6)
    assert not lost.good and not Finding("gradient/c", 0.5, np.inf).good and worst([far, lost]) is lost


def test_training_flags_are_those_of_the_run_without_saving(tmp_path):
    words = "# cost\n--train-iters 800 --lr 2e-3\n--save=x --report\n--micro-batch-size 64"
    (tmp_path / "train.args").write_text(words)
    flags = training_flags("m.json", "d.json", tmp_path / "train.args", 20, 7, None, None)
    assert not {"--save", "x", "--report"} & set(flags) and batch_size_of(flags) == 64
    assert " ".join(flags).endswith("--lr-decay-iters 800 --train-iters 20 --seed 7")


def test_missing_interpreter_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for given in (("mindspore", None), ("pytorch", "nowhere/python")):
        with pytest.raises(PlatformError, match=f"--{given[0]}-python"):
            find_python(*given)


@pytest.mark.extended
def test_side_that_fails_says_why(tmp_path):
    task = Task(("--ai-framework", "pytorch", "--nonsense"), f"{tmp_path}/broken")
    with pytest.raises(UserError, match=r"broken .*ConfigError"):
        Side("pytorch", sys.executable, "broken").take([task], tmp_path)


def test_compare_refuses_before_any_work(tiny):
    for flags in (
        "--steps -1", "--data nowhere.json", "--output r.md", "--output /dev/null/r.html", "--sample-steps 2000",
        "--batch-size 0", "--train-args nowhere.args", "--checkpoint nowhere", "--model nowhere.json",
    ):  # fmt: skip
        given = arguments(tiny, Path("r.html"), *flags.split())
        with pytest.raises(UserError, match=flags.partition(" ")[0]):
            check_arguments(given)


@refusals(f"""
--steps 1 | --model
a.trace | two step traces
a.trace b.trace | a.trace
--against diffusers:Wan | WanTransformer3DModel
--against timm:vit | timm:vit
--against diffusers:{GOLDEN}/zimage_tiny | ZImageTransformer2DModel
""")
def test_what_cannot_be_compared_is_refused(flags, named, capsys, framework):
    assert main(["compare", *flags.split()]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.pytorch
@pytest.mark.parametrize(
    "place", rows([*SMALL, f"{GOLDEN}/sd35_tiny", f"{GOLDEN}/wan21_i2v_tiny"], [f"{GOLDEN}/sd35_tiny"])
)
def test_networks_are_those_of_diffusers(place, tmp_path, framework):
    pytest.importorskip("diffusers")
    assert main(["compare", "--against", f"diffusers:{place}", "--output", f"{tmp_path}/r.html"]) == 0


@pytest.mark.pytorch
def test_weights_of_another_config_json_are_named(tmp_path, capsys, framework):
    pytest.importorskip("diffusers")
    name = "transformer_blocks.0.attn.to_q.bias"
    (tmp_path / "config.json").write_bytes((GOLDEN / "sd35_tiny/config.json").read_bytes())
    whole = diffusers_folder.read_arrays(GOLDEN / "sd35_tiny")
    for key, array, said in (
        (name, None, f"{name} is missing"),
        ("foo", np.ones(2), "foo"),
        (name, np.ones(2), "(2,)"),
    ):
        arrays = {key: array for key, array in (whole | {key: array}).items() if array is not None}
        write_arrays(tmp_path / "diffusion_pytorch_model.safetensors", arrays, {})
        assert main(["compare", "--against", f"diffusers:{tmp_path}"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.extended
@needs_mindspore
def test_mindspore_has_the_gradients_of_pytorch(tmp_path):
    """A few of the models of benchmarks/sweep.py."""
    found = sweep(FEW_MODELS, (Side("pytorch", sys.executable, "pytorch"), Side("mindspore", PYTHON, "ms")), tmp_path)
    assert len(found.agreements) == len(FEW_MODELS)
    assert [agreement for agreement in found.agreements if not agreement.good] == []
