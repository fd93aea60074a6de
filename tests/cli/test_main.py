"""What every command does alike; mm-dit train: from a folder, and by an embedded name."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import mindspeed_mm_dit
from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.arguments import ENTRY_SCRIPT, config_folder, embedded_configs
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.tools.visualize import plot
from mindspeed_mm_dit.training.launch import Launch
from mindspeed_mm_dit.training.mindspore import launch as mindspore_launch
from tests.conftest import GOLDEN, ROOT
from tests.tools.tables import refusals


def test_ctrl_c_and_errors_of_the_system_are_one_line(monkeypatch, capfd):
    for error, code, said in (
        (KeyboardInterrupt(), 130, "interrupted\n"), (OSError("odd"), 2, "odd.\n"),
        (OSError(28, "No space left", "a.png"), 2, "a.png cannot be used: No space left.\n"),
    ):  # fmt: skip
        monkeypatch.setattr(plot, "run", Mock(side_effect=error))
        assert main(["plot", "x.log"]) == code
        written = capfd.readouterr().err
        assert written == said if code == 130 else written.startswith("PlatformError: ")
        assert written.endswith(said) and written.count("\n") == 1


def test_missing_packages_name_their_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    setup = (ROOT / "setup.py").read_text()
    for command, record in COMMANDS.items():
        if record.packages:
            pytest.raises(PlatformError, record.check, command).match(rf"mm-dit {command} needs .* \[{record.extra}\]")
            assert f'"{record.extra}": ' in setup


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_before_training_prints_on_the_first_rank_alone(rank):
    code = (
        "import os, signal, sys\n"
        "from mindspeed_mm_dit.hosts import registry\n"
        "registry.find_host = lambda *given: os.kill(os.getpid(), signal.SIGINT)\n"
        "registry.choose_host([])"
    )
    launcher = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = {"PYTHONPATH": str(ROOT), **launcher}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n" if rank == "0" else "")


@refusals(f"""
plot none.log --output /dev/null/a.png
convert {GOLDEN}/dit_tiny_p2.pt /dev/null/a.ckpt | TARGET = /dev/null
cache-latents --model MODEL --data DATA --output /dev/null
cache-latents --model MODEL --data DATA --output x --num-workers -1
cache-latents --data DATA --output x --model none.json
cache-latents --model MODEL --output x --data none.json
smaple | 'sample'
""")
def test_commands_are_refused_before_any_work(capsys, flags, named):
    places = {word: str(ROOT / f"examples/dit/imagenet256/{word.lower()}.json") for word in ("MODEL", "DATA")}
    assert main([places.get(word, word) for word in flags.split()]) == 2
    assert named in capsys.readouterr().err


def test_command_whose_reader_has_ended_prints_nothing():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from mindspeed_mm_dit.cli.main import main; sys.exit(main(['prove', '--list']))"
    environment, command = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}, [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_help_needs_no_framework():
    code = "import sys; from mindspeed_mm_dit.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'mindspore', 'matplotlib', 'sklearn'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_configs_of_the_examples_are_embedded(tmp_path, monkeypatch):
    folders = {path.parent.name for path in (ROOT / "examples/dit").glob("*/model.json")}
    assert set(embedded_configs()) == {"digits", *folders}
    assert config_folder("digits") == ROOT / "examples/dit" and ENTRY_SCRIPT == ROOT / "pretrain_dit.py"
    monkeypatch.chdir(tmp_path)  # a folder comes before an embedded name
    Path("digits").mkdir()
    assert config_folder("digits") == ROOT / "examples/dit"
    Path("digits/train.args").touch()
    assert config_folder("digits") == Path("digits")


def test_missing_config_files_are_named_together(tmp_path, capsys):
    pytest.raises(ConfigError, config_folder, "digts").match("'digits'")
    with pytest.raises(ConfigError) as caught:
        config_folder(str(tmp_path))
    assert all(name in str(caught.value) for name in ("model.json", "data.json", "train.args"))
    (tmp_path / "train.args").write_text("--use-torch-fsdp2 --mm-model other.json")
    assert main(["train", str(tmp_path)]) == 2
    assert "lacks data.json, fsdp2.yaml" in capsys.readouterr().err


def test_python_m_is_mm_dit():
    command = [sys.executable, "-m", "mindspeed_mm_dit", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mm-dit {mindspeed_mm_dit.__version__}\n")


def test_dry_run_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "mindspeed_mm_dit", "train", "digits", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1,797 images" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_msrun_is_that_of_the_interpreter(tmp_path, monkeypatch):
    (tmp_path / "python").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python3")
    launched = mindspore_launch._environment(Launch(1, 1, 0, "127.0.0.1", 1))
    assert shutil.which("python", path=launched["PATH"]) == f"{tmp_path}/python"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    pytest.raises(PlatformError, mindspore_launch._check_msrun).match("MindSpore")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    mindspore_launch._check_msrun()
    (tmp_path / "python").unlink()
    pytest.raises(PlatformError, mindspore_launch._check_msrun).match(f"none next to {tmp_path}/python3")
