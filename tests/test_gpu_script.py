"""The script that measures on a GPU runs at tiny sizes on a CPU, so that it is ready on the day."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.ranks
@pytest.mark.parametrize(
    "part", ["train", "sample", "networks", "loader", pytest.param("right", marks=pytest.mark.campaign)]
)
def test_every_part_leaves_its_results(tmp_path, part):
    given = {"SIZE": "tiny", "RESULTS": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), part], env={**os.environ, **given}, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    if part != "right":
        (results,) = tmp_path.glob("*.md")
        assert "| " in results.read_text() or "images/s" in results.read_text()
