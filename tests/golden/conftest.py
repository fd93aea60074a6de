import pytest


@pytest.fixture
def compare(framework):
    """The comparison, on the framework of this test run."""
    from mindspeed_mm_dit.tools.verify.parity import compare

    return compare
