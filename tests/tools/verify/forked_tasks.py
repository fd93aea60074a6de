"""What tools/verify/processes.py starts, forked where that is the same (tests/forked.py)."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm_dit.tools.verify.processes import WORKER, Task, write_tasks
from tests.training import launch


def run_tasks(ranks: int, framework: str, tasks: Sequence[Task], folder: Path, pythons: dict, script=WORKER) -> str:
    """Have processes do ``tasks``; return all that they said, which is kept in ``folder`` too."""
    listed = folder / f"{Path(tasks[0].output).name}.json"
    write_tasks(listed, tasks)
    done = launch.run([pythons[framework], str(script), str(listed)], folder, ranks)
    listed.with_suffix(".log").write_text(done.output)
    return f"exit code {done.code}: {done.output}"


def run_python(python: str, arguments: Sequence[str], log: Path) -> subprocess.CompletedProcess[str]:
    """Run an interpreter to its end; all it said goes to ``log``."""
    done = launch.run([python, *arguments], log.parent)
    log.write_text(done.output)
    return subprocess.CompletedProcess([python, *arguments], done.code, done.output, "")
