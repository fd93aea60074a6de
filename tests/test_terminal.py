"""What is printed: strangers' names are shown and not obeyed, and a stream that is closed takes everything."""

import os
import subprocess
import sys
import threading

import pytest

from mindspeed_mm_dit import pages, terminal
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.terminal import echo, plain
from tests.conftest import FRAMEWORK, ROOT
from tests.training.launch import Configs

ODD = "cat\x1b[2J\x1b]0;owned\x07\r\x9b1m\u202etac\udce9"
SHOWN = r"cat\x1b[2J\x1b]0;owned\x07\r\x9b1m\u202etac\udce9"


def test_a_name_with_codes_of_a_terminal_is_shown_in_lines_errors_and_pages(tmp_path, capsys):
    echo(f"1 class: {ODD}\n\tall of it")
    assert capsys.readouterr().out == f"1 class: {SHOWN}\n\tall of it\n"
    error = ConfigError(f"{ODD} is {ODD}.").formatted
    assert error.count(SHOWN) == 2 and plain(error) == error
    groups = {f"<b>{ODD}": [(1, b"")]}
    pages.write(tmp_path / "page.html", "gallery.html", title="", groups=groups, width=8, seed=0, settings={ODD: ODD})
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"&lt;b&gt;{SHOWN}" in text and plain(text) == text


CODE = """
import os, subprocess, sys
from mindspeed_mm_dit import pages, terminal
from mindspeed_mm_dit.terminal import echo, logger, open_streams
open_streams()
echo("out"); echo("err", sys.stderr); logger.info("\\udce9 more"); sys.stdin.read()
with open("own", "w") as own:
    assert own.fileno() > 2 and own.write("mine")

subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
os.write(1, b""); os.write(2, b"")
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_opened_to_nowhere_and_no_file_gets_its_number(tmp_path, closed):
    command = f'exec {sys.executable} -c "$CODE" {closed}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CODE": CODE, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own").read_text() == "mine"
    assert done.stdout == ("" if closed.find(">&-") in (0, 4) else "out\n\\udce9 more\nfrom a child\n")


@pytest.mark.extended
@pytest.mark.skipif(FRAMEWORK != "pytorch", reason="one way to close them")
@pytest.mark.parametrize("how", [">&- 2>&-", "2>&1 | head -1"])
def test_a_run_that_nobody_reads_trains_and_saves(tmp_path, few_digits, how):
    configs = Configs.create(tmp_path, few_digits, hidden_size=32, num_layers=1, num_heads=2)
    words = configs.command("--train-iters 2 --micro-batch-size 8 --lr 1e-2 --save ck")
    command = f'set -o pipefail; "$@" {how}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command, "x", *words], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done
    assert (tmp_path / "ck" / "iter_0000002" / "run.json").is_file()


def test_what_takes_long_is_said_in_a_log_and_what_does_not_is_not(monkeypatch):
    said, was_said = [], threading.Event()
    with terminal.doing("saving", said.append):
        pass
    monkeypatch.setattr(terminal, "LONG_SECONDS", 0)
    with terminal.doing("drawing samples", lambda text: (said.append(text), was_said.set())):
        assert was_said.wait(60)
    assert said == [" drawing samples ... (for 0 s so far)"]


@pytest.mark.parametrize("way", [{"total": 8, "items": None}, {"total": 8, "items": range(8)}])
def test_a_log_gets_a_line_of_progress_now_and_then_and_short_work_none(monkeypatch, capsys, way):
    def work() -> str:
        with terminal.progress("encoding", **way, unit="image") as bar:
            for _ in bar if way["items"] else range(8):
                None if way["items"] else bar.update()
        return capsys.readouterr().err

    assert work() == ""
    monkeypatch.setattr(terminal, "LONG_SECONDS", 0)
    lines = work().splitlines()
    assert lines[-1].startswith(" encoding: 8 of 8 images in 00:00")
    assert all(line.startswith(" encoding: ") and "\r" not in line for line in lines)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert work() == ""
