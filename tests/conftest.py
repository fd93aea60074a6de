"""The framework of this test run: MM_DIT_TEST_FRAMEWORK = pytorch (default) or mindspore, one process each."""

import importlib
import os

import pytest

FRAMEWORK = os.environ.get("MM_DIT_TEST_FRAMEWORK", "pytorch")


@pytest.fixture(scope="session")
def framework():
    """The active framework's ``nn``, ``ops`` and ``runtime``; skips where it is not installed."""
    from mindspeed_mm_dit import framework as seam
    from mindspeed_mm_dit.errors import PlatformError

    try:
        seam.activate(FRAMEWORK)
    except PlatformError as error:
        pytest.skip(str(error))
    return seam


@pytest.fixture
def mindspore(framework):
    """MindSpore, for tests of its side alone; skips where another framework is active."""
    if framework.active() != "mindspore":
        pytest.skip("asks for MM_DIT_TEST_FRAMEWORK=mindspore")
    return importlib.import_module("mindspore")
