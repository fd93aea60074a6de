"""What is missing or too old is one line that names it."""

import importlib
import importlib.metadata

import pytest

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.framework import activate


@pytest.mark.parametrize("version", ["2.6.0+cpu", "1.13.1"])
def test_a_pytorch_that_is_too_old_is_named(framework, monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(PlatformError, match=rf"{version.replace('+', '.')} is too old\n.*2\.7 or newer"):
        activate(framework.active())


def test_a_newer_one_is_taken(framework, monkeypatch):
    for version in ("2.7.0", "2.13.0+cu130", "3.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        activate(framework.active())


def test_a_second_framework_in_a_process_and_one_that_there_is_not_are_refused(framework):
    other = {"pytorch": "mindspore", "mindspore": "pytorch"}[framework.active()]
    with pytest.raises(PlatformError, match=rf"--ai-framework = {other}: {framework.active()} is already active"):
        activate(other)


def test_a_framework_that_there_is_not_or_that_is_not_here_is_named(framework, monkeypatch):
    monkeypatch.setattr(framework, "_active", None)
    with pytest.raises(PlatformError, match="--ai-framework = jax: must be one of pytorch, mindspore"):
        activate("jax")

    def missing(name):
        raise ModuleNotFoundError("No module named 'mindspore'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(PlatformError, match="--ai-framework = mindspore: cannot be used here: No module"):
        activate("mindspore")
