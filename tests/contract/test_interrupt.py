"""Ctrl-C in the real hosts, by the script that a user starts them with."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.contract import hosted, native_hosted
from tests.contract.hosted import needs_trees, tools_json
from tests.contract.native_hosted import needs_engine
from tests.faults.launched import Run, config_folder, wait_until

SECONDS = 25
"""torchrun kills after 30, and the launcher gives ranks that save more than that."""


@pytest.mark.ranks
@pytest.mark.parametrize(("host", "meets"), [
    pytest.param("mindspeed-mm", "initializing torch distributed", marks=needs_trees),
    pytest.param("mindspeed-mm-native", "10 classes", marks=needs_engine),
])  # fmt: skip
def test_ctrl_c_ends_a_rank_that_waits_for_another(tmp_path, digits_folder, host, meets):
    native = host == "mindspeed-mm-native"
    python = native_hosted.PYTHON if native else os.environ["MINDSPEED_MM_PYTHON"]
    needs = (native_hosted if native else hosted).environment()
    needs |= {"PATH": f"{Path(python).parent}:{os.environ['PATH']}", "NPUS_PER_NODE": "2"}
    flags = f"--host {host} --load nothing" + ("" if native else f" --mm-tool {tools_json()}")
    run = Run(tmp_path, config_folder(tmp_path / "config", digits_folder), flags, **needs)
    late = run.wait_for_rank(1)
    os.kill(late, signal.SIGSTOP)
    run.wait_for(meets)
    time.sleep(5)  # the first rank waits in PyTorch's own code, where no handler of Python's is called
    first, before = run.rank(0), time.monotonic()
    run.signal_all(signal.SIGINT)
    wait_until(lambda: first not in run.processes())
    seconds = time.monotonic() - before
    os.kill(late, signal.SIGCONT)
    assert run.end() == 130 and seconds < SECONDS, run.said
