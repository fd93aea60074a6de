"""The checks of every host, and what in them depends on the host."""

import dataclasses
import json

import pytest

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.hosts.preflight import HostFacts, check_configs, fsdp2_of, log_data_set
from mindspeed_mm_dit.planning import MemoryLimit
from tests.conftest import ROOT, run_config

ROOM = MemoryLimit("this machine", 2**34)
HOST = HostFacts("a host", 0, 1, ROOM, None, (), lambda mm: None)


@pytest.fixture
def args(tmp_path, digits_folder):
    """The flags that the checks read, with the embedded default's configs."""
    data = json.loads((ROOT / "examples/dit/data.json").read_text())
    data["dataset_param"]["data_folder"] = str(digits_folder)
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "fsdp2.yaml").write_text("sharding_size: 2\nparam_dtype: bf16\n")
    return run_config(
        mm_model=str(ROOT / "examples/dit/model.json"), mm_data=str(tmp_path / "data.json"), seed=1,
        fsdp2_config_path=str(tmp_path / "fsdp2.yaml"), micro_batch_size=4,
    )  # fmt: skip


def test_configs_come_back_with_what_checkpoints_keep(args):
    mm = check_configs(args, HOST, None)
    assert mm.fsdp2 is None and str(mm.precision) == "float32"
    assert mm.classes == tuple("0123456789") and mm.data_digest and mm.model_json["predictor"]["hidden_size"] == 128


def test_hosts_offer_ways_to_bf16_or_decide_themselves(args):
    args = dataclasses.replace(args, bf16=True)
    with pytest.raises(PlatformError, match="bfloat16"):
        check_configs(args, HOST, None)
    ways = dataclasses.replace(HOST, bf16_modes=("autocast",))
    assert str(check_configs(args, ways, None).precision).startswith("bfloat16 under autocast")
    assert check_configs(args, dataclasses.replace(HOST, bf16_modes=None), None).precision is None


def test_model_must_fit_the_host_and_the_device(args, capsys):
    with pytest.raises(ConfigError, match=r"of 1,275,920 parameters need .* and this machine has"):
        check_configs(args, dataclasses.replace(HOST, machine=MemoryLimit("this machine", 2**20)), None)
    with pytest.raises(ConfigError, match=r"optimizer state .* and a card has"):
        check_configs(args, dataclasses.replace(HOST, device=MemoryLimit("a card", 2**24)), None)
    args = dataclasses.replace(args, micro_batch_size=1000)
    check_configs(args, dataclasses.replace(HOST, device=MemoryLimit("a card", 2**25)), None)
    assert "--micro-batch-size = 1000: a step may need" in capsys.readouterr().err
    check_configs(args, dataclasses.replace(HOST, device=MemoryLimit("a card", 2**25), rank=1), None)
    assert capsys.readouterr().err == ""


def test_ranks_share_samples_where_host_and_predictor_can(args, tmp_path):
    args = dataclasses.replace(args, context_parallel_size=2)
    with pytest.raises(PlatformError, match="--context-parallel-size = 2"):
        check_configs(args, HOST, None)
    host = dataclasses.replace(HOST, has_context_parallel=True)
    check_configs(args, host, None)
    with pytest.raises(ConfigError, match="4 % 3 = 1"):
        check_configs(dataclasses.replace(args, context_parallel_size=3), host, None)
    content = json.loads((tmp_path / "data.json").read_text())
    del content["dataset_param"]["image_size"]
    content["dataset_param"]["buckets"] = [[8, 8], [12, 20]]
    (tmp_path / "data.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="15 % 2 = 1"):
        check_configs(args, host, None)


def test_fsdp2_yaml_is_checked_against_ranks_and_host(args):
    args = dataclasses.replace(args, use_torch_fsdp2=True)
    host = dataclasses.replace(HOST, bf16_modes=("fsdp2",))
    with pytest.raises(ConfigError, match="sharding_size = 2"):
        check_configs(args, host, fsdp2_of(args))
    asked = []
    mm = check_configs(args, dataclasses.replace(host, world_size=2, check_sharding=asked.append), fsdp2_of(args))
    assert [found.fsdp2 for found in asked] == [mm.fsdp2]


def test_validation_without_images_is_a_warning(args, capsys):
    mm = check_configs(args, HOST, None)
    args = dataclasses.replace(args, eval_interval=5)
    log_data_set(args, mm)
    said = capsys.readouterr()
    assert "1797 images to train on" in said.out and "--eval-interval = 5: no image is held out" in said.err
