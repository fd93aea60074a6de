"""Killed at any moment, again and again: nothing is lost but the save under way, and not a bit differs in the end.

A run that saves every step is killed late in a step or within a save, the same command is given again, killed again,
and so on, from the beginning once it has ended. After each kill every checkpoint that had been complete before it is
there, and each is, to the bit, that of a run which nobody killed. Dated results of the long form: benchmarks/results.

    python -m pytest --campaign tests/faults/test_kills.py
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint import mindspore_ckpt, torch_dcp
from mindspeed_mm_dit.checkpoint.store import TRACKER, CheckpointStore
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import newest
from tests.contract import hosted, native_hosted
from tests.faults.launched import Ranks, Run, config_folder
from tests.forked import PATIENCE_SECONDS
from tests.mindspore.launch import needs_mindspore
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

STEPS = 10
LONG = int(os.environ.get("MM_DIT_KILLS", "100"))
MOST_SECONDS = 0.3
"""Of a pause between what is waited for and the kill; most are far shorter: they are spread by their logarithm."""
LAUNCHERS_SECONDS = 30
"""How long torchrun waits for ranks that it has asked to end, before it kills them."""
FLAGS = f"--train-iters {STEPS} --save-interval 1 --lr-decay-iters {STEPS}"
KEEPING_ALL = "--save-retain-interval 1"
"""As MindSpeed-MM does unasked."""
SHARDED = "--use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml"


class KilledRanks(Ranks):
    """Ranks that are killed, and wait for each other no longer than their launcher lets them."""

    def __init__(self, folder: Path, configs: Configs, count: int) -> None:
        super().__init__(folder, configs.folder, count, f"{FLAGS} {KEEPING_ALL} {SHARDED}")
        self.was_killed = False

    def kill(self, draw: np.random.Generator) -> None:
        """Kill all ranks, or one, of which its launcher tells the others."""
        killed = self.processes if draw.random() < 0.75 else [self.processes[draw.integers(len(self.processes))]]
        for process in killed:
            process.kill()
        self.signal_all(signal.SIGTERM)
        self.was_killed = True

    def _code(self, process: Any) -> int:
        """Wait as torchrun does: a rank that waits for one that is no more would be killed."""
        try:
            return int(process.wait(LAUNCHERS_SECONDS if self.was_killed else PATIENCE_SECONDS))
        except subprocess.TimeoutExpired:
            process.kill()
            return int(process.wait(PATIENCE_SECONDS))


def ranks(count: int) -> Callable[[Path, Configs], KilledRanks]:
    return lambda folder, configs: KilledRanks(folder, configs, count)


def script(framework: str = "pytorch", host: str = "standalone", processes: int = 1) -> Callable[[Path, Configs], Run]:
    def start(folder: Path, configs: Configs) -> Run:
        variables = {"NPUS_PER_NODE": str(processes)}
        native = host == "mindspeed-mm-native"
        flags = f"{FLAGS} --host {host}" + ("" if host == "mindspeed-mm" else f" {KEEPING_ALL}")
        if host != "standalone":
            python = native_hosted.PYTHON if native else os.environ["MINDSPEED_MM_PYTHON"]
            variables |= (native_hosted if native else hosted).environment()
            variables["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"
            flags += "" if native else f" --use-torch-fsdp2 --mm-tool {hosted.tools_json()}"
        return Run(folder, configs.folder, flags, framework, **variables)

    return start


def arrays(path: Path) -> Mapping[str, np.ndarray]:
    """Return all that a checkpoint holds: weights, averages, the optimizer's state."""
    if (path / mindspore_ckpt.FILE).is_file():
        return mindspore_ckpt.read(path)
    return {name: torch_dcp.as_array(tensor) for name, tensor in torch_dcp.read_tree(path).items()}


def complete(folder: Path) -> list[int]:
    """Return the iterations whose checkpoints are complete: MindSpeed-MM writes in place, then moves its tracker."""
    try:
        newest = int((folder / TRACKER).read_text())
    except (OSError, ValueError):  # (being written in place, by MindSpeed-MM)
        return []
    return [iteration for iteration in CheckpointStore(folder).iterations() if iteration <= newest]


def mended(folder: Path) -> bool:
    """Do what MindSpeed-MM's user is told where a kill came just as the tracker was written; return whether it did."""
    tracker = folder / TRACKER
    if not tracker.is_file() or tracker.read_text():
        return False
    with pytest.raises(CheckpointError) as found:
        newest("--load", str(folder))
    tracker.write_text(re.findall(r"Write (\d+) into it", str(found.value))[0])
    return True


def kill_somewhere(run: Any, saved: Path, draw: np.random.Generator) -> list[int]:
    """Kill a run that has come to one of its next steps, or to its save; return what was complete just before.

    One that ends before it comes so far is let go.
    """
    store, adapted_starter = CheckpointStore(saved), max(complete(saved), default=0)
    target = adapted_starter + int(draw.integers(1, 5))
    within_a_save = draw.random() < 0.6
    end = time.monotonic() + PATIENCE_SECONDS
    while not run.is_over() and time.monotonic() < end:
        if within_a_save and (store.partial_path(target).exists() or store.path(target).exists()):
            break
        if not within_a_save and f"iteration {target:>8}/" in run.said:
            break
        time.sleep(0.0005)
    if target <= STEPS:
        time.sleep(MOST_SECONDS * 10 ** draw.uniform(-3, 0))
        before = complete(saved)
        run.kill(draw)
        return before
    return []


LANES = {
    "fsdp2_x2": (ranks(2), []),
    "fsdp2_x4": (ranks(4), []),
    "mindspore_x2": (script("mindspore", processes=2), [needs_mindspore]),
    "old_route": (script(host="mindspeed-mm"), [hosted.needs_trees]),
    "native": (script(host="mindspeed-mm-native"), [native_hosted.needs_engine]),
}


@pytest.mark.costly("a kill during a save costs that save alone")
@pytest.mark.parametrize(
    ("lane", "kills"),
    [("fsdp2_x2", 1), pytest.param("fsdp2_x2", 3, marks=pytest.mark.extended)]
    + [pytest.param(lane, LONG, marks=[*marks, pytest.mark.campaign]) for lane, (_, marks) in LANES.items()],
)
def test_a_kill_costs_the_save_under_way_and_nothing_else(tmp_path, few_digits, lane, kills):
    start = LANES[lane][0]
    config_folder(tmp_path / "config", few_digits)
    yaml = "sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n"
    (tmp_path / "config" / "fsdp2.yaml").write_text(yaml)
    configs, draw = Configs(tmp_path / "config"), np.random.default_rng(int(os.environ.get("MM_DIT_KILL_SEED", 20)))
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    for place in (whole, folder):
        place.mkdir()
    uninterrupted = start(whole, configs)
    assert uninterrupted.end() == 0, uninterrupted.said
    saved, checked, tally = folder / "checkpoints", set(), dict.fromkeys(("ended", "killed", "steps", "torn"), 0)
    while tally["killed"] < kills:
        run = start(folder, configs)
        before = kill_somewhere(run, saved, draw)
        code = run.end()
        tally["torn"] += mended(saved)
        after = complete(saved)
        assert set(before) <= set(after), (before, after, run.said)
        assert "Traceback" not in run.said or code, run.said
        for iteration in set(after) - checked:
            there, here = arrays(whole / f"checkpoints/iter_{iteration:07d}"), arrays(saved / f"iter_{iteration:07d}")
            assert there.keys() == here.keys() and there
            different = [name for name in there if there[name].tobytes() != here[name].tobytes()]
            assert not different, (iteration, different[:5], run.said)
            checked.add(iteration)
            tally["steps"] += 1
        if code == 0 and max(after, default=0) == STEPS:
            tally["ended"] += 1
            shutil.rmtree(folder)
            folder.mkdir()
            checked = set()
        else:
            tally["killed"] += 1
    counts = "{killed} kills, {ended} runs to the end, {steps} checkpoints compared, {torn} trackers torn"
    print(f"{lane}: {counts.format(**tally)}")
