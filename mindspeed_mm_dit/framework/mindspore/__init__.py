"""MindSpore's side of the seam."""

import mindspore  # noqa: F401  (activation must fail here, by name, when it is not installed)
import numpy

from mindspeed_mm_dit.errors import PlatformError


def check_numpy(version: str) -> None:
    """Refuse NumPy 2, beside which MindSpore imports but cannot execute (its metadata admits it)."""
    if int(version.split(".")[0]) >= 2:
        raise PlatformError("--ai-framework = mindspore", f"does not run with NumPy {version}",
                            "pip install 'numpy<2'")  # fmt: skip


check_numpy(numpy.__version__)
