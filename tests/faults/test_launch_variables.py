"""Launch variables that cannot be meant: one line, code 2, in seconds, and nothing written."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.exits import LAUNCH_VARIABLES, without_launch_variables
from mindspeed_mm_dit.training.launch import check_port, free_port, read_launch
from mindspeed_mm_dit.training.pytorch.launch import listen_on_loopback
from tests.conftest import ROOT
from tests.faults.launched import Run, config_folder, wait_until
from tests.forked import PATIENCE_SECONDS

NAMES = ("AI_FRAMEWORK", "NPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MM_TOOL")
BAD = ("abc", "-1", "1.5", "99999", "1 2", "\uff11", "9" * 5000)


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Launch with these variables alone, in an empty folder; return (code, what was said)."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def launch(config: str = "digits", **variables: str) -> tuple[int, str]:
        for name in (*NAMES, "OMP_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main(["train", config])
        assert list(here.iterdir()) == []
        return code, capfd.readouterr().err

    return launch


@pytest.mark.parametrize("framework", LAUNCH_VARIABLES)
@pytest.mark.parametrize("name", ["NPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_PORT", "OMP_NUM_THREADS"])
def test_a_number_that_cannot_be_is_one_line(launch, framework, name):
    for value in (*BAD, "0") if name != "NODE_RANK" else BAD:
        code, said = launch(AI_FRAMEWORK=framework, **{name: value})
        assert code == 2 and f"{name} = {value}" in said and said.count("\n") == 1


def test_variables_that_do_not_go_together_are_named(launch):
    for variables, *messages in (
        ({"AI_FRAMEWORK": "tensorflow"}, "AI_FRAMEWORK = tensorflow"),
        ({"MM_TOOL": "nowhere.json"}, "MM_TOOL = nowhere.json"),
        ({"config": "nowhere"}, "CONFIG = nowhere"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES = 2", "MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}, "NNODES = 2", "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "127.0.0.1"}, "from 0 to 1", "NNODES"),
    ):
        code, said = launch(**variables)
        assert code == 2 and all(message in said for message in messages) and said.count("\n") <= 2


@pytest.mark.parametrize("nodes", [{}, {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}])
@pytest.mark.parametrize("framework", LAUNCH_VARIABLES)
def test_a_port_in_use_is_named(launch, framework, nodes):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, said = launch(AI_FRAMEWORK=framework, NPUS_PER_NODE="2", MASTER_PORT=port, **nodes)
    assert code == 2 and f"MASTER_PORT = {port}" in said and "Address already in use" in said


def test_a_single_node_meets_on_the_loopback_address_at_a_port_of_its_own():
    first, second = (read_launch({"NPUS_PER_NODE": "2", "MASTER_ADDR": "10.0.0.1"}, lambda: 1) for _ in range(2))
    assert first.address == second.address == "127.0.0.1" and first.port != second.port


def test_the_store_of_one_node_listens_on_the_loopback_address_alone(monkeypatch):
    """torchrun makes its store as here, and finds the one that this process has at its port."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    stores = [listen_on_loopback(port), TCPStore("127.0.0.1", port, 1, True, multi_tenant=True)]
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()]
    assert [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_the_script_runs_no_command_out_of_a_variable(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "examples/dit/pretrain.sh")], cwd=tmp_path, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, env={**os.environ, "NPUS_PER_NODE": "a[$(touch ran)]", "NNODES": "a[$(touch ran)]"},
    )  # fmt: skip
    assert done.returncode == 2 and "a[$(touch ran)]" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_launcher_left_in_the_shell_is_named(tmp_path):
    for left, framework, message in (
        ({"RANK": "1"}, "pytorch", "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "pytorch", "RANK, MASTER_ADDR, MASTER_PORT"),
        ({"MS_WORKER_NUM": "2"}, "mindspore", "MS_ROLE, MS_SCHED_HOST, MS_SCHED_PORT"),
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "pretrain_dit.py"), "--ai-framework", framework], cwd=tmp_path,
            capture_output=True, text=True, timeout=PATIENCE_SECONDS,
            env={**without_launch_variables(os.environ), "PYTHONPATH": str(ROOT), **left},
        )  # fmt: skip
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []


def is_free(port: int) -> bool:
    try:
        check_port("", port, "")
    except ConfigError:
        return False
    return True


@pytest.mark.extended
@pytest.mark.ranks
def test_a_node_says_for_whom_it_waits_and_stops_waiting_when_asked(tmp_path, few_digits):
    config = config_folder(tmp_path / "config", few_digits)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run = Run(tmp_path, config, NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run.wait_for(f"node 0 of 2: waiting up to 10 minutes for 1 other node.* 127.0.0.1:{port}")
    wait_until(lambda: not is_free(port))  # torchrun's store listens
    run.signal_all(signal.SIGINT)
    assert run.end() in (130, -signal.SIGINT) and "Traceback" not in run.said


def test_a_quote_without_a_partner_is_named_with_its_line(tmp_path, launch):
    (tmp_path / "train.args").write_text('--train-iters 1\n--lr "1e-3\n--save out\n')
    code, said = launch(str(tmp_path))
    assert code == 2 and re.search(r"train.args, line 2.*--lr \"1e-3", said)
    with pytest.raises(ConfigError, match="nowhere"):
        read_train_args(tmp_path / "nowhere")
