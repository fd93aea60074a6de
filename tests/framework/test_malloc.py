"""Freed memory is kept where glibc can be told so, and the user's own settings are left alone."""

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from mindspeed_mm_dit.framework.malloc import keep_freed_memory
kept = "keep" in sys.argv and keep_freed_memory()
for _ in range(10):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(2**24)  # 64 MiB
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(*words: str, **environment: str) -> tuple[bool, int]:
    """Return (whether freed memory is kept, pages the system had to clear for five tensors of 64 MiB)."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", CODE, *words]
    kept, count = subprocess.check_output(command, env={**clean, **environment}, text=True).split()
    return kept == "True", int(count)


@pytest.mark.extended
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_is_kept_is_not_cleared_again():
    assert pages() == (False, pytest.approx(5 * 2**26 / os.sysconf("SC_PAGESIZE"), rel=0.1))
    kept, count = pages("keep")
    assert kept and count < 100
