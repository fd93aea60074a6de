"""Whole runs on real MindSpore, on one worker and on two, against the same runs on PyTorch."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.weights import read_trees
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.on_paper import parameters_of
from tests.buckets_fixtures import write_configs, write_pictures
from tests.clips_fixtures import clip_configs, write_clips
from tests.mindspore.launch import PYTHON, needs_mindspore, run, run_script, run_under_msrun
from tests.training.launch import Configs, Outcome

pytestmark = [pytest.mark.ranks, needs_mindspore]

STEPS = "--train-iters 20 --global-batch-size 32 --lr 1e-3 --lr-decay-style constant --weight-decay 0.01 "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, digits_folder):
    """A small predictor that learns its variance: every part of the loss is compiled."""
    configs = Configs.create(
        tmp_path_factory.mktemp("tiny"), digits_folder, hidden_size=32, num_layers=1, num_heads=2, learn_sigma=True
    )
    return configs.change("model.json", diffusion={"model_id": "gaussian_diffusion"})


def test_a_dry_run_ends_before_the_model(tiny):
    outcome = run(tiny, STEPS + "--dry-run --save dry")
    assert outcome.code == 0, outcome.output
    assert "dry run: every check passed" in outcome.output and "ready in" not in outcome.output
    assert not (tiny.folder / "dry").exists()


def check_same(outcome: Outcome, on_torch: Outcome, steps: int, validations: int = 0) -> None:
    """Losses, and mean and quarters of validations, are those of PyTorch: float32, kernels of another library."""
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == steps and outcome.losses == {
        iteration: pytest.approx(loss, rel=1e-5) for iteration, loss in on_torch.losses.items()
    }
    assert len(outcome.validations) == validations and outcome.validations.keys() == on_torch.validations.keys()
    for iteration, values in on_torch.validations.items():
        found = [float(value) for value in outcome.validations[iteration]]
        assert found == pytest.approx([float(value) for value in values], rel=1e-5) and len(found) == 5, iteration


@pytest.fixture(scope="module")
def twenty(tiny):
    """Twenty compiled steps of one worker."""
    return run(tiny, STEPS + "--micro-batch-size 32")


@pytest.mark.extended
def test_twenty_losses_are_those_of_pytorch(tiny, twenty):
    check_same(twenty, tiny.run(STEPS + "--micro-batch-size 32"), 20)


def test_a_run_that_begins_with_other_weights_is_that_of_pytorch(tiny, tmp_path):
    there = DiTConfig(input_size=8, num_classes=7, in_channels=1, hidden_size=32, num_layers=1, num_heads=2)
    drawn = initial_weights(parameters_of(there), 9)
    moved = {name: array + np.float32(0.01) for name, array in drawn.items() if name != "pos_embed"}
    FORMATS["pt"].write(tmp_path / "there.pt", State({"model": moved | {"pos_embed": drawn["pos_embed"]}}))
    flags = STEPS.replace("20", "4") + f"--micro-batch-size 16 --init-from {tmp_path / 'there.pt'}"
    on_torch, outcome = tiny.run(flags), run(tiny, flags + " --pynative")
    assert "10 of 10 classes drawn anew, the null class kept" in outcome.output, outcome.output
    check_same(outcome, on_torch, 4)


@pytest.mark.extended
def test_losses_and_validations_of_two_workers_are_those_of_pytorch_and_all_begin_with_other_weights(
    tmp_path, digits_folder
):
    configs = Configs.create(tmp_path, digits_folder, hidden_size=32, num_layers=1, num_heads=2)
    configs.hold_out(0.1)
    shapes = parameters_of(load_model_config(tmp_path / "model.json"))
    FORMATS["pt"].write(tmp_path / "there.pt", State({"model": initial_weights(shapes, 9)}))
    flags = STEPS.replace("20", "4") + "--micro-batch-size 8 --eval-interval 2 --eval-iters 2 "
    flags += f"--init-from {tmp_path / 'there.pt'}"
    check_same(run_under_msrun(configs, flags, 2), configs.run(flags), 4, 2)


@pytest.mark.extended
def test_two_workers_on_buckets_compile_all_shapes_before_they_meet_and_are_pytorch(tmp_path):
    pictures = write_pictures(tmp_path / "pictures", {(16, 24): 10, (9, 9): 10})
    configs = Configs(write_configs(tmp_path / "configs", pictures, {"num_layers": 1}, buckets=[[8, 12], [8, 8]]))
    flags = "--train-iters 4 --global-batch-size 8 --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant "
    found = run(configs, flags + "--loss-by token", workers=2)
    assert found.code == 0 and "buckets   8 x 8: " in found.output, found.output
    wanted = configs.run(flags + "--loss-by token")
    assert found.losses == pytest.approx(wanted.losses, rel=2e-5) and len(found.losses) == 4


def test_the_compiled_step_is_the_interpreted_one(tiny, twenty):
    interpreted = run(tiny, STEPS.replace("20", "3") + "--micro-batch-size 32 --pynative")
    assert interpreted.lines == {iteration: twenty.lines[iteration] for iteration in (1, 2, 3)}, interpreted.output


def test_two_workers_sharded_are_one_and_a_resumed_run_prints_the_same_lines(tiny, twenty, tmp_path):
    """Two workers with a ZeRO-1 optimizer to step 3, one worker from there; against one uninterrupted worker.

    Those two interpret the network: two that compile it are tested above.
    """
    (tiny.folder / "auto.yaml").write_text("sharding_size: auto\n")
    steps = STEPS.replace("--train-iters 20", "--train-iters {}")
    saving = steps + f"--save {tmp_path} --load {tmp_path} --lr-decay-iters 6 --micro-batch-size "
    sharded = run(
        tiny,
        saving.format(3) + f"16 --pynative --use-torch-fsdp2 --fsdp2-config-path {tiny.folder}/auto.yaml",
        workers=2,
    )
    resumed = run(tiny, saving.format(6) + "32")
    assert (sharded.code, resumed.code) == (0, 0), sharded.output + resumed.output
    losses = {**sharded.losses, **resumed.losses}
    assert losses == {iteration: pytest.approx(twenty.losses[iteration], rel=1e-6) for iteration in range(1, 7)}


def test_resuming_is_bit_exact_on_one_worker(tiny, tmp_path):
    """Interpreted; the test above resumes compiled steps."""
    flags = "--pynative --lr 1e-3 --micro-batch-size 16 --lr-decay-iters 4 --power-ema-stds 0.05 0.1 --train-iters "
    whole = run(tiny, flags + f"4 --save {tmp_path / 'whole'}")
    tmp_path = tmp_path / "resumed"
    run(tiny, flags + f"2 --save {tmp_path}")
    resumed = run(tiny, flags + f"4 --save {tmp_path} --load {tmp_path} --ema-decay 0.5")
    for tree in ("model", "power_ema_1", "power_ema_2"):
        folders = (tmp_path.parent / "whole", tmp_path)
        first, second = (read_trees(folder / "iter_0000004", [tree])[tree] for folder in folders)
        assert first and all(first[name].tobytes() == array.tobytes() for name, array in second.items())
    assert resumed.lines == {iteration: line for iteration, line in whole.lines.items() if iteration > 2}
    assert (
        "changed since the checkpoint:\n    what         there   here\n    --ema-decay  0.9999  0.5\n" in resumed.output
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-torch-fsdp2 --fsdp2-config-path offload.yaml", "offload_to_cpu = True"),
        ("--bf16", "mindspore on cpu does not train in bfloat16"),
        ("--distributed-backend hccl", "needs a NPU device"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_name(tiny, flags, message):
    (tiny.folder / "offload.yaml").write_text("offload_to_cpu: true\n")
    outcome = run(tiny, "--train-iters 1 --micro-batch-size 4 --lr 1e-3 " + flags)
    assert outcome.code == 2 and message in outcome.output and "Traceback" not in outcome.output


@pytest.mark.extended
def test_a_checkpoint_of_the_other_framework_is_refused_with_the_command_that_converts_it(tiny, tmp_path):
    flags = f"--train-iters 1 --micro-batch-size 4 --lr 1e-3 --save {tmp_path}/{{0}} --load {tmp_path}/{{0}}"
    tiny.run(flags.format("torch"))
    run(tiny, flags.format("mindspore"))
    for outcome in (run(tiny, flags.format("torch")), tiny.run(flags.format("mindspore"))):
        assert outcome.code == 2 and "mm-dit convert" in outcome.output


RANKS = """
import numpy as np
from mindspeed_mm_dit import framework
framework.activate("mindspore")
from mindspeed_mm_dit.framework import ops, runtime
runtime.initialize("gloo", 2, 8)
rank, mean = runtime.rank(), runtime.mean_over_ranks([ops.tensor(np.float32(runtime.rank()))])[0]
print("RANK", rank, runtime.world_size(), float(mean.asnumpy()), runtime.any_rank(rank == 1), runtime.any_rank(False),
      runtime.each_on_any_rank([False, rank == 1]), runtime.num_microbatches(), flush=True)
runtime.barrier()
runtime.shutdown()
"""


def test_two_workers_average_and_agree(tmp_path):
    (tmp_path / "job.py").write_text(RANKS)
    outcome = run_script([str(tmp_path / "job.py")], tmp_path, workers=2)
    assert sorted(line for line in outcome.output.splitlines() if line.startswith("RANK")) == [
        "RANK 0 2 0.5 True False [False, True] 2", "RANK 1 2 0.5 True False [False, True] 2",
    ], outcome.output  # fmt: skip


def test_nothing_on_the_mindspore_path_imports_torch():
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    assert subprocess.run([PYTHON, "-c", code]).returncode == 0, "these tests prove it only in a venv without torch"


def test_clips_that_are_not_cached_are_refused_with_the_command_that_caches_them(tmp_path):
    pytest.importorskip("av", reason="requirements/video.txt")
    refused = run(clip_configs(tmp_path, write_clips(tmp_path)), "--train-iters 1 --micro-batch-size 4 --lr 1e-3")
    assert refused.code == 2 and "runs on PyTorch alone" in refused.output and "mm-dit cache-latents" in refused.output


@pytest.mark.extended
def test_adapters_learn_the_same_on_both_frameworks_and_go_on_from_either_s_checkpoint(tmp_path_factory, digits_folder):
    """The first half is compiled, the rest interpreted."""
    configs = Configs.create(tmp_path_factory.mktemp("lora"), digits_folder, hidden_size=32, num_layers=1, num_heads=2)
    base = configs.folder / "base.safetensors"
    steps = "--global-batch-size 16 --lr 1e-2 --lr-decay-style constant --num-workers 0 --ema-decay 0.5 "
    assert configs.run(steps + f"--train-iters 4 --save {configs.folder / 'base'}").code == 0
    assert main(["convert", str(configs.folder / "base"), str(base)]) == 0
    lora = steps + f"--lora-target-modules attn.qkv fc1 --lora-r 4 --init-from {base} "
    torch_run = configs.run(lora + f"--train-iters 5 --save {configs.folder / 'torch'}")
    halves = configs.folder / "halves"
    whole = run(configs, lora + "--train-iters 5 --pynative")
    assert whole.code == 0, whole.output
    assert whole.losses == {n: pytest.approx(loss, rel=1e-5) for n, loss in torch_run.losses.items()}
    saving = lora + f"--save {halves} --load {halves} --train-iters "
    first, second = run(configs, saving + "3"), run(configs, saving + "5 --pynative", workers=2)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert first.lines == {n: whole.lines[n] for n in (1, 2, 3)}
    assert second.losses == {n: pytest.approx(whole.losses[n], rel=2e-6) for n in (4, 5)}
    there = configs.folder / "converted"
    assert main(["convert", str(halves / "iter_0000003"), str(there), "--to", "pytorch"]) == 0
    resumed = configs.run(lora + f"--train-iters 5 --load {there}")
    assert resumed.code == 0, resumed.output
    assert resumed.losses == {n: pytest.approx(whole.losses[n], rel=1e-5) for n in (4, 5)}
