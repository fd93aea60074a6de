"""What is missing or too old is one line that names it."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework import activate


@pytest.mark.parametrize("version", ["2.6.0+cpu", "1.13.1"])
def test_a_pytorch_that_is_too_old_is_named(
    framework: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(PlatformError, match=rf"{version.replace('+', '.')} is too old\n.*2\.7 or newer"):
        activate(framework.active())


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cu130", "3.0"])
def test_a_newer_one_is_taken(framework: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    activate(framework.active())


def test_a_missing_megatron_core_is_named_before_the_ranks_meet(
    framework: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if framework.active() != "pytorch":
        pytest.skip("MindSpore needs no megatron-core")
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(PlatformError, match=r"needs megatron-core.*\n.*pip install megatron-core"):
        framework.runtime.initialize(None, 4, 8)
