"""The notebooks of examples/notebooks run from top to bottom."""

from __future__ import annotations

import os
import re

import pytest

from tests.conftest import FRAMEWORK, ROOT
from tests.forked import PATIENCE_SECONDS

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="runs on PyTorch")
QUICK = {"STEPS, DRAW_STEPS = .*": "STEPS, DRAW_STEPS = 2, 2",
         "--train-iters": "--micro-batch-size 4 --global-batch-size 4 --lr-warmup-iters 0 --train-iters"}  # fmt: skip
SHOWS = {"images": "samples.path", "text_to_video": "digits-0000.gif"}
"""Of each notebook, a word of its last cell."""


@pytest.mark.extended
@pytest.mark.parametrize("name", SHOWS)
def test_a_notebook_runs_and_shows_pictures(name, tmp_path, monkeypatch):
    if name == "text_to_video":
        pytest.importorskip("av")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    notebook = nbformat.read(ROOT / f"examples/notebooks/{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "is kept without outputs"
    for cell in notebook.cells:
        for before, quick in QUICK.items():
            cell.source = re.sub(before, quick, cell.source)
    nbclient.NotebookClient(
        notebook, timeout=PATIENCE_SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    last = notebook.cells[-1]
    pictures = [kind for output in last.outputs for kind in output.get("data", {}) if kind.startswith("image/")]
    assert SHOWS[name] in last.source and pictures
