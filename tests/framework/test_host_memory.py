"""The memory of this machine is what is installed, or less in a container that has a limit."""

import os

import pytest

from mindspeed_mm_dit.framework import contract

INSTALLED = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("limit", "found"), [("1048576\n", 2**20), ("max\n", INSTALLED), (f"{2**63}\n", INSTALLED)])
def test_the_smaller_of_installed_and_allowed_counts(tmp_path, monkeypatch, limit, found):
    (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(contract, "_LIMITS", (tmp_path / "limit", tmp_path / "no such file"))
    assert contract.host_memory_bytes() == found
