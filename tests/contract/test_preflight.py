"""What is found before the host is imported; no tree is needed."""

import json
from pathlib import Path

import pytest

from mindspeed_mm_dit.configs.arguments import build_parser
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.hosts.registry import find_host
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import run
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.attach import check_before_import, import_order, spelled_out
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.commandline import complete
from tests.conftest import ROOT

REQUIRED = "--mm-model a --mm-data b --micro-batch-size 1 --lr 1 --train-iters 1".split()
FSDP2 = "sub_modules_to_wrap: ['predictor.blocks.{*}']\n"


@pytest.fixture
def argv(tmp_path, digits_folder, monkeypatch):
    """A command line without a mistake."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    data = json.loads((ROOT / "examples/dit/data.json").read_text())
    data["dataset_param"]["data_folder"] = str(digits_folder)
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "tools.json").write_text("{}")
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    return (
        f"--mm-model {ROOT}/examples/dit/model.json --mm-data {tmp_path}/data.json --mm-tool {tmp_path}/tools.json "
        f"--micro-batch-size 4 --use-torch-fsdp2 --fsdp2-config-path {tmp_path}/fsdp2.yaml"
    ).split()


@pytest.mark.parametrize(("change", "expected"), [
    ("--mm-tool missing.json", "missing.json"),
    ("--fp16", "--fp16"),
    ("--use-distributed-optimizer", "--use-distributed-optimizer"),
    ("--ckpt-format torch", "--ckpt-format"),
    ("--bf16", "param_dtype: bf16"),
    ("--report", "--report"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_CONNECTIONS = 1"),
    (FSDP2 + "reduce_dtpye: fp32\n", "'reduce_dtype'"),
    ("sub_modules_to_wrap: [predictor.final_layr]\n", "'predictor.final_layer'"),
    ("sharding_size: auto\n", "sub_modules_to_wrap"),
])  # fmt: skip
def test_flags_and_yamls_are_refused_before_import(argv, tmp_path, monkeypatch, change, expected):
    if ":" in change:
        (tmp_path / "fsdp2.yaml").write_text(change)
    elif not change.startswith("--"):
        monkeypatch.setenv(change, "1")
    with pytest.raises(ConfigError, match=expected):
        check_before_import([*argv, *(change.split() if change.startswith("--") else ())])


def test_dry_run_ends_before_the_host_is_imported_and_flags_without_effect_are_noted(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        check_before_import([*argv, "--dry-run", "--train-iters", "100"])
    assert ended.value.code == 0
    capsys.readouterr()
    check_before_import(argv)
    assert "note:" not in capsys.readouterr().err
    check_before_import([*argv, "--keep-last", "3", "--torch-compile", "--tf32", "--sample-interval", "5"])
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert said == ["--tf32", "--torch-compile", "--keep-last", "--sample-interval"]


def test_flags_of_the_host_are_added_once_with_and_without_fsdp2_and_by_ranks(monkeypatch):
    completed = complete(["--use-torch-fsdp2", "--bf16", "--save", "here", "--train-iters", "9", "--log-interval", "5"])
    assert "--bf16" not in completed and completed.count("--log-interval") == 1
    assert completed[completed.index("--save-interval") + 1] == "9"
    assert completed[completed.index("--ckpt-format") + 1] == "torch_dcp"
    assert complete(completed) == completed
    completed = complete(["--fsdp2-config-path", "a.yaml", "--bf16"])
    assert "--fsdp2-config-path" not in completed and "a.yaml" not in completed and "--bf16" in completed
    monkeypatch.setenv("WORLD_SIZE", "4")
    completed = complete(["--global-batch-size", "64"])
    assert completed[completed.index("--micro-batch-size") + 1] == "16"


def test_preset_is_written_out_for_the_host(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps({"predictor": {"preset": "DiT-S/2", "num_classes": 10}}))
    path = spelled_out(["--mm-model", str(tmp_path / "model.json")])[1]
    predictor = json.loads(Path(path).read_text())["predictor"]
    assert predictor["num_layers"] == 12 and predictor["num_classes"] == 10 and "preset" not in predictor


def test_host_tools_and_flags_that_are_not_here_are_refused(argv, monkeypatch):
    with pytest.raises(PlatformError, match="--context-parallel-size = 2"):
        check_before_import([*argv, "--context-parallel-size", "2"])
    at = argv.index("--mm-tool")
    with pytest.raises(ConfigError, match="--mm-tool"):
        check_before_import(argv[:at] + argv[at + 2 :])
    monkeypatch.setattr(run, "is_installed", lambda name: False)
    with pytest.raises(PlatformError, match="--host = mindspeed-mm"):
        find_host(["--host", "mindspeed-mm"])
    with pytest.raises(ConfigError, match="--use-flash-attn"):
        build_parser().parse_strictly([*REQUIRED, "--use-flash-attn"])


def test_host_is_imported_in_its_own_order():
    order = import_order(mindspore=True)
    assert order[:4] == ("torch", "torch_npu", "mindspeed.megatron_adaptor", "mindspeed_mm.mindspore.mindspore_adaptor")
    assert order.index("mindspeed_mm.patchs.torch_dcp_patch") == len(order) - 2
    assert "mindspeed_mm.mindspore.mindspore_adaptor" not in import_order(mindspore=False)
