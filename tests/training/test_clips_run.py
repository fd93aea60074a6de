"""Text to video as a run and its user meet it: files, features, ranks, resume, clips drawn, and what does not fit."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import GOLDEN
from tests.training.launch import mm_dit
from tests.wings.mindspeed_mm.test_mindspeed_mm_data import WAN

pytestmark = pytest.mark.ranks

TOLERANCE = 2e-6
STEPS = "--train-iters 6 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --eval-interval 6 "


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def configs(tmp_path_factory, clips):
    return clip_configs(tmp_path_factory.mktemp("configs"), clips, valid_fraction=0.2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def whole(configs, saved):
    """One process, one micro-batch, from the files of the clips."""
    outcome = configs.run(STEPS + f"--save {saved}")
    assert outcome.code == 0 and len(outcome.losses) == 6, outcome.output
    assert "19 clips to train on, 5 held out" in outcome.output
    return outcome


def same(outcome, whole):
    assert outcome.losses.keys() == whole.losses.keys(), outcome.output
    for iteration, loss in whole.losses.items():
        assert outcome.losses[iteration] == pytest.approx(loss, rel=TOLERANCE), iteration
    assert list(map(float, outcome.validations[6])) == pytest.approx(list(map(float, whole.validations[6])), rel=1e-5)


@pytest.fixture(scope="module")
def features(tmp_path_factory, configs, clips):
    """Configs that name a cache, and no clips."""
    place = tmp_path_factory.mktemp("features")
    files = ("--model", str(configs.folder / "model.json"), "--data", str(configs.folder / "data.json"))
    assert main(["cache-latents", *files, "--output", str(place / "cache"), "--shard-images", "10"]) == 0
    found = clip_configs(place, clips, valid_fraction=0.2, features=str(place / "cache"))
    data = json.loads((place / "data.json").read_text())
    data["dataset_param"] |= {"data_folder": "nowhere", "json_path": "nowhere/annotation.json"}
    (place / "data.json").write_text(json.dumps(data))
    return found


@pytest.mark.parametrize(("ranks", "flags"), [(1, ""), (2, "--micro-batch-size 2")])
def test_features_teach_what_the_files_do(features, whole, ranks, flags):
    same(features.run(STEPS + flags, ranks), whole)


@pytest.mark.parametrize(
    ("ranks", "sharded"), [(1, False), (2, False), (2, True), pytest.param(4, True, marks=pytest.mark.campaign)]
)
def test_ranks_and_micro_batches_do_not_change_what_is_learned(configs, whole, ranks, sharded):
    (configs.folder / "auto.yaml").write_text("sub_modules_to_wrap: ['predictor.blocks.{*}']\nsharding_size: auto\n")
    fsdp2 = f" --use-torch-fsdp2 --fsdp2-config-path {configs.folder}/auto.yaml" if sharded else ""
    same(configs.run(STEPS + f"--micro-batch-size 2{fsdp2}", ranks), whole)


@pytest.mark.parametrize(
    ("ranks", "shared", "sharded"),
    [(2, 2, False), (4, 2, True), pytest.param(4, 4, False, marks=pytest.mark.campaign)],
)
def test_ranks_that_share_clips_learn_what_one_learns(configs, whole, ranks, shared, sharded):
    (configs.folder / "auto.yaml").write_text("sub_modules_to_wrap: ['predictor.blocks.{*}']\nsharding_size: auto\n")
    fsdp2 = f" --use-torch-fsdp2 --fsdp2-config-path {configs.folder}/auto.yaml" if sharded else ""
    outcome = configs.run(STEPS + f"--micro-batch-size 4 --context-parallel-size {shared}{fsdp2}", ranks)
    same(outcome, whole)
    for iteration, (_, _, norm) in whole.lines.items():
        assert float(outcome.lines[iteration][2]) == pytest.approx(float(norm), abs=1.5e-3), iteration
    assert f"4 x {ranks // shared} group(s) of {shared} ranks that share a sample" in outcome.output


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--context-parallel-size 3", 3, "--context-parallel-size = 3: does not divide predictor.num_heads: 4 % 3 = 1"),
        ("--context-parallel-size 2", 1, "--context-parallel-size = 2: does not divide the 1 ranks"),
    ],
)
def test_ranks_that_cannot_share_a_clip_are_named(configs, flags, ranks, message):
    outcome = configs.run(f"--train-iters 1 --lr 1e-3 --micro-batch-size 1 {flags}", ranks)
    assert outcome.code != 0 and message in outcome.output, outcome.output


def test_a_resumed_run_prints_the_same_lines(configs, whole, tmp_path):
    first = configs.run(STEPS.replace("--train-iters 6", "--train-iters 3") + f"--save {tmp_path}")
    last = configs.run(STEPS + f"--save {tmp_path} --load {tmp_path}")
    assert last.lines == {iteration: line for iteration, line in whole.lines.items() if iteration > 3}, first.output


def test_a_data_json_of_mindspeed_mm_trains_once_its_paths_are_set(tmp_path, clips):
    configs, content = clip_configs(tmp_path, clips), copy.deepcopy(WAN)
    (tmp_path / "data.txt").write_text(f"{clips},{clips}/annotation.json\n")
    content["dataset_param"]["basic_parameters"]["data_path"] = str(tmp_path / "data.txt")
    model = json.loads((tmp_path / "model.json").read_text())
    model["predictor"]["patch_size"] = [1, 8, 8]
    (tmp_path / "model.json").write_text(json.dumps(model))
    content["dataset_param"]["preprocess_parameters"] |= {"num_frames": 9, "max_hxw": 32 * 32, "min_num_frames": 9}
    (tmp_path / "data.json").write_text(json.dumps(content))
    outcome = configs.run("--train-iters 2 --global-batch-size 4 --lr 1e-3")
    assert outcome.code == 0 and len(outcome.losses) == 2, outcome.output
    assert "buckets   9 x 32 x 32: 24, 16 in a row; of each epoch 8 are left out" in outcome.output
    assert "note: no clip is brought to 1 frames" in outcome.output


def test_wan_learns_them_too(tmp_path, clips):
    outcome = clip_configs(tmp_path, clips, predictor="wan").run("--train-iters 2 --global-batch-size 4 --lr 1e-3")
    assert outcome.code == 0 and len(outcome.losses) == 2, outcome.output


def test_the_tutorials_model_is_trained_and_drawn_through_its_autoencoder_and_text_encoder(tmp_path, clips):
    configs = clip_configs(tmp_path, clips)
    model = json.loads((tmp_path / "model.json").read_text())
    vae = {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny"), "norm_latents": True}
    flow = {"model_id": "wan_flow_match_scheduler", "shift": 5, "sigma_min": 0.0, "extra_one_step": True}
    sizes = {"patch_size": [1, 2, 2], "in_channels": 16, "out_channels": 16, "latent_size": [3, 4, 4]}
    content = {**model, "ae": vae, "diffusion": flow, "predictor": model["predictor"] | sizes}
    (tmp_path / "model.json").write_text(json.dumps(content))
    yaml = "sub_modules_to_wrap: ['predictor.blocks.{*}']\nignored_modules: [ae, text_encoder]\n"
    (tmp_path / "fsdp2.yaml").write_text(yaml + "recompute_modules: ['predictor.blocks.{*}']\nsharding_size: auto\n")
    steps = "--train-iters 2 --global-batch-size 4 --lr 1e-3"
    whole = configs.run(f"{steps} --save {tmp_path}/out")
    sharded = configs.run(f"{steps} --use-torch-fsdp2 --fsdp2-config-path {tmp_path}/fsdp2.yaml", 2)
    assert len(whole.losses) == 2 and sharded.losses == pytest.approx(whole.losses, rel=TOLERANCE), sharded.output
    assert sample(tmp_path / "out", tmp_path / "a.npz", "--frames", "5", "--size", "32x16") == 0
    assert np.load(tmp_path / "a.npz")["arr_0"].shape == (2, 5, 32, 16, 3)


def sample(saved, output, *flags):
    prompts = ("--prompt", "a seven moves left", "--prompt", "a one moves up")
    return main(["sample", "--checkpoint", str(saved), *prompts, "--steps", "3", "--output", str(output), *flags])


def test_a_clip_depends_on_its_prompt_seed_and_number_alone(whole, saved, tmp_path):
    for name, flags in {"a": (), "b": ("--batch-size", "1"), "c": ("--seed", "1")}.items():
        assert sample(saved, tmp_path / f"{name}.npz", *flags) == 0
    a, b, c = (np.load(tmp_path / f"{name}.npz") for name in "abc")
    assert a["arr_0"].shape == (2, 9, 32, 32, 1) and a["arr_1"].tolist() == ["a seven moves left", "a one moves up"]
    assert np.abs(a["arr_0"].astype(int) - b["arr_0"]).max() <= 1 and (a["arr_0"] != c["arr_0"]).any()


@pytest.mark.ranks
def test_two_ranks_draw_the_clips_of_one(whole, saved, tmp_path):
    assert sample(saved, tmp_path / "one.npz", "--batch-size", "1") == 0
    flags = f"sample --checkpoint {saved} --steps 3 --batch-size 1 --output {tmp_path}/two.npz".split()
    done = mm_dit(*flags, "--prompt", "a seven moves left", "--prompt", "a one moves up", ranks=2)
    assert done.code == 0, done.output
    one, two = (np.load(tmp_path / f"{name}.npz") for name in ("one", "two"))
    assert np.array_equal(one["arr_0"], two["arr_0"]) and np.array_equal(one["arr_1"], two["arr_1"])


def test_prompts_come_from_a_file_of_windows_too(whole, saved, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfa one moves up\r\n\r\n a two\r\n")
    assert sample(saved, tmp_path / "a.npz", "--prompts", str(tmp_path / "prompts.txt")) == 0
    assert np.load(tmp_path / "a.npz")["arr_1"].tolist()[2:] == ["a one moves up", "a two"]


def test_clips_are_written_as_videos_animations_and_strips_of_other_lengths(whole, saved, tmp_path, capsys):
    from mindspeed_mm_dit.data.video_file import look_at_video

    assert sample(saved, tmp_path / "a.mp4", "--frames", "6", "--size", "16x24", "--fps", "8") == 0
    facts = look_at_video(tmp_path / "a-0001.mp4", decode=True)
    assert facts.num_frames == 6 and facts.size == (192, 288) and facts.fps == 8  # enlarged
    assert sample(saved, tmp_path / "a.gif") == 0 and sample(saved, tmp_path / "a.png") == 0
    assert (tmp_path / "a-0000.gif").stat().st_size and (tmp_path / "a.png").stat().st_size
    assert "a-0000.mp4 ... a-0001.mp4: 2 videos of 6 x 16 x 24" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--frames", "7"), "--frames = 7: do not fit predictor.patch_size"),
        (("--size", "12"), "--size = '12': is not HEIGHTxWIDTH"),
        (("--prompt", "a b c d e f g h i j"), "has a caption of 11 tokens, and text_encoder.max_length is 8"),
        (("--prompts", "nowhere.txt"), "--prompts = nowhere.txt: cannot be read"),
        (("--prompts", "/dev/null"), "--prompts = /dev/null: holds no prompt"),
        (("--prompt", "..."), "--prompt = '...': has the caption '...', which has no words"),
        (("--negative-prompt", "a " * 9), "--negative-prompt = 'a a a a a a a a a ': has a caption of 10 tokens"),
        (("--classes", "3"), "--classes: this model is steered by texts"),
        (("--num-per-class", "3"), "--num-per-class: this model is steered by texts"),
        (("--output", "a.gif", "--fps", "60"), "--fps = 60.0: must be a number of at most 50"),
        (("--output", "a.jpg"), "--output = a.jpg: unknown ending"),
        (("--output", "/dev/null/a.mp4"), "--output = /dev/null/a.mp4: the folder /dev/null cannot be made"),
    ],
)
def test_what_cannot_be_drawn_is_named(whole, saved, tmp_path, capsys, flags, message):
    assert sample(saved, tmp_path / "a.npz", *flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "--checkpoint", "{saved}", "--num", "10", "--reference", "digits", "--output", "{place}/report"),
        ("compare", "--model", "{configs}/model.json", "--output", "{place}/report.html"),
        ("convert", "{saved}", "{place}/pipe", "--to", "pipeline"),
    ],
)
def test_a_command_for_images_says_so(whole, saved, configs, tmp_path, capsys, command):
    words = [word.format(saved=saved, configs=configs.folder, place=tmp_path) for word in command]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "is for images with labels" in error or "has no pipeline here" in error, error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_encoder": None}, "text_encoder: this section is missing: predictor 'custom_dit' is steered by texts"),
        ({"ae": {"model_id": "autoencoder_kl", "from_pretrained": "x"}}, "makes no latents of videos, which predictor"),
        (
            {"predictor": {"latent_size": [9, 16, 32]}},
            "max_width = 9, 32, 32: makes latents of 9 x 32 x 32, and the predictor takes 9 x 16 x 32",
        ),
        (
            {"predictor": {"patch_size": [2, 8, 8], "latent_size": [8, 32, 32]}},
            "makes latents of 9 x 32 x 32, and the predictor takes 8 x 32 x 32: videos of 8 x 32 x 32 pixels",
        ),
        ({"predictor": {"text_dim": 32}}, "predictor.text_dim = 32: the text encoder's states have width 64"),
        ({"data": {"json_path": "nowhere.json"}}, "dataset_param.json_path = nowhere.json"),
        ({"data": {"dataset_type": "films"}}, "dataset_param.dataset_type = 'films': unknown kind of data set"),
        ({"data": {"valid_fraction": 1.0}}, "dataset_param.valid_fraction = 1.0: must lie in [0, 1)"),
        ({"data": {"features": "nowhere"}}, "nowhere: holds no finished cache"),
    ],
)
def test_what_does_not_fit_is_named_before_any_work(clips, tmp_path, changes, message):
    configs = clip_configs(tmp_path, clips, **changes.get("data", {}))
    path = tmp_path / "model.json"
    model = json.loads(path.read_text())
    for name, value in changes.items():
        if name in model:
            model[name] = value if name == "ae" or value is None else model[name] | value
    path.write_text(json.dumps({name: section for name, section in model.items() if section is not None}))
    outcome = configs.run("--train-iters 1 --global-batch-size 4 --lr 1e-3")
    assert outcome.code == 2 and message in outcome.output, outcome.output
    assert "building DiT model" not in outcome.output


def test_images_and_clips_are_not_mixed_up(configs, tmp_path, clips, digits_folder):
    from tests.training.launch import Configs

    images = Configs.create(tmp_path, digits_folder)
    (tmp_path / "data.json").write_text((configs.folder / "data.json").read_text())
    outcome = images.run("--train-iters 1 --global-batch-size 4 --lr 1e-3")
    assert outcome.code == 2 and "its samples are videos, and predictor 'dit' learns images" in outcome.output
    (tmp_path / "model.json").write_text((configs.folder / "model.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": {"data_folder": "data", "image_size": 8}}))
    outcome = images.run("--train-iters 1 --global-batch-size 4 --lr 1e-3")
    assert outcome.code == 2 and "its samples are images, and predictor 'custom_dit' learns videos" in outcome.output
