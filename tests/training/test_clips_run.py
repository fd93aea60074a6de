"""Text to video as its user meets it: data and models of others, clips drawn, and what does not fit."""

import copy
import json

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from tests.clips_fixtures import clip_configs, write_clips
from tests.integrations.mindspeed_mm.test_mindspeed_mm_data import WAN
from tests.training.launch import mm_dit

pytestmark = pytest.mark.ranks

STEPS = "--train-iters 6 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --eval-interval 6 "


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def configs(tmp_path_factory, clips):
    return clip_configs(tmp_path_factory.mktemp("configs"), clips, valid_fraction=0.2)


@pytest.fixture(scope="module")
def saved(configs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    assert len(configs.done(STEPS + f"--save {folder}").losses) == 6
    return folder


def test_a_data_json_of_mindspeed_mm_trains_once_its_paths_are_set(tmp_path, clips):
    configs, content = clip_configs(tmp_path, clips), copy.deepcopy(WAN)
    (tmp_path / "data.txt").write_text(f"{clips},{clips}/annotation.json\n")
    content["dataset_param"]["basic_parameters"]["data_path"] = str(tmp_path / "data.txt")
    configs.change("model.json", predictor={"patch_size": [1, 8, 8]})
    content["dataset_param"]["preprocess_parameters"] |= {"num_frames": 9, "max_hxw": 32 * 32, "min_num_frames": 9}
    (tmp_path / "data.json").write_text(json.dumps(content))
    assert len(configs.done("--train-iters 2 --global-batch-size 4 --lr 1e-3").losses) == 2


def sample(saved, output, *flags):
    prompts = ("--prompt", "a seven moves left", "--prompt", "a one moves up")
    return main(["sample", "--checkpoint", str(saved), *prompts, "--steps", "3", "--output", str(output), *flags])


def test_a_clip_depends_on_its_prompt_seed_and_number_alone(saved, tmp_path):
    for name, flags in {"a": (), "b": ("--batch-size", "1"), "c": ("--seed", "1")}.items():
        assert sample(saved, tmp_path / f"{name}.npz", *flags) == 0
    a, b, c = (np.load(tmp_path / f"{name}.npz") for name in "abc")
    assert a["arr_0"].shape == (2, 9, 32, 32, 1) and a["arr_1"].tolist() == ["a seven moves left", "a one moves up"]
    assert np.abs(a["arr_0"].astype(int) - b["arr_0"]).max() <= 1 and (a["arr_0"] != c["arr_0"]).any()


def test_two_ranks_draw_the_clips_of_one(saved, tmp_path):
    assert sample(saved, tmp_path / "one.npz", "--batch-size", "1") == 0
    flags = f"sample --checkpoint {saved} --steps 3 --batch-size 1 --output {tmp_path}/two.npz".split()
    done = mm_dit(*flags, "--prompt", "a seven moves left", "--prompt", "a one moves up", ranks=2)
    assert done.code == 0, done.output
    one, two = (np.load(tmp_path / f"{name}.npz") for name in ("one", "two"))
    assert np.array_equal(one["arr_0"], two["arr_0"]) and np.array_equal(one["arr_1"], two["arr_1"])


def test_clips_are_written_as_videos_animations_and_strips_of_other_lengths(saved, tmp_path, capsys):
    from mindspeed_mm_dit.data.video_file import read_video_facts

    assert sample(saved, tmp_path / "a.mp4", "--frames", "6", "--size", "16x24", "--fps", "8") == 0
    facts = read_video_facts(tmp_path / "a-0001.mp4", decode=True)
    assert facts.num_frames == 6 and facts.size == (192, 288) and facts.fps == 8  # enlarged
    assert sample(saved, tmp_path / "a.gif") == 0 and sample(saved, tmp_path / "a.png") == 0
    assert (tmp_path / "a-0000.gif").stat().st_size and (tmp_path / "a.png").stat().st_size
    assert "a-0000.mp4 ... a-0001.mp4: 2 videos of 6 x 16 x 24" in capsys.readouterr().out


def test_what_cannot_be_drawn_is_named(saved, tmp_path, capsys):
    for *flags, named in (
        ("--frames", "7", "--frames = 7"),
        ("--size", "12", "--size = '12'"),
        ("--prompt", "a b c d e f g h i j", "has a caption of 11 tokens"),
        ("--prompts", "nowhere.txt", "--prompts = nowhere.txt"),
        ("--prompts", "/dev/null", "--prompts = /dev/null"),
        ("--prompt", "...", "--prompt has the caption '...', which has no words"),
        ("--negative-prompt", "a " * 9, "--negative-prompt has a caption of 10 tokens"),
        ("--classes", "3", "--classes = '3'"),
        ("--output", "a.gif", "--fps", "60", "--fps = 60.0"),
        ("--output", "a.jpg", "--output = a.jpg"),
    ):
        assert sample(saved, tmp_path / "a.npz", *flags) == 2
        assert named in capsys.readouterr().err


def test_a_command_for_images_says_so(saved, configs, tmp_path, capsys):
    for command in (
        f"evaluate --checkpoint {saved} --num 10 --reference digits --output {tmp_path}/report",
        f"compare --model {configs.folder}/model.json --output {tmp_path}/report.html",
        f"convert {saved} {tmp_path}/pipe --to pipeline",
    ):
        assert main(command.split()) == 2 and "Error" in capsys.readouterr().err, command
