"""Compare PyTorch and MindSpore on one machine: training images/s, and the forward pass of a large DiT.

    python benchmarks/frameworks.py --pytorch-python .venv/bin/python --mindspore-python .venv-mindspore/bin/python

Trains the embedded default for a few steps on each framework in turn, interleaved, each in a process of its own. Then
runs DiT-XL/2 with random weights on one sample on both, and compares the outputs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / f"{date.today()}-frameworks.md"
SKIPPED_STEPS = 5
"""The first steps compile and warm up."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch-python", default=sys.executable)
    parser.add_argument("--mindspore-python", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preset", default="DiT-XL/2", help="model of the forward comparison")
    parser.add_argument("--worker", nargs=2, metavar=("FRAMEWORK", "NPZ"), help=argparse.SUPPRESS)
    return parser.parse_args()


def forward(framework: str, preset: str, target: str) -> None:
    """Run one sample through a DiT of random weights, in this process, and write the output."""
    from mindspeed_mm_dit.framework import activate

    activate(framework)
    from mindspeed_mm_dit.configs.dit import PRESETS, DiTConfig
    from mindspeed_mm_dit.framework import ops, runtime
    from mindspeed_mm_dit.models.dit import DiT

    model = DiT(DiTConfig(input_size=32, num_classes=1000, **PRESETS[preset]))
    draw = np.random.default_rng(0)
    shapes = {name: shape for name, shape in runtime.shapes(model).items() if name != "pos_embed"}
    for name, shape in shapes.items():  # one by one: 675 M parameters are held once
        runtime.load_arrays(model, {name: draw.standard_normal(shape, np.float32) * np.float32(0.02)})
    model = runtime.prepare_frozen(model)
    x = ops.tensor(draw.standard_normal((1, 4, 32, 32), np.float32))
    with ops.no_grad():
        output = ops.numpy(model(x, ops.tensor(np.array([500])), ops.tensor(np.array([207]))))
    np.savez(target, output=output)


def milliseconds(python: str, framework: str, steps: int, folder: str) -> list[float]:
    """Train on one framework and return the milliseconds of the steps after the first few."""
    command = [python, str(ROOT / "pretrain_dit.py"), "--host", "standalone", "--ai-framework", framework]
    command += ["--mm-model", str(ROOT / "examples/dit/model.json"), "--mm-data", str(ROOT / "examples/dit/data.json")]
    command += ["--micro-batch-size", "64", "--lr", "1e-3", "--train-iters", str(steps)]
    done = subprocess.run(command, cwd=folder, env=environment(), text=True, capture_output=True, check=True)
    return [float(ms) for ms in re.findall(r"iteration \(ms\): ([\d.]+)", done.stdout)][SKIPPED_STEPS:]


def environment() -> dict[str, str]:
    """Return the environment of a run: this project, and MindSpore's own messages off."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}


def main() -> None:
    """Measure both and write the result file."""
    args = parse()
    if args.worker:
        forward(args.worker[0], args.preset, args.worker[1])
        return
    given = {"pytorch": args.pytorch_python, "mindspore": args.mindspore_python}
    pythons = {name: str(Path(python).absolute()) for name, python in given.items()}  # (runs have own folders)
    rates: dict[str, list[float]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name, python in pythons.items():
                rates[name].append(64_000 / statistics.median(milliseconds(python, name, args.steps, folder)))
        outputs = {}
        for name, python in pythons.items():
            target = f"{folder}/{name}.npz"
            command = [python, __file__, "--mindspore-python", "-", "--preset", args.preset, "--worker", name, target]
            subprocess.run(command, env=environment(), check=True)
            outputs[name] = np.load(target)["output"].astype(np.float64)
    RESULT.write_text(report(args, rates, outputs["pytorch"], outputs["mindspore"]), encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


def report(args: argparse.Namespace, rates: dict[str, list[float]], ours: np.ndarray, theirs: np.ndarray) -> str:
    """Return the result file."""
    relative = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
    median = {name: statistics.median(values) for name, values in rates.items()}
    rows = "\n".join(f"| {n} | {' '.join(f'{v:.0f}' for v in rates[n])} | {median[n]:.0f} |" for n in rates)
    return f"""# PyTorch and MindSpore on one machine

    python benchmarks/frameworks.py --steps {args.steps} --rounds {args.rounds} --preset {args.preset} ...

{date.today()}, CPU, {os.cpu_count()} cores; embedded default, batch 64, one process, interleaved.

| framework | images/s, each round | median |
| --- | --- | --- |
{rows}

MindSpore over PyTorch: {median["mindspore"] / median["pytorch"]:.2f}

{args.preset}, random weights, one sample: relative error {relative:.2e}, mean squared error \
{np.mean((theirs - ours) ** 2):.2e}, largest difference {np.abs(theirs - ours).max():.2e}.
"""


if __name__ == "__main__":
    main()
