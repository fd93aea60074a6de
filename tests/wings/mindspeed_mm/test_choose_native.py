"""Which of MindSpeed-MM's two routes --host auto takes, and what stops the native engine; no tree is needed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.hosts import choose
from mindspeed_mm_dit.wings.mindspeed_mm.megatron import record as megatron
from mindspeed_mm_dit.wings.mindspeed_mm.native import contract
from mindspeed_mm_dit.wings.mindspeed_mm.native import record as native


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


@pytest.mark.parametrize(
    ("megatron_is_here", "engine_is_here", "asked", "taken", "said"),
    [
        (False, True, "", "mindspeed-mm-native", "takes mindspeed-mm-native: megatron.training cannot be found, which"),
        (True, True, "", "mindspeed-mm", "takes mindspeed-mm, the old route: Megatron-LM is here"),
        (True, True, "true", "mindspeed-mm-native", "takes mindspeed-mm-native: NON_MEGATRON is true"),
        (True, False, "true", "mindspeed-mm", ""),
        (False, False, "true", "standalone", "mindspeed, mindspeed_mm found, megatron.training not: standalone host"),
    ],
)
def test_auto_says_which_route_it_takes_and_why(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    megatron_is_here: bool, engine_is_here: bool, asked: str, taken: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("NON_MEGATRON", asked)
    if megatron_is_here:
        (engine / "megatron/training").mkdir(parents=True)
    if not engine_is_here:
        shutil.rmtree(engine / "mindspeed_mm/fsdp")
    for module in (megatron, native):
        monkeypatch.setattr(module, "is_installed", lambda name: (engine / name.replace(".", "/")).is_dir())
    assert choose._recognised().name == taken
    printed = capsys.readouterr().err
    assert said in printed and bool(said) == bool(printed)


def test_auto_stays_standalone_under_a_pytorch_that_the_engine_refuses(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "torch_version", lambda: "2.13.0")
    assert choose._recognised().name == "standalone"


def test_a_host_that_there_is_not_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--host = mindspeedmm: is none of auto, .*\n.*Did you mean 'mindspeed-mm'"):
        choose.find_host(["--host", "mindspeedmm"])


def test_the_engine_asks_for_its_own_pytorch(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with pytest.raises(PlatformError, match=r"takes PyTorch 2\.7\.1 or 2\.9\.0, this is 2\.13\.0"):
        contract.check_engine()
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    contract.check_engine()


def test_a_mindspeed_of_before_the_engine_is_named(engine: Path) -> None:
    shutil.rmtree(engine / "mindspeed/fsdp")
    with pytest.raises(PlatformError, match=r"has no mindspeed\.fsdp"):
        contract.check_engine()


def test_an_engine_of_before_what_we_rely_on_is_named_with_what_it_lacks(engine: Path) -> None:
    (engine / "mindspeed_mm/config/config_manager.py").unlink()  # as in v26.0.0
    with pytest.raises(PlatformError, match=r"lacks mindspeed_mm\.config\.config_manager, .*\n.*v26\.1\.0 or master"):
        contract.check_engine("training.plugin")


@pytest.mark.parametrize(
    ("module", "source", "lacking"),
    [
        ("mindspeed_mm/fsdp/utils/register", "model_register = 1", "mindspeed_mm.fsdp.utils.register.data_register"),
        ("mindspeed/fsdp/utils/str_match", "def module_name_match(name): ...", "module_name_match(pattern, string)"),
    ],
)
def test_a_name_that_the_engine_lacks_is_named_before_it_is_imported(
    engine: Path, module: str, source: str, lacking: str
) -> None:
    (engine / f"{module}.py").write_text(source)
    with pytest.raises(PlatformError, match=re.escape(f"{lacking}, which this project relies on")):
        contract.check_engine()


def test_an_engine_that_is_not_here_is_an_error() -> None:
    with pytest.raises(PlatformError, match="mindspeed_mm, mindspeed cannot be found"):
        contract.check_engine()
