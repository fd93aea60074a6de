"""Which of MindSpeed-MM's two routes --host auto takes, and what stops the native engine; no tree is needed."""

import re
import shutil
import subprocess
import sys

import pytest
import torch

from mindspeed_mm_dit.checkpoint.store import TRACKER
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError
from mindspeed_mm_dit.hosts import registry
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import newest
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import run as megatron
from mindspeed_mm_dit.integrations.mindspeed_mm.native import attach as native
from mindspeed_mm_dit.integrations.mindspeed_mm.native import contract
from tests.conftest import ROOT


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Trees that look like MindSpeed-MM and MindSpeed with the native engine."""
    for name in ("mindspeed", "mindspeed_mm"):
        (tmp_path / name / "fsdp/train").mkdir(parents=True)
    (tmp_path / "mindspeed_mm" / contract.TRAINER).write_text("")
    for module, names in contract.RELIED_ON.items():
        file = tmp_path / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        defined = (f"{name} = 1" if of is None else f"def {name}({', '.join(of)}): ..." for name, of in names.items())
        file.write_text("\n".join(defined))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("NON_MEGATRON", raising=False)
    monkeypatch.setattr(native, "torch_version", lambda: "2.7.1")
    return tmp_path


@pytest.mark.parametrize(("megatron_is_here", "engine_is_here", "asked", "taken"), [
    (False, True, "", "mindspeed-mm-native"), (True, True, "", "mindspeed-mm"),
    (True, True, "true", "mindspeed-mm-native"), (True, False, "true", "mindspeed-mm"),
    (False, False, "true", "standalone"),
])  # fmt: skip
def test_auto_takes_the_route_that_is_installed(engine, monkeypatch, megatron_is_here, engine_is_here, asked, taken):
    monkeypatch.setenv("NON_MEGATRON", asked)
    if megatron_is_here:
        (engine / "megatron/training").mkdir(parents=True)
    if not engine_is_here:
        shutil.rmtree(engine / "mindspeed_mm/fsdp")
    for module in (megatron, native):
        monkeypatch.setattr(module, "is_installed", lambda name: (engine / name.replace(".", "/")).is_dir())
    assert registry._detect_host().name == taken


def test_unknown_host_and_engine_that_is_not_installed_are_refused():
    refused = pytest.raises(ConfigError, registry.find_host, ["--host", "mindspeedmm"])
    refused.match("(?s)--host = mindspeedmm.*'mindspeed-mm'")
    pytest.raises(PlatformError, contract.check_engine).match("mindspeed_mm and mindspeed")


def test_engine_refuses_other_versions_of_pytorch(engine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    pytest.raises(PlatformError, contract.check_engine).match(r"2\.13\.0")
    monkeypatch.setattr(native, "torch_version", lambda: "2.13.0")
    assert registry._detect_host().name == "standalone"
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    contract.check_engine()


@pytest.mark.parametrize(("module", "source", "lacking"), [
    ("mindspeed_mm/fsdp/utils/register.py", "model_register = 1", "mindspeed_mm.fsdp.utils.register.data_register"),
    ("mindspeed/fsdp/utils/str_match.py", "def module_name_match(name): ...", "module_name_match(pattern, string)"),
    ("mindspeed_mm/config/config_manager.py", None, "mindspeed_mm.config.config_manager"),  # as in v26.0.0
    ("mindspeed/fsdp", None, "mindspeed.fsdp"),
])  # fmt: skip
def test_name_that_the_engine_lacks_is_refused_before_import(engine, module, source, lacking):
    if source is not None:
        (engine / module).write_text(source)
    elif (engine / module).is_dir():
        shutil.rmtree(engine / module)
    else:
        (engine / module).unlink()
    pytest.raises(PlatformError, contract.check_engine).match(re.escape(lacking))


def test_plugin_of_a_yaml_attaches_when_it_is_imported():
    command = [sys.executable, "-c", "import mindspeed_mm_dit.hosts.native"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "mindspeed_mm_dit.hosts.native needs mindspeed_mm and mindspeed" in done.stderr


@pytest.mark.parametrize(
    ("said", "expected"), [("", "12"), ("\ufffd", "says"), ("13", "iter_0000013"), ("release", "release")]
)
def test_tracker_that_names_no_checkpoint_is_refused(tmp_path, said, expected):
    for iteration in (4, 12):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / TRACKER).write_text(said)
    with pytest.raises(CheckpointError) as found:
        newest("--load = here", str(tmp_path))
    assert "--load = here" in str(found.value) and expected in str(found.value)


def test_tracker_names_an_iteration_or_a_release(tmp_path):
    for name, said in (("iter_0000004", "4\n"), ("release", "release")):
        (tmp_path / name).mkdir()
        (tmp_path / TRACKER).write_text(said)
        assert newest("--load = here", str(tmp_path)) == tmp_path / name
