"""benchmarks/speedrun.py, on a few images."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np

from tests.conftest import ROOT


def test_a_later_call_adds_to_the_results_and_repeats_none(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 100)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.minimum(rng.integers(0, 60, (count, 28, 28)) + 20 * labels[:, None, None], 255).astype(np.uint8)
        for name, header, own in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            (tmp_path / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(bytes(header) + own.tobytes()))
    output = tmp_path / "runs.jsonl"

    def run(*contestants, seeds):
        given = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "benchmarks/speedrun.py"), "--data", str(tmp_path), "--images", "20"]
        command += ["--budgets", "0.001", "--output", str(output), "--seeds", seeds, "--contestants", *contestants]
        subprocess.run(command, env=given, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in output.read_text().splitlines()], output.with_suffix(".md").read_text()

    first, page = run("real", "ours", seeds="1")
    assert [line["contestant"] for line in first] == ["real", "ours"] and first[1]["train_s"] > 0
    assert "| ours, default |" in page and output.with_suffix(".png").exists()
    both, _ = run("real", "ours", seeds="2")
    assert both[:2] == first and [line.get("seed") for line in both] == [None, 0, 1]
    assert run(seeds="1")[0] == both
