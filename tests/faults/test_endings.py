"""Whatever ends a run, what it has learned is saved, the shell is told, and no process stays behind."""

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint import mindspore_ckpt, torch_dcp
from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.tools.evaluate.demo import write_digits
from tests.data_fixtures import open_rows
from tests.faults.launched import Ranks, Run, config_folder
from tests.forked import PATIENCE_SECONDS
from tests.mindspore.launch import needs_mindspore
from tests.training.launch import start

pytestmark = pytest.mark.ranks
CHECKPOINTS = {"pytorch": torch_dcp, "mindspore": mindspore_ckpt}
LONG = "--train-iters 100000 --num-workers 1"
SHARDED = "--use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml"
RANK = """
import os, signal, sys, time

def save(number, _):
    os.write(1, f"saves at {signal.Signals(number).name}\\n".encode())
    signals_left.pop()
    signals_left or sys.exit(128 + number)

signals_left = [None] * int(sys.argv[1])
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, save)
open("ready" + os.environ["RANK"], "w").close()
time.sleep(60)
"""
LAUNCHER = """
import logging, os, sys, threading, time
from mindspeed_mm_dit.training.launch import start
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

logging.disable()
number, moment, signals = sys.argv[1:]
create, sent = SubprocessHandler.__init__, []

def signal_once(*ranks):
    while not all(os.path.exists(f"ready{rank}") for rank in ranks):
        time.sleep(0.01)
    if not sent:
        sent.append(0)
        os.kill(os.getpid(), int(number))

class Lock:
    def __init__(self):
        self.lock = threading.Lock()
        self.release = self.lock.release

    def acquire(self, *how):
        acquired = self.lock.acquire(*how)
        acquired and signal_once(0, 1)
        return acquired

def create_and_signal(rank, *arguments, **options):
    create(rank, *arguments, **options)
    if moment == "created":
        signal_once(0)
    else:
        rank.proc._waitpid_lock = Lock()

SubprocessHandler.__init__ = create_and_signal
sys.exit(start("pytorch", ["rank.py", signals]))
"""
TERM, INT, HUP, QUIT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL


@pytest.fixture(scope="module")
def config(tmp_path_factory, few_digits):
    return config_folder(tmp_path_factory.mktemp("config"), few_digits)


def steps_saved(run: Run | Ranks, folder: str = "checkpoints") -> int:
    """Return the iteration of the only checkpoint, which is the last one that was printed."""
    store = CheckpointStore(run.folder / folder)
    (saved,) = store.iterations()
    assert CHECKPOINTS[run.framework].find_damage(store.path(saved)) is None
    printed = [int(n) for n in re.findall(r"iteration +(\d+)/", run.said)]
    assert saved == printed[-1], run.said
    return saved


@pytest.mark.parametrize(("ranks", "number", "flags"), [
    (1, TERM, ""),
    pytest.param(2, INT, "", marks=pytest.mark.extended),
    *(pytest.param(r, n, f, marks=pytest.mark.campaign)
      for r in (1, 2) for n in (TERM, INT, HUP, QUIT) for f in ("", "--use-torch-fsdp2")),
])  # fmt: skip
def test_a_signal_saves_and_gives_its_code(tmp_path, config, ranks, number, flags):
    stops(Run(tmp_path, config, flags, NPUS_PER_NODE=str(ranks)), number)


def stops(run: Run | Ranks, number: signal.Signals) -> None:
    """Send a signal to a run on its way, and see that it saves and ends."""
    run.wait_for("iteration +3/")
    run.signal_all(number)
    assert run.end() == 128 + number
    assert steps_saved(run) >= 3
    assert f"asked to stop by {number.name}" in run.said and "the same command resumes" in run.said
    assert "Traceback" not in run.said and "Warning" not in run.said, run.said


@pytest.mark.parametrize(
    ("number", "flags"), [(HUP, SHARDED), pytest.param(QUIT, "", marks=pytest.mark.extended)], ids=["HUP", "QUIT"]
)
def test_ranks_save_at_a_signal_that_is_passed_on_to_them(tmp_path, config, number, flags):
    stops(Ranks(tmp_path, config, 2, f"{LONG} {flags}"), number)


@pytest.mark.parametrize(
    ("number", "moment"), [(TERM, "created"), pytest.param(QUIT, "polled", marks=pytest.mark.extended), (INT, "polled")]
)
def test_a_launcher_passes_signals_on_at_any_moment(tmp_path, number, moment):
    """While a rank is not yet recorded, while Popen.poll holds its lock, and a second one while the ranks save."""
    signals = 2 if number == INT else 1
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, "launcher.py", str(number.value), moment, str(signals)]
    launcher = start(command, tmp_path, NPUS_PER_NODE="2")
    saves = [f"saves at {number.name}\n"] * (1 if moment == "created" else 2)  # (rank 1 may have no handler yet)
    for position in range(signals):
        if position:
            launcher.send_signal(number)
        assert [launcher.stdout.readline() for _ in saves] == saves
    assert launcher.communicate(timeout=PATIENCE_SECONDS)[0] in ("", saves[0])
    assert launcher.returncode == 128 + number


@pytest.mark.extended
def test_ranks_do_not_train_on_without_a_launcher_that_was_killed(tmp_path, config):
    run = Run(tmp_path, config, NPUS_PER_NODE="2")
    run.wait_for("iteration +3/")
    run.process.kill()
    assert run.end() == -KILL
    assert steps_saved(run) >= 3


@pytest.mark.extended
def test_an_image_that_vanishes_for_one_rank_ends_and_saves_both(tmp_path):
    digits = tmp_path / "digits"
    write_digits(digits)
    config = config_folder(tmp_path / "config", digits)
    index = open_rows(load_data_config(config / "data.json").dataset_param, 10)
    position = 483  # of iteration 121, in the second half of its batch: rank 1 reads it
    (image,) = SampleOrder(len(index), 1234, shuffle=True).images(np.array([position]))
    run = Ranks(tmp_path, config, 2, LONG)
    run.wait_for("iteration +1/")
    Path(index.paths[image]).unlink()
    assert run.end() == 2
    assert steps_saved(run) == 120
    assert run.said.count("DataError") == 1 and str(index.paths[image]) in run.said and "Traceback" not in run.said


@pytest.mark.extended
@needs_mindspore
def test_two_msruns_share_a_machine_and_a_folder_and_end_as_they_are_asked_to(tmp_path, config):
    interrupted = Run(tmp_path, config, "--save a --load a --pynative", "mindspore")
    abandoned = Run(tmp_path, config, "--save b --load b --pynative", "mindspore")
    for run in (interrupted, abandoned):
        run.wait_for("iteration +3/")
    assert len({tuple(sorted(os.sched_getaffinity(pid))) for pid in abandoned.processes("pretrain_dit.py")}) == 1
    interrupted.signal_all(INT)
    abandoned.process.kill()
    assert interrupted.end() == 128 + INT
    assert abandoned.end() == -KILL
    assert steps_saved(interrupted, "a") >= 3 and "the same command resumes" in interrupted.said
    assert CheckpointStore(tmp_path / "b").iterations()[-1] >= 3
    for run in (interrupted, abandoned):
        assert "Traceback" not in run.said and "[INFO]" not in run.said, run.said


@needs_mindspore
@pytest.mark.campaign
@pytest.mark.parametrize("whom", ["launcher", "msrun"])
@pytest.mark.parametrize("number", [TERM, HUP, QUIT, KILL])
def test_no_msrun_leaves_a_worker_behind(tmp_path, config, whom, number):
    run = Run(tmp_path, config, "", "mindspore")
    run.wait_for("iteration +3/")
    (msrun,) = run.processes("--local_worker_num")
    os.kill(run.process.pid if whom == "launcher" else msrun, number)
    assert run.end() != 0
    assert CheckpointStore(tmp_path / "checkpoints").iterations()[-1] >= 3
