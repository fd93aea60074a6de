"""What makes a step faster leaves the losses as they are; and what is done, and imported, before the first one."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.planning import train_flop
from mindspeed_mm_dit.tools.visualize.plot import read_scalar
from mindspeed_mm_dit.training.pytorch.parallel import recompute
from tests.conftest import ROOT

pytestmark = pytest.mark.ranks

STEPS = "--train-iters 6 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --num-workers 1 --seed 1 "
SIZES = {"hidden_size": 32, "num_heads": 2}
IMAGES = 8
"""Of a micro-batch. PyTorch keeps on disk what it has compiled: who has these sizes too compiles nothing anew."""


@pytest.fixture(scope="module")
def plain(tiny):
    outcome = tiny.done(STEPS + "--micro-batch-size 16 --peak-tflops 0.5 --tensorboard-dir board")
    return outcome.losses


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_learn_the_same(tiny, plain, ranks):
    path = tiny.folder / "fsdp2.yaml"
    path.write_text(
        "sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n"
        "recompute_modules: ['predictor.blocks.{0}']\nuse_reentrant: false\n"
    )
    sharding = f"--use-torch-fsdp2 --fsdp2-config-path {path} " if ranks > 1 else ""
    outcome = tiny.done(STEPS + sharding + f"--torch-compile --micro-batch-size {IMAGES}", ranks)
    assert outcome.losses.keys() == plain.keys()
    for iteration, loss in plain.items():  # fused kernels round float32 differently
        assert outcome.losses[iteration] == pytest.approx(loss, rel=1e-5), iteration


@pytest.mark.parametrize(
    ("backend", "use_reentrant"),
    [("aot_eager", False), *(pytest.param("inductor", way, marks=pytest.mark.extended) for way in (False, True))],
)
def test_compiled_blocks_have_the_gradients_of_others(monkeypatch, backend, use_reentrant):
    """Recomputed ones too; by aot_eager graphs are made of them as ever, and no code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.predictor = DiT(DiTConfig(input_size=8, patch_size=4, num_classes=3, num_layers=3, **SIZES))
    for parameter in model.predictor.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(IMAGES, 4, 8, 8, requires_grad=True)  # (reentrant recompute wants a gradient to flow into it)

    def gradients():
        model.predictor(x, torch.arange(IMAGES) * 100, torch.arange(IMAGES) % 4).square().mean().backward()
        found = {name: p.grad for name, p in model.predictor.named_parameters() if p.requires_grad}
        model.predictor.zero_grad(set_to_none=True)
        return found

    wanted = gradients()
    runtime.compile_blocks(model.predictor.blocks)
    recompute(model, Fsdp2Config(recompute_modules=("predictor.blocks.{*}",), use_reentrant=use_reentrant))
    for name, gradient in gradients().items():
        error = (gradient - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < 1e-5, f"{name}: {error:.1e}"  # (1e-6 found; tokens laid out otherwise gave 1e-1)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # three blocks share them


@pytest.mark.extended
@pytest.mark.parametrize(("shapes", "graphs"), [(4, 3), (100, 1)], ids=["a graph for each length", "one for all"])
def test_graphs_of_several_shapes_are_bounded(monkeypatch, shapes, graphs):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if graphs > 1:  # to count them no code need be made of them; those of one shape have theirs above
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = DiT(DiTConfig(input_size=8, num_classes=3, num_layers=2, **SIZES))
    runtime.compile_blocks(model.blocks, shapes)
    with torch.no_grad():
        for height, width in ((8, 8), (8, 12), (12, 8), (16, 8), (8, 12)):  # 16, 24, 24 and 32 tokens
            model(torch.randn(2, 4, height, width), torch.tensor([5.0, 900.0]), torch.tensor([0, 3]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_tensorboard_has_the_share_of_the_peak(tiny, plain):
    from mindspeed_mm_dit.configs.model import load_model_config

    flop = train_flop(load_model_config(tiny.folder / "model.json").predictor)
    steps, rates = read_scalar(tiny.folder / "board", "train/images_per_second")
    same_steps, shares = read_scalar(tiny.folder / "board", "train/mfu")
    assert steps.tolist() == same_steps.tolist() == list(plain)
    np.testing.assert_allclose(shares, rates * flop / 0.5e12, rtol=1e-5)


FLAGS = "--train-iters {} --global-batch-size 64 --lr 1e-3 --save out --load out "


def content(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_dry_run_says_what_would_be_trained_and_leaves_nothing(tiny):
    before = content(tiny.folder)
    outcome = tiny.done(FLAGS.format(200) + "--dry-run", ranks=2)
    assert "dit, 50,768 parameters" in outcome.output and "each of 400 images 32" in outcome.output
    assert outcome.output.count("dry run: every check passed") == 1
    assert "ready in" not in outcome.output and content(tiny.folder) == before
    assert tiny.run(FLAGS.format(2)).code == 0
    before = content(tiny.folder)
    outcome = tiny.done(FLAGS.format(5) + "--dry-run")
    assert "from iteration 2 (128 samples) on" in outcome.output and content(tiny.folder) == before


SHARDING = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"}
COMPILER = {"torch._dynamo", "sympy"}
OTHERS = {"sklearn", "scipy", "transformers", "diffusers", "matplotlib", "pyarrow", "av", "tensorboard", "megatron"}

LIST = """
import runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("IMPORTED", *sys.modules)
"""


def imported(command: list[str], folder) -> set[str]:
    """Run a script, its path and flags, to the end in ``folder`` and return the names of the modules it imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    code = f"import sys; sys.argv = {command!r}\n{LIST}"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("IMPORTED ")[2].split())


def test_help_and_the_first_step_import_what_they_need(tiny):
    found = imported([tiny.command("")[1], "--host", "standalone", "--help"], tiny.folder)
    assert not found & ({"torch", "mindspore", "PIL"} | OTHERS)
    flags = "--train-iters 1 --global-batch-size 4 --lr 1e-3 --log-interval 1"
    found = imported(tiny.command(flags)[1:], tiny.folder)
    assert "torch" in found and not found & (SHARDING | COMPILER | OTHERS)
