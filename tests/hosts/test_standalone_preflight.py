"""What the standalone host finds, and says, before a device is touched."""

import json

import pytest
from PIL import Image

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.hosts.preflight import preflight
from mindspeed_mm_dit.training.flags import parse
from tests.training.launch import Configs


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
    with pytest.raises(ConfigError, match=r"timestep_window = .* leaves none of 1000 timesteps"):
        check("--timestep-window 0.99999,0.999999")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--timestep-window 0.5,1", "--timestep-window"),
        ("--report", "--report"),
        ("--report --save s --report-steps 2000", "--report-steps = 2000"),
        ("--report --save s --report-steps 300", "--report-steps = 300"),
        ("--report --save s --report-sampler ddpm --report-steps 1001", "--report-steps = 1001"),
        ("--report --save s --report-sampler euler", "--report-sampler = 'euler'"),
        ("--report-cfg-scale nan", "--report-cfg-scale"),
        ("--report-cfg-scale -1", "--report-cfg-scale = -1.0"),
        ("--save=", "--save = '': is empty"),
        ("--wandb-project=", "--wandb-project = '': is empty"),
        ("--init-verbose", "--init-verbose: has no effect without --init-from"),
        ("--save s --save-retain-interval 2", "--save-retain-interval: has no effect without --save-interval"),
        ("--wandb-exp-name first", "--wandb-exp-name: has no effect without --wandb-project"),
        ("--swanlab-save-dir s", "--swanlab-save-dir: has no effect without --swanlab-project"),
        ("--save model.json", "--save = model.json: is a file"),
        ("--save model.json/below", "--save = model.json/below: the folder model.json/below cannot be created"),
        ("--tensorboard-dir model.json", "--tensorboard-dir = model.json: is a file"),
        ("--keep-best --save s --eval-interval 1", "add dataset_param.valid_fraction in data.json, or --mm-valid-data"),
        ("--keep-best --save s", "--keep-best: keeps the checkpoint of the best validation"),
        ("--profile --save s --profile-step-end 3 --profile-step-start 3", "--profile-step-end = 3: must be more than"),
        ("--profile --save s --profile-step-start 2", "--profile-step-start = 2: no step follows: --train-iters is 2"),
        ("--profile --save s --profile-step-start 0 --profile-ranks 0 1", "--profile-ranks: 1: there are 1 rank"),
        ("--profile --profile-step-start 0", "--profile: there is nowhere to write a trace"),
        ("--sample-prompts model.json", "--sample-prompts = model.json: this model is not conditioned on text"),
        ("--sample-prompts gone.txt", "--sample-prompts = gone.txt: cannot be read"),
        ("--sample-interval 1", "--sample-interval = 1: there is nowhere to keep the images"),
    ],
)
def test_flags_that_would_fail_later_are_refused_at_the_start(check, flags, message):
    with pytest.raises(ConfigError) as caught:
        check(flags)
    assert message in str(caught.value)


def test_bucket_of_no_whole_patches_is_refused(check):
    with pytest.raises(ConfigError, match=r"data.json: dataset_param.buckets: 8 x 9: .*9 % 4 = 1"):
        check(image_size=None, buckets=[[8, 8], [8, 9]])


def test_checks_make_no_folder_of_the_run(check, tmp_path):
    check("--report --save out/checkpoints --tensorboard-dir out/events --report-steps 50")
    assert not (tmp_path / "out").exists()


def test_flags_of_other_machines_are_noted(check, framework, monkeypatch, capsys):
    check("--tf32 --pynative")
    said = capsys.readouterr().err
    assert "note: --tf32 has no effect" in said and "this device is a CPU" in said
    assert "note: --pynative has no effect" in said
