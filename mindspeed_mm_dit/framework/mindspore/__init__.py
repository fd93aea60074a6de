"""MindSpore's side of the framework interface."""

import importlib.util
import os

import mindspore  # noqa: F401  (activation must fail here, by name, when it is not installed)
import numpy

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.terminal import logger


def check_numpy(version: str) -> None:
    """Refuse NumPy 2: MindSpore imports with it (its metadata allows it) but cannot execute."""
    if int(version.split(".")[0]) >= 2:
        raise PlatformError(f"--ai-framework = mindspore does not run with NumPy {version}. Run: pip install 'numpy<2'")


def note_msadapter() -> None:
    """Print a note if MSAdapter, which lets `torch` mean MindSpore, is installed as well: it is not used."""
    if importlib.util.find_spec("msadapter") is not None and os.environ.get("RANK_ID", "0") == "0":
        logger.warning("note: MSAdapter is installed too; the standalone host uses MindSpore directly")


check_numpy(numpy.__version__)
note_msadapter()
