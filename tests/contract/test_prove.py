"""mm-dit prove, and Ctrl-C, in both routes of the real MindSpeed-MM, by what a user starts them with."""

import os
import signal
import time
from pathlib import Path

import pytest

from mindspeed_mm_dit.tools.verify import proof
from mindspeed_mm_dit.tools.verify.proof import open_config, prove
from mindspeed_mm_dit.tools.verify.prove import chosen
from tests.conftest import ROOT
from tests.contract import hosted, native_hosted
from tests.faults.launched import Run, wait_until
from tests.faults.launched import config_folder as endless_config
from tests.tools.verify.campaign import config_folder
from tests.training.launch import Configs

ROUTES = [
    pytest.param("MindSpeed-MM, old route", hosted, marks=hosted.needs_trees),
    pytest.param("MindSpeed-MM, native engine", native_hosted, marks=native_hosted.needs_engine),
]
HOSTS = [
    pytest.param("mindspeed-mm", hosted, marks=hosted.needs_trees),
    pytest.param("mindspeed-mm-native", native_hosted, marks=[hosted.needs_trees, native_hosted.needs_engine]),
]
pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("name", "route"), ROUTES)
def test_step_in_mindspeed_mm_is_right_and_a_fault_is_named(name, route, tmp_path, digits_folder, monkeypatch):
    for variable, value in route.environment().items():
        monkeypatch.setenv(variable, value)
    configs = Configs.create(tmp_path / "config", digits_folder, hidden_size=32, num_layers=2, num_heads=2)
    pythons = {"pytorch": os.environ["MINDSPEED_MM_PYTHON"]}
    given, layouts, verdicts = config_folder(configs), chosen([name]), []
    for folder, script in (("right", proof.WORKER), ("planted", Path(__file__).with_name("plants.py"))):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(proof, "WORKER", script)
        config = open_config(given, tmp_path / folder, None, True, steps=2)
        verdicts += prove(config, layouts, pythons, lambda text: None)
    right, planted = verdicts
    assert right.word == "PASS", (right.reason, right.wrong)
    assert {finding.kind for finding in right.findings} == {"loss", "gradient norm", "gradient", "step", "average"}
    assert planted.named.startswith("average/") and planted.location.startswith("the average"), planted


@pytest.mark.parametrize(("host", "route"), HOSTS)
def test_run_of_mindspeed_mm_is_taken_again_elsewhere(host, route, tmp_path, digits_folder):
    runs = hosted.TwoHosts(tmp_path, digits_folder)
    flags = f"{hosted.FLAGS} --mm-tool {hosted.tools_json()} --train-iters 3 --save ck --save-interval 2 --host {host}"
    config = "--mm-model model.json --mm-data data.json --use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml"
    there = route.run_python([str(ROOT / "pretrain_dit.py"), *config.split(), *flags.split()], runs.folder)
    assert there.code == 0, there.output[-4000:]
    (tmp_path / "log").write_text(there.output)
    again = "-m mindspeed_mm_dit.cli.main prove --run ck --log log --card card.md -- --host standalone"
    here = hosted.run_python(again.split(), runs.folder, PYTHONPATH=str(ROOT))
    assert here.code == 0, here.output[-4000:]
    assert here.output.count("PASS  iteration") == 4 and "--train-iters" in (tmp_path / "card.md").read_text()


SECONDS = 25
"""torchrun kills after 30, and the launcher gives ranks that save more than that."""


@pytest.mark.parametrize(("host", "meets"), [
    pytest.param("mindspeed-mm", "initializing torch distributed", marks=hosted.needs_trees),
    pytest.param("mindspeed-mm-native", "10 classes", marks=native_hosted.needs_engine),
])  # fmt: skip
def test_ctrl_c_ends_a_rank_that_waits_for_another(tmp_path, digits_folder, host, meets):
    native = host == "mindspeed-mm-native"
    python = native_hosted.PYTHON if native else os.environ["MINDSPEED_MM_PYTHON"]
    needs = (native_hosted if native else hosted).environment()
    needs |= {"PATH": f"{Path(python).parent}:{os.environ['PATH']}", "NPUS_PER_NODE": "2"}
    flags = f"--host {host} --load nothing" + ("" if native else f" --mm-tool {hosted.tools_json()}")
    run = Run(tmp_path, endless_config(tmp_path / "config", digits_folder), flags, **needs)
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
