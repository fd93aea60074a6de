"""Whole runs on real MindSpore, on one worker and on two, against the same runs on PyTorch."""

import subprocess

import pytest

from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_trees
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from tests.buckets_fixtures import write_configs, write_pictures
from tests.mindspore.launch import PYTHON, needs_mindspore, run, run_script, run_under_msrun
from tests.training.launch import Configs, Outcome

pytestmark = [pytest.mark.ranks, needs_mindspore]

STEPS = "--train-iters {} --global-batch-size 32 --lr 1e-3 --lr-decay-style constant --weight-decay 0.01 "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, few_digits):
    """A small predictor that learns its variance: every part of the loss is compiled."""
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "learn_sigma": True}
    configs = Configs.create(tmp_path_factory.mktemp("tiny"), few_digits, **sizes)
    return configs.change("model.json", diffusion={"model_id": "gaussian_diffusion"})


def check_same(outcome: Outcome, on_torch: Outcome, steps: int, validations: int = 0) -> None:
    """Losses, and mean and quarters of validations, are those of PyTorch: float32, kernels of another library."""
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == steps and outcome.losses == pytest.approx(on_torch.losses, rel=1e-5)
    assert len(outcome.validations) == validations and outcome.validations.keys() == on_torch.validations.keys()
    for iteration, values in on_torch.validations.items():
        found = [float(value) for value in outcome.validations[iteration]]
        assert found == pytest.approx([float(value) for value in values], rel=1e-5) and len(found) == 5, iteration


@pytest.mark.extended
def test_two_workers_of_msrun_learn_and_validate_as_pytorch(tmp_path, few_digits):
    configs = Configs.create(tmp_path, few_digits, hidden_size=32, num_layers=1, num_heads=2).hold_out(0.1)
    shapes = parameters_of(load_model_config(tmp_path / "model.json"))
    FORMATS["pt"].write(tmp_path / "there.pt", State({"model": initial_weights(shapes, 9)}))
    flags = STEPS.format(4) + "--micro-batch-size 8 --eval-interval 2 --eval-iters 2 "
    flags += f"--init-from {tmp_path / 'there.pt'}"
    check_same(run_under_msrun(configs, flags, 2), configs.run(flags), 4, 2)


@pytest.mark.extended
def test_two_workers_on_buckets_learn_as_pytorch(tmp_path):
    pictures = write_pictures(tmp_path / "pictures", {(16, 24): 10, (9, 9): 10})
    configs = Configs(write_configs(tmp_path / "configs", pictures, {"num_layers": 1}, buckets=[[8, 12], [8, 8]]))
    flags = "--train-iters 4 --global-batch-size 8 --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant "
    found = run(configs, flags + "--loss-by token", workers=2)
    assert found.code == 0 and "buckets   8 x 8: " in found.output, found.output
    wanted = configs.run(flags + "--loss-by token")
    assert found.losses == pytest.approx(wanted.losses, rel=2e-5) and len(found.losses) == 4


@pytest.mark.extended
def test_twenty_losses_are_those_of_pytorch_and_the_compiled_step_is_the_interpreted_one(tiny):
    twenty = run(tiny, STEPS.format(20) + "--micro-batch-size 32")
    check_same(twenty, tiny.run(STEPS.format(20) + "--micro-batch-size 32"), 20)
    interpreted = run(tiny, STEPS.format(3) + "--micro-batch-size 32 --pynative")
    assert interpreted.lines == {iteration: twenty.lines[iteration] for iteration in (1, 2, 3)}, interpreted.output


@pytest.mark.costly("one worker = two that shard = one that resumes, on MindSpore")
def test_two_workers_sharded_are_one_and_a_resumed_run(tiny, tmp_path):
    """Two workers with a ZeRO-1 optimizer to step 3, one worker from there; against one uninterrupted worker."""
    (tiny.folder / "auto.yaml").write_text("sharding_size: auto\n")
    sharding = f"--use-torch-fsdp2 --fsdp2-config-path {tiny.folder}/auto.yaml "
    steps = STEPS + "--pynative --lr-decay-iters 6 --micro-batch-size {} "
    saving = steps + f"--save {tmp_path} --load {tmp_path} "
    gathered = run(tiny, steps.format(6, 32))
    sharded, resumed = run(tiny, saving.format(3, 16) + sharding, workers=2), run(tiny, saving.format(6, 32))
    assert (sharded.code, resumed.code) == (0, 0), sharded.output + resumed.output
    assert sharded.losses | resumed.losses == pytest.approx(gathered.losses, rel=1e-6) and len(gathered.losses) == 6


def test_resuming_is_bit_exact_on_one_worker(tiny, tmp_path):
    flags = "--pynative --lr 1e-3 --micro-batch-size 16 --lr-decay-iters 4 --power-ema-stds 0.05 0.1 --train-iters "
    gathered = run(tiny, flags + f"4 --save {tmp_path}/whole")
    run(tiny, flags + f"2 --save {tmp_path}/resumed")
    resumed = run(tiny, flags + f"4 --save {tmp_path}/resumed --load {tmp_path}/resumed")
    for tree in ("model", "ema", "power_ema_1", "power_ema_2"):
        folders = (tmp_path / name / "iter_0000004" for name in ("whole", "resumed"))
        first, second = (read_trees(folder, [tree])[tree] for folder in folders)
        assert first and all(first[name].tobytes() == array.tobytes() for name, array in second.items()), tree
    assert resumed.lines == {iteration: line for iteration, line in gathered.lines.items() if iteration > 2}


RANKS = """
import numpy as np
from mindspeed_mm_dit import framework
framework.activate("mindspore")
from mindspeed_mm_dit.framework import ops, runtime
runtime.initialize("gloo", 2, 8)
rank, mean = runtime.rank(), runtime.mean_over_ranks([ops.tensor(np.float32(runtime.rank()))])[0]
print("RANK", rank, runtime.world_size(), float(mean.asnumpy()), runtime.any_over_ranks(rank == 1),
      runtime.any_over_ranks(False), runtime.each_any_over_ranks([False, rank == 1]),
      runtime.num_microbatches(), flush=True)
runtime.barrier()
runtime.shutdown()
"""


def test_two_workers_average_and_agree(tmp_path):
    (tmp_path / "job.py").write_text(RANKS)
    outcome = run_script([str(tmp_path / "job.py")], tmp_path, workers=2)
    found = sorted(line for line in outcome.output.splitlines() if line.startswith("RANK"))
    assert found == [f"RANK {rank} 2 0.5 True False [False, True] 2" for rank in (0, 1)], outcome.output


def test_nothing_on_the_mindspore_path_imports_torch():
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    assert subprocess.run([PYTHON, "-c", code]).returncode == 0, "these tests prove it only in a venv without torch"


@pytest.mark.extended
def test_adapters_learn_and_go_on_alike_on_both_frameworks(tmp_path_factory, few_digits):
    """The first half is compiled, the rest interpreted."""
    configs = Configs.create(tmp_path_factory.mktemp("lora"), few_digits, hidden_size=32, num_layers=1, num_heads=2)
    base = configs.folder / "base.safetensors"
    steps = "--global-batch-size 16 --lr 1e-2 --lr-decay-style constant --num-workers 0 --ema-decay 0.5 "
    assert configs.run(steps + f"--train-iters 4 --save {configs.folder / 'base'}").code == 0
    assert main(["convert", str(configs.folder / "base"), str(base)]) == 0
    lora = steps + f"--lora-target-modules attn.qkv fc1 --lora-r 4 --init-from {base} "
    torch_run = configs.run(lora + f"--train-iters 5 --save {configs.folder / 'torch'}")
    halves = configs.folder / "halves"
    gathered = run(configs, lora + "--train-iters 5 --pynative")
    assert gathered.code == 0, gathered.output
    assert gathered.losses == pytest.approx(torch_run.losses, rel=1e-5)
    saving = lora + f"--save {halves} --load {halves} --train-iters "
    first, second = run(configs, saving + "3"), run(configs, saving + "5 --pynative", workers=2)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert first.lines == {n: gathered.lines[n] for n in (1, 2, 3)}
    assert second.losses == {n: pytest.approx(gathered.losses[n], rel=2e-6) for n in (4, 5)}
    there = configs.folder / "converted"
    assert main(["convert", str(halves / "iter_0000003"), str(there), "--to", "pytorch"]) == 0
    resumed = configs.run(lora + f"--train-iters 5 --load {there}")
    assert resumed.code == 0, resumed.output
    assert resumed.losses == {n: pytest.approx(gathered.losses[n], rel=1e-5) for n in (4, 5)}
