"""Run pretrain_dit.py as a user does, on one or several ranks, and read its log lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm_dit.training.launch import free_port
from tests.conftest import ROOT
from tests.forked import GPUS, PATH, PATIENCE_SECONDS, STARTED, launch

MM_DIT = [sys.executable, "-m", "mindspeed_mm_dit.cli.main"]
_NUMBERS = re.compile(r"iteration +(\d+)/.*learning rate: (\S+) .* loss: (\S+) .* grad norm: (\S+) ")


@dataclass(frozen=True)
class Outcome:
    """What a run printed and how it ended."""

    code: int
    output: str

    @property
    def losses(self) -> dict[int, float]:
        return {int(m[1]): float(m[3]) for m in _NUMBERS.finditer(self.output)}

    @property
    def lines(self) -> dict[int, tuple[str, str, str]]:
        """Learning rate, loss and gradient norm as printed, by iteration."""
        return {int(m[1]): (m[2], m[3], m[4]) for m in _NUMBERS.finditer(self.output)}

    @property
    def validations(self) -> dict[int, list[str]]:
        """The mean and the quarters of each validation as printed, by iteration."""
        lines = [line for line in self.output.splitlines() if "validation loss at iteration" in line]
        return {int(re.findall(r"iteration (\d+)", line)[0]): re.findall(r"value: (\S+)", line) for line in lines}


@dataclass(frozen=True)
class Configs:
    """Config files of a run, in a folder of their own."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, digits: Path, **predictor: object) -> Configs:
        """Write the embedded default's configs, a smaller predictor, and images at ``digits``, all of them or few."""
        model = json.loads((ROOT / "examples/dit/model.json").read_text())
        model["predictor"].update(predictor)
        data = json.loads((ROOT / "examples/dit/data.json").read_text())
        data["dataset_param"]["data_folder"] = str(digits)
        if digits.name != "digits":
            del data["dataset_param"]["source"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.json").write_text(json.dumps(model))
        (folder / "data.json").write_text(json.dumps(data))
        return cls(folder)

    def change(self, name: str, **sections: Any) -> Configs:
        """Replace sections of a file, or with a dict that names no model_id some of their settings."""
        path = self.folder / name
        content = json.loads(path.read_text())
        for section, new in sections.items():
            is_part = isinstance(new, dict) and "model_id" not in new
            content[section] = {**content.get(section, {}), **new} if is_part else new
        path.write_text(json.dumps(content))
        return self

    def copy(self, folder: Path) -> Configs:
        for name in ("model.json", "data.json"):
            shutil.copyfile(self.folder / name, folder / name)
        return Configs(folder)

    def hold_out(self, fraction: float) -> Configs:
        """Keep a part of the images for validation."""
        return self.change("data.json", dataset_param={"valid_fraction": fraction})

    def command(self, flags: str, ranks: int = 1) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        config = ["--mm-model", str(self.folder / "model.json"), "--mm-data", str(self.folder / "data.json")]
        script = [str(ROOT / "pretrain_dit.py"), "--host", "standalone"]
        return [sys.executable, *launcher, *script, *config, *flags.split()]

    def start(self, flags: str, ranks: int = 1, **variables: str) -> Any:
        skip_without(ranks)
        return start(self.command(flags, ranks), self.folder, **variables)

    def run(self, flags: str, ranks: int = 1, **variables: str) -> Outcome:
        return run(self.command(flags), self.folder, ranks, **variables)

    def done(self, flags: str, ranks: int = 1, **variables: str) -> Outcome:
        """Run to an end without an error."""
        outcome = self.run(flags, ranks, **variables)
        assert outcome.code == 0, outcome.output
        return outcome


def mm_dit(*words: object, ranks: int = 1, folder: Path = ROOT, **variables: str) -> Outcome:
    """Run a command of mm-dit to the end, in a process of its own, or in several."""
    return run([*MM_DIT, *map(str, words)], folder, ranks, **variables)


def plugged(path: object, *words: object) -> str:
    """Run a command of mm-dit with the plugins below ``path``, and return what it says."""
    done = mm_dit(*words, PYTHONPATH=str(path))
    assert done.code == 0, done.output
    return done.output


def start(command: list[str], folder: Path, **variables: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": GPUS}
    STARTED.append(launch(command, {**environment, **variables}, str(folder)))
    return STARTED[-1]


def run(command: list[str], folder: Path, ranks: int = 1, **variables: str) -> Outcome:
    return run_ranks(lambda place: start(command, folder, **place, **variables), ranks)


def run_ranks(start: Callable[[dict[str, str]], Any], ranks: int) -> Outcome:
    """Start the ranks of a run, each told its place among them where there are several, and wait for their end."""
    skip_without(ranks)
    port = str(free_port())
    return together([start(place_of(rank, ranks, port) if ranks > 1 else {}) for rank in range(ranks)])


def skip_without(ranks: int) -> None:
    if GPUS and ranks > len(GPUS.split(",")):
        pytest.skip(f"needs {ranks} GPUs")


def together(processes: list[Any]) -> Outcome:
    """Wait for the end of processes that wait for each other; where one fails, the others are ended."""
    with ThreadPoolExecutor(len(processes)) as pool:
        said = [pool.submit(_to_the_end, process, processes) for process in processes]
    output = "".join(saying.result() for saying in said)
    (alone, *others) = processes
    return Outcome(int(any(p.returncode for p in processes)) if others else alone.returncode, output)


def place_of(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return what torchrun tells a rank."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **{name: str(value) for name, value in here.items()}}


def _to_the_end(process: Any, all_ranks: list[Any]) -> str:
    """Return what a rank has printed once it has ended; where it fails, the others are ended, as by torchrun."""
    try:
        said: str = process.communicate(timeout=PATIENCE_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        for other in all_ranks:
            other.terminate()
    return said
