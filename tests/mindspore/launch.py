"""Run a script on MindSpore, in the environment of its own, alone or as the workers of an msrun."""

import os
import subprocess
from pathlib import Path

import pytest

from mindspeed_mm_dit.training.launch import free_port
from tests.conftest import ROOT
from tests.forked import PATIENCE_SECONDS, STARTED, Forked
from tests.training.launch import Configs, Outcome, together

PYTHON = os.environ.get("MM_DIT_MINDSPORE_PYTHON", "")
needs_mindspore = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="MM_DIT_MINDSPORE_PYTHON names no interpreter")


def run(configs: Configs, flags: str, workers: int = 1, **variables: str) -> Outcome:
    return run_script(_words(configs, flags), configs.folder, workers, **variables)


def run_script(words: list[str], folder: Path, workers: int = 1, **variables: str) -> Outcome:
    """Run a script and its flags to the end; several workers, and their scheduler, are told what msrun tells them."""

    def start(place: dict[str, str]) -> Forked:
        STARTED.append(Forked([PYTHON, *words], {**_environment(), **place, **variables}, str(folder), "mindspore"))
        return STARTED[-1]

    if workers == 1:
        return together([start({})])
    port = str(free_port())
    scheduler = start(_place("MS_SCHED", 0, workers, port))
    outcome = together([start(_place("MS_WORKER", rank, workers, port)) for rank in range(workers)])
    scheduler.kill()  # it would wait some seconds for more to come
    return outcome


def _place(role: str, rank: int, workers: int, port: str) -> dict[str, str]:
    return {"MS_ROLE": role, "MS_NODE_ID": str(rank), "RANK_ID": str(rank), "MS_WORKER_NUM": str(workers),
            "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port, "MS_TOPO_TIMEOUT": "600"}  # fmt: skip


def run_under_msrun(configs: Configs, flags: str, workers: int) -> Outcome:
    launcher = ["msrun", "--worker_num", str(workers), "--local_worker_num", str(workers)]
    launcher += ["--master_port", str(free_port()), "--log_dir", str(configs.folder / "msrun_log"), "--join=True"]
    done = subprocess.run([*launcher, *_words(configs, flags)], env=_environment(), cwd=configs.folder, text=True,
                          timeout=PATIENCE_SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return Outcome(done.returncode, done.stdout)


def _words(configs: Configs, flags: str) -> list[str]:
    return [*configs.command(flags)[1:], "--ai-framework", "mindspore"]


def _environment() -> dict[str, str]:
    """Return the environment of a run; msrun starts the first python of PATH."""
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return {**ours, "PATH": path, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
