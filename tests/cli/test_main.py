"""What every command does alike."""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.tools.visualize import plot
from tests.conftest import GOLDEN, ROOT


def test_ctrl_c_prints_one_line_and_returns_130(monkeypatch, capfd):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "run", interrupted)
    assert main(["plot", "x.log"]) == 130
    assert capfd.readouterr().err == "interrupted\n"


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("plot none.log --output /dev/null/a.png", "--output = /dev/null/a.png"),
        ("convert CHECKPOINT /dev/null/a.ckpt", "TARGET = /dev/null"),
        ("cache-latents --model MODEL --data DATA --output /dev/null", "--output = /dev/null"),
        ("cache-latents --model MODEL --data DATA --output x --num-workers -1", "--num-workers = -1"),
        ("cache-latents --model none.json --data DATA --output x", "--model = none.json"),
        ("cache-latents --model MODEL --data none.json --output x", "--data = none.json"),
        ("smaple", "'sample'"),
    ],
)
def test_commands_are_refused_before_any_work(capsys, argv, message):
    places = {
        "CHECKPOINT": str(GOLDEN / "dit_tiny_p2.pt"),
        "MODEL": str(ROOT / "examples/dit/imagenet256/model.json"),
        "DATA": str(ROOT / "examples/dit/imagenet256/data.json"),
    }
    assert main([places.get(word, word) for word in argv.split()]) == 2
    assert message in capsys.readouterr().err


def test_error_of_the_system_is_one_line(monkeypatch, capsys):
    for error, said in ((OSError(28, "No space left", "a.png"), "a.png: No space left\n"), (OSError("odd"), "odd\n")):

        def failing(args, error=error):
            raise error

        monkeypatch.setattr(plot, "run", failing)
        assert main(["plot", "x.log"]) == 2
        written = capsys.readouterr().err
        assert written.startswith("PlatformError: ") and written.endswith(said) and written.count("\n") == 1


def test_command_whose_reader_has_ended_prints_nothing():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from mindspeed_mm_dit.cli.main import main; sys.exit(main(['prove', '--list']))"
    environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
