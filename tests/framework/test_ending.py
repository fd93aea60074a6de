"""How a run ends on what is wrong: who says it, what the shell is told, and what the launcher finds."""

import json
import subprocess
import sys
import time

import pytest

from mindspeed_mm_dit.framework.exits import SECONDS_TO_REPORT
from tests.conftest import ROOT
from tests.forked import PATIENCE_SECONDS

CODE = """
import signal, sys, time
from mindspeed_mm_dit.errors import ConfigError, StepError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.exits import (
    exit_on_sigint, defer_sigint, raise_outside_imports)
from mindspeed_mm_dit.framework.exits import end, print_one_line_on_sigint
print("said before")
{}
"""


def ended(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    how = {"env": {"PYTHONPATH": str(ROOT), **variables}, "text": True, "capture_output": True}
    return subprocess.run([sys.executable, "-c", CODE.format(code)], timeout=PATIENCE_SECONDS, **how)


ERROR = "ConfigError('a', 'is wrong')"


@pytest.mark.parametrize(
    ("error", "variables", "says"),
    [
        (f"{ERROR}, collective_error=True", {}, True),
        (ERROR, {"LOCAL_RANK": "1"}, True),
        (f"{ERROR}, collective_error=True", {"LOCAL_RANK": "1"}, False),
        (f"{ERROR}, collective_error=True", {"RANK_ID": "1"}, False),
    ],
)
def test_what_all_ranks_find_is_said_by_one(error, variables, says):
    started = time.monotonic()
    process = ended(f"end({error})", **variables)
    assert process.returncode == 2 and process.stdout == "said before\n"
    assert process.stderr == ("\nConfigError: a: is wrong\n" if says else "")
    assert says or time.monotonic() - started > SECONDS_TO_REPORT


@pytest.mark.parametrize("last", ["", f"end({ERROR})", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"])
def test_what_a_process_wrote_for_itself_is_gone_however_it_ends(last, tmp_path):
    """The yaml of a command line for MindSpeed-MM, or its model.json spelled out."""
    code = "from mindspeed_mm_dit.framework.exits import write_temporary_file"
    code += "; assert written('a.yaml', 'x').read_text() == 'x'"
    process = ended(f"exit_on_sigint(); {code}; {last}", TMPDIR=str(tmp_path))
    assert "AssertionError" not in process.stderr and process.stdout == "said before\n"
    assert not list(tmp_path.iterdir())


def test_torchrun_is_left_the_reason_once_a_framework_is_active(tmp_path):
    path = tmp_path / "error.json"
    ended(f"end({ERROR})", TORCHELASTIC_ERROR_FILE=str(path))
    assert not path.exists()
    ended(f"activate('pytorch')\nend({ERROR})", TORCHELASTIC_ERROR_FILE=str(path))
    assert "is wrong" in json.dumps(json.loads(path.read_text()))


def test_an_interrupt_that_nothing_takes_is_one_line_and_code_130():
    process = ended("print_one_line_on_sigint()\nraise KeyboardInterrupt")
    assert (process.returncode, process.stderr) == (130, "interrupted\n")


def test_an_interrupt_ends_a_run_that_has_nothing_to_keep_though_a_library_would_swallow_it():
    process = ended("exit_on_sigint()\n"
                    "try:\n    signal.raise_signal(signal.SIGINT)\n    time.sleep(60)\n"
                    "except KeyboardInterrupt: print('went on')")  # fmt: skip
    assert (process.returncode, process.stdout, process.stderr) == (130, "said before\n", "interrupted\n")


def test_an_interrupt_during_an_import_ends_at_once_and_is_raised_elsewhere(tmp_path):
    (tmp_path / "swallows.py").write_text("import signal\ntry: signal.raise_signal(signal.SIGINT)\n"
                                          "except KeyboardInterrupt: print('went on')")  # fmt: skip
    code = "raise_outside_imports()\ntry: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: import swallows"
    process = ended(code, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (process.returncode, process.stdout, process.stderr) == (130, "said before\n", "interrupted\n")


def test_an_interrupt_waits_for_the_program_that_a_process_becomes_and_its_first_lines():
    process = ended("import os\ndefer_sigint()\nsignal.raise_signal(signal.SIGINT)\nsys.stdout.flush()\n"
                    "again = ['from mindspeed_mm_dit.framework.exits import exit_on_sigint as end']\n"
                    "again += ['print(1, flush=True)', 'end()', 'print(2)']\n"
                    "os.execv(sys.executable, [sys.executable, '-c', chr(10).join(again)])")  # fmt: skip
    assert (process.returncode, process.stdout, process.stderr) == (130, "said before\n1\n", "interrupted\n")
