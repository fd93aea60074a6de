"""What is found before the host is imported; no tree is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm_dit.configs.arguments import build_parser
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.hosts.choose import find_host
from mindspeed_mm_dit.wings.mindspeed_mm.megatron import record
from mindspeed_mm_dit.wings.mindspeed_mm.megatron.attach import import_order
from mindspeed_mm_dit.wings.mindspeed_mm.megatron.commandline import complete
from mindspeed_mm_dit.wings.mindspeed_mm.megatron.preflight import check_before_import, spelled_out
from tests.conftest import ROOT

REQUIRED = "--mm-model a --mm-data b --micro-batch-size 1 --lr 1 --train-iters 1".split()  # noqa: SIM905
FSDP2 = "sub_modules_to_wrap: ['predictor.blocks.{*}']\n"


@pytest.fixture
def argv(tmp_path: Path, digits_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
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


def test_a_command_line_without_a_mistake_passes(argv: list[str]) -> None:
    check_before_import(argv)


def test_a_dry_run_ends_before_the_host_is_imported(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_before_import([*argv, "--dry-run", "--train-iters", "100"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "100 steps of 4 samples up to iteration 100: each of 1,797 images 0.2" in said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("--mm-tool missing.json", "no such file"),
        ("--fp16", "does not go with --use-torch-fsdp2"),
        ("--use-distributed-optimizer", "does not go with --use-torch-fsdp2"),
        ("--ckpt-format torch", "drop the flag"),
        ("--bf16", "set param_dtype: bf16"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(argv: list[str], change: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_before_import([*argv, *change.split()])


def test_flags_that_change_nothing_in_the_host_are_said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check_before_import(argv)
    assert "note:" not in capsys.readouterr().err
    check_before_import([*argv, "--keep-last", "3", "--torch-compile", "--tf32", "--sample-interval", "5"])
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert said == ["--tf32", "--torch-compile", "--keep-last", "--sample-interval"]


def test_a_report_that_the_host_could_not_draw_is_said_before_it_trains(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--report: is drawn from a checkpoint, and none is saved"):
        check_before_import([*argv, "--report"])
    argv.remove("--use-torch-fsdp2")
    check_before_import([*argv, "--report", "--save", "ck"])
    assert "note: --report draws nothing without --use-torch-fsdp2" in capsys.readouterr().err


def test_ranks_that_share_samples_are_refused(argv: list[str]) -> None:
    with pytest.raises(PlatformError, match="--context-parallel-size = 2: is not offered in MindSpeed-MM"):
        check_before_import([*argv, "--context-parallel-size", "2"])


def test_a_missing_tools_json_is_named_with_its_place(argv: list[str]) -> None:
    at = argv.index("--mm-tool")
    with pytest.raises(ConfigError, match=r"add --mm-tool .*tools\.json"):
        check_before_import(argv[:at] + argv[at + 2 :])


def test_one_connection_is_refused_with_fsdp2(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS = 1"):
        check_before_import(argv)


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        (FSDP2 + "reduce_dtpye: fp32\n", "Did you mean 'reduce_dtype'"),
        ("sub_modules_to_wrap: [predictor.final_layr]\n", "Did you mean 'predictor.final_layer'"),
        ("sharding_size: auto\n", "sub_modules_to_wrap"),
    ],
)
def test_what_the_host_ignores_in_fsdp2_yaml_is_an_error(
    argv: list[str], tmp_path: Path, yaml: str, expected: str
) -> None:
    (tmp_path / "fsdp2.yaml").write_text(yaml)
    with pytest.raises(ConfigError, match=expected):
        check_before_import(argv)


def test_flags_the_host_wants_are_added_once_and_choices_are_kept() -> None:
    completed = complete(["--use-torch-fsdp2", "--bf16", "--save", "here", "--train-iters", "9", "--log-interval", "5"])
    assert "--bf16" not in completed
    assert completed.count("--log-interval") == 1
    assert completed[completed.index("--save-interval") + 1] == "9"
    assert completed[completed.index("--ckpt-format") + 1] == "torch_dcp"
    assert complete(completed) == completed


def test_a_micro_batch_that_is_not_named_is_the_images_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    completed = complete(["--global-batch-size", "64"])
    assert completed[completed.index("--micro-batch-size") + 1] == "16"


def test_without_fsdp2_the_path_of_its_file_is_left_out() -> None:
    completed = complete(["--fsdp2-config-path", "a.yaml", "--bf16"])
    assert "--fsdp2-config-path" not in completed and "a.yaml" not in completed and "--bf16" in completed


def test_a_preset_is_spelled_out_for_the_host(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"predictor": {"preset": "DiT-S/2", "num_classes": 10}}))
    path = spelled_out(["--mm-model", str(tmp_path / "model.json")])[1]
    predictor = json.loads(Path(path).read_text())["predictor"]
    assert predictor["num_layers"] == 12 and predictor["num_classes"] == 10 and "preset" not in predictor


def test_a_flag_of_the_host_is_called_one_in_the_standalone_host() -> None:
    with pytest.raises(ConfigError, match="a flag of MindSpeed-MM, which the standalone host does not know"):
        build_parser().parse_strictly([*REQUIRED, "--use-flash-attn"])


def test_the_host_that_is_not_here_is_an_error_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "is_installed", lambda name: False)
    with pytest.raises(Exception, match="--host = mindspeed-mm: mindspeed"):
        find_host(["--host", "mindspeed-mm"])


def test_the_host_is_imported_in_its_own_order() -> None:
    order = import_order(mindspore=True)
    assert order[:4] == ("torch", "torch_npu", "mindspeed.megatron_adaptor", "mindspeed_mm.mindspore.mindspore_adaptor")
    assert order.index("mindspeed_mm.patchs.torch_dcp_patch") == len(order) - 2
    assert "mindspeed_mm.mindspore.mindspore_adaptor" not in import_order(mindspore=False)
