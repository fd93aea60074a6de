"""The checks of every host, what in them depends on the host, and what the standalone host finds before a device."""

import dataclasses
import json
import re

import pytest
from PIL import Image

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.hosts.preflight import HostFacts, check_configs, fsdp2_of, log_data_set, preflight
from mindspeed_mm_dit.planning import MemoryLimit
from mindspeed_mm_dit.training.flags import parse
from tests.conftest import ROOT, run_config
from tests.tools.tables import refusals
from tests.training.launch import Configs

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


def test_configs_come_back_with_what_checkpoints_keep(args, capsys):
    mm = check_configs(args, HOST, None)
    assert mm.fsdp2 is None and str(mm.precision) == "float32"
    assert mm.classes == tuple("0123456789") and mm.data_digest and mm.model_json["predictor"]["hidden_size"] == 128
    log_data_set(dataclasses.replace(args, eval_interval=5), mm)
    said = capsys.readouterr()
    assert "1797 images to train on" in said.out and "--eval-interval = 5" in said.err  # where none is held out


def test_hosts_offer_ways_to_bf16_or_decide_themselves(args):
    args = dataclasses.replace(args, bf16=True)
    pytest.raises(PlatformError, check_configs, args, HOST, None).match("bfloat16")
    ways = dataclasses.replace(HOST, bf16_modes=("autocast",))
    assert str(check_configs(args, ways, None).precision).startswith("bfloat16 under autocast")
    assert check_configs(args, dataclasses.replace(HOST, bf16_modes=None), None).precision is None


def test_model_must_fit_the_host_and_the_device(args, capsys):
    for words, limits in (
        ("1,275,920 parameters .* this machine has", {"machine": MemoryLimit("this machine", 2**20)}),
        ("optimizer state .* a card has", {"device": MemoryLimit("a card", 2**24)}),
    ):
        pytest.raises(ConfigError, check_configs, args, dataclasses.replace(HOST, **limits), None).match(words)
    args = dataclasses.replace(args, micro_batch_size=1000)
    for rank, said in ((0, "--micro-batch-size = 1000"), (1, "")):
        check_configs(args, dataclasses.replace(HOST, device=MemoryLimit("a card", 2**25), rank=rank), None)
        err = capsys.readouterr().err
        assert said in err and bool(said) == bool(err)


def test_ranks_share_samples_where_host_and_predictor_can(args, tmp_path):
    args = dataclasses.replace(args, context_parallel_size=2)
    pytest.raises(PlatformError, check_configs, args, HOST, None).match("--context-parallel-size = 2")
    host = dataclasses.replace(HOST, has_context_parallel=True)
    check_configs(args, host, None)
    with pytest.raises(ConfigError, match="4 % 3 = 1"):
        check_configs(dataclasses.replace(args, context_parallel_size=3), host, None)
    content = json.loads((tmp_path / "data.json").read_text())
    del content["dataset_param"]["image_size"]
    content["dataset_param"]["buckets"] = [[8, 8], [12, 20]]
    (tmp_path / "data.json").write_text(json.dumps(content))
    pytest.raises(ConfigError, check_configs, args, host, None).match("15 % 2 = 1")


def test_fsdp2_yaml_is_checked_against_ranks_and_host(args):
    args = dataclasses.replace(args, use_torch_fsdp2=True)
    host = dataclasses.replace(HOST, bf16_modes=("fsdp2",))
    pytest.raises(ConfigError, check_configs, args, host, fsdp2_of(args)).match("sharding_size = 2")
    asked = []
    mm = check_configs(args, dataclasses.replace(host, world_size=2, check_sharding=asked.append), fsdp2_of(args))
    assert [found.fsdp2 for found in asked] == [mm.fsdp2]


@pytest.fixture
def check(tmp_path, digits_folder, monkeypatch):
    """Run the checks on two classes of ten images each, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    configs = Configs.create(tmp_path, digits_folder, num_classes=2)
    for number in range(20):
        path = tmp_path / "images" / str(number % 2) / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(path)

    def check(flags="", **param):
        param = {"data_folder": str(tmp_path / "images"), "image_size": 8, **param}
        (tmp_path / "data.json").write_text(json.dumps({"dataset_param": param}))
        argv = [*configs.command(flags)[4:], "--train-iters", "2", "--lr", "1", "--micro-batch-size", "2"]
        return preflight(parse(argv))

    return check


def test_unusable_files_are_named_and_counted(check, tmp_path, capsys):
    check(skip_bad_images=True)
    assert "skipped" not in capsys.readouterr().err
    bad = [tmp_path / "images" / str(number % 2) / f"{number:02d}.png" for number in range(0, 14, 2)]
    for path in bad:
        path.write_bytes(b"no image")
    check(skip_bad_images=True, random_flip=True)
    said = capsys.readouterr().err
    assert "7 image(s) cannot be used and are skipped:\n" in said and "and 2 more" in said
    assert [f"{path} cannot be decoded" in said for path in bad] == [True] * 5 + [False] * 2


def test_resumed_run_keeps_the_numbers_of_its_classes(check, tmp_path, capsys):
    (tmp_path / "images/1").rename(tmp_path / "images/10")
    Configs.create(tmp_path, tmp_path / "images", num_classes=11)
    assert check().mm.classes == tuple(map(str, range(11)))
    for iteration, classes in ((1, ["10", "0"]), (2, None)):  # the second is damaged
        (tmp_path / f"saved/iter_{iteration:07d}").mkdir(parents=True)
        (tmp_path / f"saved/iter_{iteration:07d}/run.json").write_text(json.dumps({"classes": classes}))
    assert check("--load saved").mm.classes == ("10", "0")
    assert "classes keep the numbers they had: '10' is label 0" in capsys.readouterr().err


def test_either_expert_is_trained_by_a_flag(check, tmp_path):
    flow = {"model_id": "wan_flow_match_scheduler"}
    Configs(tmp_path).change("model.json", diffusion=flow, predictor={"learn_sigma": False})
    for asked, window in (("0.875,1", (0.875, 1.0)), ("0,0.875", (0.0, 0.875))):
        mm = check(f"--timestep-window {asked}").mm
        assert mm.model.diffusion.timestep_window == tuple(mm.model_json["diffusion"]["timestep_window"]) == window
    with pytest.raises(ConfigError, match=r"timestep_window = .* 1000 timesteps"):
        check("--timestep-window 0.99999,0.999999")


@refusals("""
--timestep-window 0.5,1 | --timestep-window
--report | --report
--report --save s --report-steps 2000
--report --save s --report-steps 300
--report --save s --report-sampler ddpm --report-steps 1001
--report --save s --report-sampler euler | --report-sampler = 'euler'
--report-cfg-scale nan | --report-cfg-scale
--report-cfg-scale -1 | --report-cfg-scale = -1.0
--save= | --save = ''
--wandb-project= | --wandb-project = ''
--init-verbose | without --init-from
--save s --save-retain-interval 2 | without --save-interval
--wandb-exp-name first | without --wandb-project
--swanlab-save-dir s | without --swanlab-project
--save model.json | --save = model.json
--save model.json/below | --save = model.json/below
--tensorboard-dir model.json
--keep-best --save s --eval-interval 1 | dataset_param.valid_fraction
--keep-best --save s | --keep-best
--profile --save s --profile-step-end 3 --profile-step-start 3 | --profile-step-end = 3
--profile --save s --profile-step-start 2
--profile --save s --profile-step-start 0 --profile-ranks 0 1 | --profile-ranks
--profile --profile-step-start 0 | --profile
--sample-prompts model.json
--sample-prompts gone.txt
--sample-interval 1
""")
def test_flags_that_would_fail_later_are_refused_at_the_start(check, flags, named):
    pytest.raises(ConfigError, check, flags).match(re.escape(named))


def test_bucket_of_no_whole_patches_is_refused(check):
    with pytest.raises(ConfigError, match=r"dataset_param.buckets.* 8 x 9.*9 % 4 = 1"):
        check(image_size=None, buckets=[[8, 8], [8, 9]])


def test_checks_make_no_folder_and_note_flags_of_other_machines(check, framework, tmp_path, capsys):
    check("--report --save out/checkpoints --tensorboard-dir out/events --report-steps 50 --tf32 --pynative")
    said = capsys.readouterr().err
    assert "note: --tf32" in said and "a CPU" in said and "note: --pynative" in said
    assert not (tmp_path / "out").exists()
