"""These tests run on a device apart (``make test-device``), and are skipped where PyTorch has loaded none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import DEVICE, PATH


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where there is no such device."""
    if DEVICE not in PATH:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no device apart here: make test-device"))


@pytest.fixture(autouse=True)
def counted_from_zero(request):
    """Each test counts for itself."""
    if DEVICE in PATH:
        import torch

        torch.npu.reset()
