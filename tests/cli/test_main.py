"""What every command does alike."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.wings.view.cli import plot
from tests.conftest import GOLDEN, ROOT


def test_ctrl_c_says_one_line_and_returns_130(monkeypatch, capfd):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "run", interrupted)
    assert main(["plot", "x.log"]) == 130
    assert capfd.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("command", [name for name, record in COMMANDS.items() if record.packages])
def test_a_command_whose_packages_are_missing_names_its_extra(command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    record = COMMANDS[command]
    with pytest.raises(PlatformError, match=rf"mm-dit {command}: needs .*\n.*pip install .* extra \[{record.extra}\]"):
        record.check(command)
    assert f'"{record.extra}": ' in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_before_training_begins_says_one_line_on_the_first_rank(rank):
    code = (
        "import os, signal, sys\n"
        "from mindspeed_mm_dit.hosts import choose\n"
        "choose.find_host = lambda *given: os.kill(os.getpid(), signal.SIGINT)\n"
        "choose.choose_host([])"
    )
    launcher = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = {"PYTHONPATH": str(ROOT), **launcher}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n" if rank == "0" else "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("plot none.log --output /dev/null/a.png", "--output = /dev/null/a.png: the folder /dev/null cannot be made"),
        ("convert CHECKPOINT /dev/null/a.ckpt", "folder of TARGET = /dev/null: is a file"),
        ("cache-latents --model MODEL --data DATA --output /dev/null", "--output = /dev/null: is a file"),
        ("cache-latents --model MODEL --data DATA --output x --num-workers -1", "--num-workers = -1: must be at least"),
        ("cache-latents --model none.json --data DATA --output x", "--model = none.json: cannot be read"),
        ("cache-latents --model MODEL --data none.json --output x", "--data = none.json: cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_work(capsys, argv, message):
    places = {
        "CHECKPOINT": str(GOLDEN / "dit_tiny_p2.pt"),
        "MODEL": str(ROOT / "examples/dit/imagenet256/model.json"),
        "DATA": str(ROOT / "examples/dit/imagenet256/data.json"),
    }
    assert main([places.get(word, word) for word in argv.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(28, "No space left on device", "a.png"), 2, "PlatformError: a.png: No space left on device\n"),
        (OSError("odd"), 2, "PlatformError: a file: odd\n"),
    ],
)
def test_an_error_of_the_system_is_one_line(monkeypatch, capsys, error, code, said):
    def failing(args):
        raise error

    monkeypatch.setattr(plot, "run", failing)
    assert (main(["plot", "x.log"]), capsys.readouterr().err) == (code, said)


def test_a_command_whose_reader_has_ended_says_nothing_and_has_the_code_of_the_signal():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from mindspeed_mm_dit.cli.main import main; sys.exit(main(['prove', '--list']))"
    environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_layouts_of_prove_are_listed_without_a_config(capsys):
    assert main(["prove", "--list"]) == 0
    assert {"1 rank, FSDP2", "2 ranks, FSDP2"} & set(capsys.readouterr().out.splitlines())
