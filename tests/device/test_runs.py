"""Whole runs on the device, and the same on the CPU: lines, validations and checkpoints agree."""

import json
import shutil
import sys
from functools import lru_cache

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.tools.verify import proof
from tests.before.runs import SCRIPT
from tests.before.test_examples import flags
from tests.device import counted
from tests.tools.verify.campaign import config_folder
from tests.tools.verify.forked_tasks import run_tasks
from tests.tools.verify.plants import DEVICE, FAULTS
from tests.tools.verify.test_prove import judged
from tests.training import launch
from tests.training.test_run import write_fsdp2

pytestmark = pytest.mark.ranks
CPU = {"DEVICE_APART_COUNT": "0", "CUDA_VISIBLE_DEVICES": ""}
CLOSE = 2 * counted.CLOSE  # (other kernels of some processors, and sums of ranks in another order)
STEPS = "--global-batch-size 16 --lr 1e-3 --lr-decay-style constant --adam-eps 1e-3 --ema-decay 0.5 --num-workers 0 "
WATCHED = "--eval-interval 2 --eval-iters 2 --save-interval 2 --sample-interval 2 --report-steps 2 --keep-best "
FSDP2 = "sharding_size: auto\n"
LAYOUTS = {
    "alone": (1, "--power-ema-stds 0.1 --profile --profile-step-start 1 --profile-step-end 2", None),
    "replicated": (2, "--micro-batch-size 4", None),
    "FSDP2": (2, "", FSDP2 + "num_to_forward_prefetch: 1\nnum_to_backward_prefetch: 1\n"),
    "FSDP2, bf16": (2, "", FSDP2 + "param_dtype: bf16\nreduce_dtype: fp32\n"),
    "offloaded": (2, "", FSDP2 + "offload_to_cpu: true\n"),
    "hybrid": (4, "", "sharding_size: 2\n"),
    "recomputed": (2, "", FSDP2 + "recompute_modules: ['predictor.blocks.{0-1}']\nuse_reentrant: false\n"),
    "Muon": (2, "--optimizer muon", FSDP2),
    "sharing": (2, "--context-parallel-size 2", None),
    "saved at once": (2, "--no-async-save", FSDP2),
}
OTHER_NUMBERS = ("FSDP2, bf16", "Muon")
"""Layouts that do not compute what one rank alone does."""


def run(configs, layout, folder, steps=4, **variables):
    ranks, flags, fsdp2 = LAYOUTS[layout]
    sharding = write_fsdp2(configs, f"{ranks}-{len(fsdp2)}.yaml", fsdp2) if fsdp2 else ""
    places = f"--save {folder} --load {folder} --tensorboard-dir {folder}/board "
    outcome = configs.run(f"{STEPS}{WATCHED}{places}--train-iters {steps} {sharding}{flags}", ranks, **variables)
    assert outcome.code == 0, outcome.output
    return outcome


def saved(folder):
    """Every array of the newest checkpoint."""
    store = CheckpointStore(folder)
    state = FORMATS["pytorch"].read(store.path(store.iterations()[-1]))
    return {f"{tree}.{name}": array for tree, arrays in state.trees.items() for name, array in arrays.items()}


def assert_alike(there, here):
    for (iteration, line), (_, expected) in zip(there.lines.items(), here.lines.items(), strict=True):
        assert [*map(float, line[:2])] == pytest.approx([*map(float, expected[:2])], rel=CLOSE), iteration
    for iteration, expected in here.validations.items():
        assert [*map(float, there.validations[iteration])] == pytest.approx([*map(float, expected)], rel=CLOSE)


@pytest.fixture(scope="module")
def on_the_cpu(validated, tmp_path_factory):
    """Return a function of a layout to the CPU's run and folder: what changes no number has one run of all layouts."""

    @lru_cache
    def of(layout):
        folder = tmp_path_factory.mktemp("cpu") / "run"
        return run(validated, layout, folder, **CPU), folder

    return lambda layout: of(layout if layout in OTHER_NUMBERS else "alone")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_learns_and_saves_what_it_does_on_the_cpu(validated, layout, on_the_cpu, tmp_path):
    there = run(validated, layout, tmp_path)
    here, folder = on_the_cpu(layout)
    name = f" on {torch.get_device_module(counted.KIND).get_device_name()}, "
    assert name in there.output and name not in here.output
    assert len(there.lines) == 4 and len(there.validations) == 2
    assert_alike(there, here)
    found, expected = saved(tmp_path), saved(folder)
    assert found.keys() == {name for name in expected if layout == "alone" or not name.startswith("power_ema")}
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=counted.LOOSE, atol=counted.CLOSE, err_msg=name)


def test_run_moves_between_device_cpu_and_layouts(validated, tmp_path):
    whole = run(validated, "alone", tmp_path / "whole", 6, **CPU)
    run(validated, "FSDP2", tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for layout, folder, variables in (("hybrid", "run", {}), ("replicated", "copy", CPU)):
        resumed = run(validated, layout, tmp_path / folder, 6, **variables)
        assert list(resumed.lines) == [3, 4, 5, 6]
        for iteration, (_, loss, _) in resumed.lines.items():
            assert float(loss) == pytest.approx(float(whole.lines[iteration][1]), rel=CLOSE)


def counted_by(configs, folder, steps, flags):
    outcome = configs.run(f"{STEPS}--train-iters {steps} {flags}", DEVICE_APART_REPORT=f"{folder}/report")
    assert outcome.code == 0, outcome.output
    return json.loads((folder / "report.0.json").read_text())


@counted.apart_alone
@pytest.mark.parametrize(
    ("flags", "most"),
    [("", 0), ("--eval-interval 2 --eval-iters 3", 1), ("--save {} --save-interval 2", 1)],
    ids=["steps", "validations", "saves"],
)
def test_steps_and_saves_make_the_host_wait_for_little(validated, tmp_path, flags, most):
    """Between runs of 4 and of 8 steps, each with its log line, lie two validations or saves."""
    few, many = (counted_by(validated, tmp_path, n, flags.format(tmp_path / str(n))) for n in (4, 8))
    assert many["waits"] - few["waits"] <= 2 * most, many["waited_at"]
    assert many["bytes_to_host"] > few["bytes_to_host"] and many["most_pinned_bytes"] == few["most_pinned_bytes"]


@pytest.mark.parametrize("config", ["digits_flow", "moving_digits", "digits_meanflow", "digits_buckets"])
def test_embedded_config_prints_the_lines_of_the_cpu(config, tmp_path):
    if config == "moving_digits":
        pytest.importorskip("av")
    words = [sys.executable, *SCRIPT, *flags(f"examples/dit/{config}").split()]
    there, here = (launch.run(words, tmp_path, **variables) for variables in ({}, CPU))
    assert there.code == here.code == 0 and len(here.lines) == 3, there.output
    assert_alike(there, here)


@counted.apart_alone
def test_proof_compares_the_device_with_the_host(validated, tmp_path, monkeypatch, capsys):
    def reported(ranks, framework, tasks, *rest):
        monkeypatch.setenv("DEVICE_APART_REPORT", str(tmp_path / ("host" if tasks[0].on_host else "device")))
        return run_tasks(ranks, framework, tasks, *rest)

    monkeypatch.setattr(proof, "run_tasks", reported)
    page = tmp_path / "proof.html"
    code = main(["prove", str(config_folder(validated)), "--layouts", "device", "--output", str(page)])
    assert code == 0 and "1 rank, device" in capsys.readouterr().out
    host, device = (json.loads((tmp_path / f"{name}.0.json").read_text()) for name in ("host", "device"))
    assert device["operators"] and not host["operators"]


@counted.apart_alone
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.layout is DEVICE])
def test_proof_finds_a_fault_of_the_device(name, validated, tmp_path, monkeypatch, framework):
    monkeypatch.setattr(framework.runtime, "_cpu_only", False)
    found = judged(config_folder(validated), tmp_path, [name])[name]
    assert (found.word, found.location.startswith(FAULTS[name].where)) == ("FAIL", True), (found.named, found.location)
    assert found.named.startswith(FAULTS[name].named)
