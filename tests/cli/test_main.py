"""What every command does alike."""

import importlib.util
import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.tools.visualize import plot
from tests.conftest import GOLDEN, ROOT
from tests.tools.tables import refusals


def test_ctrl_c_and_errors_of_the_system_are_one_line(monkeypatch, capfd):
    for error, code, said in (
        (KeyboardInterrupt(), 130, "interrupted\n"), (OSError("odd"), 2, "odd\n"),
        (OSError(28, "No space left", "a.png"), 2, "a.png: No space left\n"),
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
            with pytest.raises(PlatformError, match=rf"mm-dit {command}: (?s:.*) \[{record.extra}\]"):
                record.check(command)
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
