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


ERROR = "ConfigError('a is wrong')"


@pytest.mark.parametrize(
    ("is_shared", "variables", "says"),
    [(True, {}, True), (False, {"LOCAL_RANK": "1"}, True), (True, {"LOCAL_RANK": "1"}, False),
     (True, {"RANK_ID": "1"}, False)],
)  # fmt: skip
def test_what_all_ranks_find_is_said_by_one(is_shared, variables, says):
    started = time.monotonic()
    process = ended(f"end({ERROR}, collective_error={is_shared})", **variables)
    assert process.returncode == 2 and process.stdout == "said before\n"
    assert process.stderr.count("ConfigError") == process.stderr.count("is wrong") == says
    assert says or time.monotonic() - started > SECONDS_TO_REPORT


@pytest.mark.parametrize("last", ["", f"end({ERROR})", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"])
def test_what_a_process_wrote_for_itself_is_gone_however_it_ends(last, tmp_path):
    """The yaml of a command line for MindSpeed-MM, or its model.json spelled out."""
    code = "from mindspeed_mm_dit.framework.exits import write_temporary_file"
    code += "; print(write_temporary_file('a.yaml', 'x').read_text())"
    process = ended(f"exit_on_sigint(); {code}; {last}", TMPDIR=str(tmp_path))
    assert process.stdout == "said before\nx\n" and not list(tmp_path.iterdir())


def test_torchrun_is_left_the_reason_once_a_framework_is_active(tmp_path):
    path = tmp_path / "error.json"
    ended(f"end({ERROR})", TORCHELASTIC_ERROR_FILE=str(path))
    assert not path.exists()
    ended(f"activate('pytorch')\nend({ERROR})", TORCHELASTIC_ERROR_FILE=str(path))
    assert "is wrong" in json.dumps(json.loads(path.read_text()))


SWALLOWED = "try: signal.raise_signal(signal.SIGINT); time.sleep(60)\nexcept KeyboardInterrupt: print('went on')"
AGAIN = "from mindspeed_mm_dit.framework.exits import exit_on_sigint as end; print(1, flush=True); end(); print(2)"
INTERRUPTED = {
    "that nothing takes": ("print_one_line_on_sigint()\nraise KeyboardInterrupt", ""),
    "that a library would swallow": (f"exit_on_sigint()\n{SWALLOWED}", ""),
    "during an import, and raised elsewhere": (
        "raise_outside_imports()\ntry: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: import swallows",
        "",
    ),
    "that waits for the program which a process becomes, and its first lines": (
        "import os\ndefer_sigint()\nsignal.raise_signal(signal.SIGINT)\nsys.stdout.flush()\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {AGAIN!r}])", "1\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_ends_a_run_with_nothing_to_keep_in_one_line(tmp_path, name):
    code, more = INTERRUPTED[name]
    (tmp_path / "swallows.py").write_text(f"import signal, time\n{SWALLOWED}")
    process = ended(code, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (process.returncode, process.stdout, process.stderr) == (130, f"said before\n{more}", "interrupted\n")
