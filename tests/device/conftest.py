"""These tests run on a device apart (``make test-device``) or on a GPU (MM_DIT_TEST_GPUS=0); else they are skipped."""

from pathlib import Path

import pytest

from tests.device import counted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where there is no such device."""
    if not counted.KIND:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no device here: make test-device"))


@pytest.fixture(autouse=True)
def counted_from_zero(request):
    if counted.KIND:
        counted.reset()
