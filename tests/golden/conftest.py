import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import FRAMEWORK

collect_ignore = [] if FRAMEWORK == "pytorch" else ["test_quantised_files.py"]  # (bases in few bits are PyTorch's)


def without(file: Path, folder: Path, *patterns: str) -> Path:
    """Write ``file`` into ``folder`` without the quantities whose names begin as one of ``patterns``; return where."""
    with np.load(file) as whole:
        names = [n for n in whole if not any(re.match(pattern, n.removeprefix("float64/")) for pattern in patterns)]
        np.savez(folder / file.name, **{name: whole[name] for name in names})
    return folder / file.name


@pytest.fixture
def compare(framework):
    from mindspeed_mm_dit.tools.verify.parity import compare

    return compare
