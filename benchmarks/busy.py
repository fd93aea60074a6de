"""Measure what another process on the machine costs a run, for each way in which the run's threads wait.

    python benchmarks/busy.py [--rounds 5] [--steps 100] [--busy 1] [--framework pytorch]

Each round trains the digits for --steps steps in every way, alone and then beside busy processes, started by
examples/dit/pretrain.sh as a user would. Times are the ones that the run prints, without its first half.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import Report

ROOT = Path(__file__).parent.parent
WAYS = {
    "as the launcher has it": {},
    "PyTorch's default": {"GOMP_SPINCOUNT": "300000"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "no spins": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
"""Variables of each way. Threads that wait look for work so many times before they sleep."""
FLAGS = "--log-interval {} --train-iters {} --global-batch-size 64 --lr 1e-3"
_MILLISECONDS = re.compile(r"elapsed time per iteration \(ms\): (\S+)")


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    report = Report("busy", f"A step of the digits beside {args.busy} busy process(es), {args.framework}")
    alone: dict[str, list[float]] = {name: [] for name in WAYS}
    extra_images: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name in list(WAYS)[:: 1 if number % 2 else -1]:
                alone[name].append(seconds_a_step(args, WAYS[name], folder))
                with others(args.busy):
                    extra_images[name].append(seconds_a_step(args, WAYS[name], folder))
    report.table(
        ["threads", "ms alone", "of PyTorch's default", "ms beside others", "of alone"],
        [row(name, alone, extra_images) for name in WAYS],
    )
    report.raw({f"{name}, alone": values for name, values in alone.items()})
    report.raw({f"{name}, beside": values for name, values in extra_images.items()})
    report.save()


def row(name: str, alone: dict[str, list[float]], extra_images: dict[str, list[float]]) -> list[str]:
    """Return a line of the table: medians, and medians of the ratios of a round."""

    def ratio(ours: list[float], theirs: list[float]) -> str:
        return f"{statistics.median(a / b for a, b in zip(ours, theirs)):.2f}"

    return [
        name,
        f"{1000 * statistics.median(alone[name]):.1f}",
        ratio(alone[name], alone["PyTorch's default"]),
        f"{1000 * statistics.median(extra_images[name]):.1f}",
        ratio(extra_images[name], alone[name]),
    ]


def seconds_a_step(args: argparse.Namespace, way: dict[str, str], folder: str) -> float:
    """Train the digits for ``args.steps`` steps and return the seconds of a step in the second half of them."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    config = Path(folder, "config")
    config.mkdir(exist_ok=True)
    for name in ("model.json", "data.json", "fsdp2.yaml"):
        (config / name).write_text((ROOT / "examples/dit" / name).read_text())
    (config / "train.args").write_text(FLAGS.format(args.steps // 2, args.steps))
    done = subprocess.run(
        ["bash", str(ROOT / "examples/dit/pretrain.sh")],
        cwd=folder, env={**own, "CONFIG": str(config), "AI_FRAMEWORK": args.framework, **way},
        capture_output=True, text=True,
    )  # fmt: skip
    found = _MILLISECONDS.findall(done.stdout)
    if done.returncode or not found:
        sys.exit(done.stdout + done.stderr)
    return float(found[-1]) / 1000


@contextlib.contextmanager
def others(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--busy", type=int, default=1, help="processes beside the run")
    parser.add_argument("--framework", default="pytorch", choices=["pytorch", "mindspore"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
