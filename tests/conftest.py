"""Fixtures shared by all tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "data"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: as many runs at a time as there are cores


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """Reference values of the published DiT."""
    with np.load(GOLDEN / "dit_tiny_p2.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as an image folder."""
    from mindspeed_mm_dit.data.builtin import write_digits

    folder = tmp_path_factory.mktemp("data") / "digits"
    write_digits(folder)
    return folder


@pytest.fixture
def model_json() -> dict:
    """The embedded default's model.json."""
    return json.loads((ROOT / "examples/dit/model.json").read_text())
