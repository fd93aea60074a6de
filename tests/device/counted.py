"""The device of these tests, and what it did since the last ``reset``: the device apart, or the GPU that
MM_DIT_TEST_GPUS names.

A GPU counts how often the host waited for it (PyTorch's sync debug mode) and its memory, and no operators or bytes.
"""

import functools
import warnings
from typing import Any

import pytest
import torch

from tests.forked import DEVICE, GPUS, PATH

KIND = "npu" if DEVICE in PATH else "cuda" if GPUS else ""
"""The device's type; empty where there is none."""
CLOSE = 5e-5 if KIND == "cuda" else 1e-6
"""How far, relatively, float32 losses may be from a CPU's: a GPU's kernels add in another order."""
LOOSE = 10 * CLOSE
"""The same of weights after some steps of Adam."""
apart_alone = pytest.mark.skipif(KIND == "cuda", reason="is counted by the device apart alone")
"""Mark of tests that a GPU cannot answer."""
_waited_at: list[str] = []


def reset() -> None:
    """Count from zero; the most bytes in use begin at those that are."""
    if KIND == "npu":
        torch.npu.reset()
        return
    _note_waits()
    torch.cuda.reset_peak_memory_stats()
    _waited_at.clear()


def counts() -> dict[str, Any]:
    """Return waits of the host and where, bytes in use, and what else the device counts."""
    if KIND == "npu":
        return torch.npu.counts()
    memory = {"device_bytes": torch.cuda.memory_allocated(), "most_device_bytes": torch.cuda.max_memory_allocated()}
    return {"waits": len(_waited_at), "waited_at": [*_waited_at], "operators": {}, "bytes_to_host": 0, **memory}


@functools.cache
def _note_waits() -> None:
    """Have PyTorch warn of each wait, and note where it was."""
    show = warnings.showwarning

    def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            _waited_at.append(f"{filename}:{lineno}")
        else:
            show(message, category, filename, lineno, *rest)

    warnings.showwarning = note
    warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
    torch.cuda.set_sync_debug_mode("warn")
