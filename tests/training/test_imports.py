"""What a process may not import before it needs it: each of these costs as much CPU as a second of training."""

import os
import subprocess
import sys

from tests.conftest import ROOT

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


def test_help_needs_no_framework(tiny):
    found = imported([tiny.command("")[1], "--host", "standalone", "--help"], tiny.folder)
    assert not found & ({"torch", "mindspore", "PIL"} | OTHERS)


def test_the_first_step_needs_no_sharding_no_compiler_and_nothing_that_draws(tiny):
    flags = "--train-iters 1 --global-batch-size 4 --lr 1e-3 --log-interval 1"
    found = imported(tiny.command(flags)[1:], tiny.folder)
    assert "torch" in found and not found & (SHARDING | COMPILER | OTHERS)
