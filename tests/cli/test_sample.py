from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.cli.main import COMMANDS, main
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.sampling.generate import SampleSettings, generate
from mindspeed_mm_dit.sampling.load import load_model
from mindspeed_mm_dit.sampling.request import Asked, labels_of, split_classes
from tests.conftest import ROOT
from tests.training.launch import Configs, mm_dit


@pytest.fixture(scope="module")
def trained(tmp_path_factory, digits_folder):
    """A checkpoint folder of a short run."""
    folder = tmp_path_factory.mktemp("trained")
    configs = Configs.create(folder, digits_folder, hidden_size=32, num_layers=2, num_heads=2)
    flags = f"--train-iters 2 --micro-batch-size 8 --lr 1e-2 --save {folder}/checkpoints"
    assert configs.run(flags).code == 0
    return folder


def sample(*flags: str) -> int:
    return main(["sample", *flags])


COMMON = ("--classes", "0,3-4", "--num-per-class", "2", "--sampler", "ddim", "--steps", "5", "--cfg-scale", "2")


def test_an_npz_holds_images_and_labels(trained, tmp_path, capsys):
    output = tmp_path / "s.npz"
    given = ("--checkpoint", f"{trained}/checkpoints", *COMMON, "--output", str(output))
    assert sample(*given) == 0 and "note: " not in capsys.readouterr().err
    assert sample(*given, "--cfg-scale", "500") == 0
    assert "note: --cfg-scale 500 overdrives samples" in capsys.readouterr().err
    with np.load(output) as file:
        assert file["arr_0"].shape == (6, 8, 8, 1) and file["arr_0"].dtype == np.uint8
        assert file["arr_1"].tolist() == [0, 0, 3, 3, 4, 4]


def numbers(path):
    with np.load(path) as file:
        return file["arr_0"], file["arr_1"]


@pytest.mark.ranks
def test_two_ranks_draw_the_bytes_of_one(trained, tmp_path):
    flags = ["sample", "--checkpoint", f"{trained}/checkpoints", *COMMON, "--num-per-class", "3", "--batch-size", "2"]
    assert main([*flags, "--output", f"{tmp_path}/one.npz"]) == 0
    done = mm_dit(*flags, "--output", "two.npz", ranks=2, folder=tmp_path)
    assert done.code == 0 and done.output.count("two.npz: 9 images of 8 x 8 in") == 1, done.output
    assert "on 2 rank(s)" in done.output and not list(tmp_path.glob(".*"))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(numbers(tmp_path / "one.npz"), numbers(tmp_path / "two.npz")))
    wrong = mm_dit(*flags, "--output", "two.gif", ranks=2, folder=tmp_path)
    assert wrong.code and wrong.output.count("--output = two.gif: is a video") == 1, wrong.output


def test_a_folder_takes_single_pictures_by_number_and_label(trained, tmp_path, capsys, monkeypatch):
    flags = ("--checkpoint", f"{trained}/checkpoints", *COMMON, "--output")
    assert sample(*flags, f"{tmp_path}/all.npz") == sample(*flags, f"{tmp_path}/each/") == 0
    images, labels = numbers(tmp_path / "all.npz")
    names = [f"{number:06d}_{label}.png" for number, label in enumerate(labels)]
    assert sorted(file.name for file in (tmp_path / "each").iterdir()) == names and names[-1] == "000005_4.png"
    for image, name in zip(images, names):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "each" / name)), image[..., 0])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert sample(*flags, "./") == 0 and len(list((tmp_path / "here").iterdir())) == 6
    assert sample(*flags, f"{tmp_path}/each/") == 2
    assert "holds files, among which the pictures would be lost" in capsys.readouterr().err


def test_a_page_holds_every_picture_with_label_and_seed_below_it(trained, tmp_path):
    flags = ("--checkpoint", f"{trained}/checkpoints", *COMMON, "--seed", "7", "--output")
    assert sample(*flags, f"{tmp_path}/all.npz") == sample(*flags, f"{tmp_path}/gallery.html") == 0
    images, labels = numbers(tmp_path / "all.npz")
    page = (tmp_path / "gallery.html").read_text()
    found = [
        (png, shown, number)
        for shown, group in re.findall(r"<h2>(\d+)</h2>(.*?)(?=<h2>|<details>)", page, re.S)
        for png, number in re.findall(r'base64,([^"]+)"><figcaption>seed 7, image (\d+)</figcaption>', group)
    ]
    assert sorted((int(number), int(label)) for _, label, number in found) == list(enumerate(labels))
    for png, _, number in found:
        there = np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))
        assert np.array_equal(there, images[int(number)][..., 0])
    assert "ddim, 5 steps" in page and "src=" in page and "http" not in page


def test_a_page_of_too_many_pictures_is_refused(trained, tmp_path, capsys):
    flags = ("--checkpoint", f"{trained}/checkpoints", "--num-per-class", "201", "--output")
    assert sample(*flags, f"{tmp_path}/gallery.html") == 2
    assert "2,010 pictures are too many for one page: it takes 2,000" in capsys.readouterr().err


def test_the_batch_size_does_not_change_the_images(trained, tmp_path):
    common = ["--checkpoint", f"{trained}/checkpoints", *COMMON, "--sampler", "ddpm"]
    for name, size in (("a", "6"), ("b", "4")):
        sample(*common, "--batch-size", size, "--output", f"{tmp_path}/{name}.npz")
    a, b = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in "ab")
    assert abs(a - b).max() <= 1  # rounding of float32 sums


def test_dpm_solver_and_bfloat16_are_reached_from_the_command_line(trained, tmp_path, capsys):
    common = ["--checkpoint", f"{trained}/checkpoints", *COMMON, "--sampler", "dpm++"]
    for name, flags in (("a", []), ("b", ["--bf16"])):
        assert sample(*common, *flags, "--output", f"{tmp_path}/{name}.npz") == 0
        assert "images/s" in capsys.readouterr().out
    a, b = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in "ab")
    assert abs(a - b).mean() < 2.0  # of 255; bfloat16 has 8 bits


def test_weights_kept_in_bfloat16_draw_what_autocast_draws(trained):
    settings = SampleSettings("ddim", 5, Guidance(2.0), bf16=True)
    images = [
        generate(*load_model(f"{trained}/checkpoints", None, bf16=kept), Asked({"label": [0, 1, 2, 3]}), settings)
        for kept in (False, True)
    ]
    assert np.array_equal(*images)


@pytest.mark.extended
@pytest.mark.cpu
def test_compiled_blocks_draw_the_same_images(trained, tmp_path):
    for name, flags in (("a", []), ("b", ["--torch-compile"])):
        assert (
            sample("--checkpoint", f"{trained}/checkpoints", *COMMON, *flags, "--output", f"{tmp_path}/{name}.npz") == 0
        )
    a, b = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in "ab")
    assert abs(a - b).max() <= 1  # fused kernels round float32 differently


@pytest.mark.cpu
def test_compiling_without_a_compiler_is_refused(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    output = f"{tmp_path}/o.npz"
    assert sample("--checkpoint", f"{trained}/checkpoints", *COMMON, "--torch-compile", "--output", output) == 2
    assert "there is no g++ or clang++" in capsys.readouterr().err


def test_a_png_is_a_grid(trained, tmp_path):
    assert sample("--checkpoint", f"{trained}/checkpoints", *COMMON, "--output", f"{tmp_path}/s.png") == 0
    assert Image.open(tmp_path / "s.png").size[1] == 3 * 50


def test_a_picture_shows_every_sample_and_capital_endings_are_written(trained, tmp_path):
    flags = [*COMMON, "--steps", "1", "--num-per-class", "25"]
    for name in ("S.PNG", "S.JPG", "S.NPZ"):
        assert sample("--checkpoint", f"{trained}/checkpoints", *flags, "--output", f"{tmp_path}/{name}") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["S.JPG", "S.NPZ", "S.PNG"]
    for name in ("S.PNG", "S.JPG"):
        width, height = Image.open(tmp_path / name).size
        assert 20 * 50 < width < 21 * 50 and height == 3 * 2 * 50  # 20 in a line, 5 in the next
    with np.load(tmp_path / "S.NPZ") as file:
        assert len(file["arr_0"]) == 75


def write_facts(path, text):
    """Replace run.json together with its checksum."""
    checksums.record(path.parent, {path.name: checksums.write_durably(path, text)})


def test_classes_are_asked_for_and_shown_by_name(trained, tmp_path, monkeypatch):
    facts = find_checkpoint(trained / "checkpoints") / "run.json"
    before = facts.read_text()
    names = ["zero", "one", "two", "élan", *map(str, range(4, 10))]
    shown = []
    monkeypatch.setattr(
        "mindspeed_mm_dit.sampling.grid.ImageDraw.ImageDraw.text", lambda *args, **kwargs: shown.append(args[2])
    )
    write_facts(facts, json.dumps({**json.loads(before), "classes": names}))
    try:
        flags = ["--checkpoint", f"{trained}/checkpoints", *COMMON, "--steps", "1"]
        assert sample(*flags, "--classes", "e\u0301lan,zero,7-8", "--output", f"{tmp_path}/s.npz") == 0
        assert np.load(tmp_path / "s.npz")["arr_1"].tolist() == [3, 3, 0, 0, 7, 7, 8, 8]
        assert sample(*flags, "--classes", "5,one,zero", "--output", f"{tmp_path}/s.png") == 0
        assert shown == ["5", "one", "zero"]
    finally:
        write_facts(facts, before)


def test_without_classes_the_first_ten_are_drawn(tmp_path, trained):
    flags = ["--sampler", "ddim", "--steps", "1", "--num-per-class", "1", "--output", f"{tmp_path}/s.npz"]
    assert sample("--checkpoint", f"{trained}/checkpoints", *flags) == 0
    assert np.load(tmp_path / "s.npz")["arr_1"].tolist() == list(range(10))
    model = json.loads((trained / "model.json").read_text())
    model["predictor"]["num_classes"] = 3
    (tmp_path / "model.json").write_text(json.dumps(model))
    predictor = DiTModel(model_config_from_mapping(model, "m")).predictor
    save_file(predictor.state_dict(), tmp_path / "w.safetensors")
    assert sample("--checkpoint", f"{tmp_path}/w.safetensors", "--model", f"{tmp_path}/model.json", *flags) == 0
    assert np.load(tmp_path / "s.npz")["arr_1"].tolist() == [0, 1, 2]


def test_more_guided_channels_than_a_latent_has_are_refused(trained, tmp_path, capsys):
    flags = ("--checkpoint", f"{trained}/checkpoints", *COMMON, "--output", f"{tmp_path}/s.npz")
    assert sample(*flags, "--cfg-channels", "3") == 2
    assert "--cfg-channels = 3: the latents of this model have 1" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_what_convert_made_of_a_run_remembers_its_model(trained, tmp_path, ending):
    assert main(["convert", f"{trained}/checkpoints", f"{tmp_path}/w{ending}"]) == 0
    images = []
    for source in (trained / "checkpoints", tmp_path / f"w{ending}"):
        assert sample("--checkpoint", str(source), *COMMON, "--output", f"{tmp_path}/o.npz") == 0
        images.append(np.load(tmp_path / "o.npz")["arr_0"])
    assert np.array_equal(*images)


def test_a_folder_without_a_checkpoint_says_what_was_found(tmp_path, capsys):
    flags = ["--model", f"{ROOT}/examples/dit/model.json", "--output", f"{tmp_path}/o.npz"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_text("")
    (tmp_path / "diffusers/transformer").mkdir(parents=True)
    (tmp_path / "diffusers/transformer/config.json").write_text("{}")
    for name, words in (
        ("empty", "found nothing; expected iter_"),
        ("pictures", "found a.png; expected iter_"),
        ("diffusers", "holds none of diffusion_pytorch_model.safetensors, diffusion_pytorch_model.bin: found config"),
    ):
        assert sample("--checkpoint", f"{tmp_path}/{name}", *flags) == 2
        said = capsys.readouterr().err
        assert words in said and "damaged" not in said


def test_published_pt_and_safetensors_give_the_same_images_as_the_run(trained, tmp_path):
    from mindspeed_mm_dit.checkpoint.torch_dcp import read_tree

    weights = read_tree(find_checkpoint(trained / "checkpoints"), "ema")
    torch.save({"ema": weights, "model": {}, "opt": {}}, tmp_path / "w.pt")
    save_file(weights, tmp_path / "w.safetensors")
    images = []
    for source in (trained / "checkpoints", tmp_path / "w.pt", tmp_path / "w.safetensors"):
        sample(
            "--checkpoint", str(source), "--model", f"{trained}/model.json", *COMMON, "--output", f"{tmp_path}/o.npz"
        )
        images.append(np.load(tmp_path / "o.npz")["arr_0"])
    assert np.array_equal(images[0], images[1]) and np.array_equal(images[0], images[2])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--classes", "10"], "is outside 0 ... 9"),
        (["--classes", "a"], "neither a label nor a range"),
        (["--steps", "0"], "--steps = 0"),
        (["--sampler", "dpm"], "unknown sampler"),
        (["--classes", ""], "neither a label nor a range"),
        (["--classes", "9-0"], "neither a label nor a range"),
        (["--output", "x.gif"], "use one of .npz, .png, .jpg, .jpeg"),
        (["--output", "/dev/null/x.png"], "the folder /dev/null cannot be made"),
        (["--seed", "-1"], "--seed = -1"),
        (["--seed", str(2**63)], "must be a number of at most 9,223,372,036,854,775,807"),
        (["--clip", "0"], "--clip = 0.0"),
        (["--clip", "nan"], "--clip = nan"),
        (["--cfg-scale", "nan"], "--cfg-scale = nan"),
        (["--cfg-scale", "inf"], "--cfg-scale = inf"),
        (["--cfg-scale", "-1"], "--cfg-scale = -1.0"),
        (["--steps", "1001"], "more than the 1000 timesteps"),
        (["--num-per-class", "30000", "--output", "x.jpg"], "a JPEG has at most"),
        (["--checkpoint", "nowhere"], "no such file or folder"),
        (["--cfg-interval", "1"], "is not two numbers"),
        (["--num-per-prompt", "2"], "--num-per-prompt: this model is steered by classes"),
        (["--negative-prompt", "a"], "--negative-prompt: this model is steered by classes"),
        (["--fps", "8"], "--fps = 8.0: this model draws images, not videos"),
        (["--classes", "0-99999999999"], "--classes: 0-99999999999: is outside 0 ... 9"),
        (["--classes", "9" * 5000], "neither a label nor a range"),
        (["--num-per-class", "200000"], "2,000,000 images: at most 1,000,000 are drawn at once"),
        (["--num-per-class", "9" * 5000], "--num-per-class"),
        (["--num", "3"], "--num: is the beginning of several flags: --num-per-class, --num-per-prompt"),
        (["--stepz", "3"], "--stepz: unknown flag\n    Cure: Did you mean '--steps'? mm-dit sample --help lists"),
        (["--output", "a.mp4"], "--output = a.mp4: is a video, and this model draws images"),
        (["--steps", "x"], "--steps: invalid int value: 'x'"),
        (["--cfg-scale", "1e30"], "--cfg-scale = 1e+30: must be a number of at most 1,000"),
        (["--model", "huge.json"], "predictor.hidden_size = 100000000: "),
        (["--checkpoint", "a" * 300], "--checkpoint"),
        (["--output", "a" * 300 + ".npz"], "longer than a path"),
    ],
)
def test_a_mistake_is_named_before_weights_are_read(trained, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setattr("mindspeed_mm_dit.sampling.load.read_weights", None)
    monkeypatch.chdir(tmp_path)
    Configs(trained).copy(tmp_path).change("model.json", predictor={"hidden_size": 10**8})
    (tmp_path / "model.json").rename("huge.json")
    given = ["--checkpoint", f"{trained}/checkpoints", "--output", f"{tmp_path}/o.npz", *flags]
    assert sample(*given) == 2
    said = capsys.readouterr().err
    assert message in said and len(said) < 1500 and not (tmp_path / "o.npz").exists()


def test_a_folder_is_no_output(trained, tmp_path, capsys):
    (tmp_path / "o.png").mkdir()
    assert sample("--checkpoint", f"{trained}/checkpoints", "--output", f"{tmp_path}/o.png") == 2
    assert "is a folder" in capsys.readouterr().err


def test_weights_of_another_model_are_refused(trained, tmp_path, capsys):
    model = json.loads((ROOT / "examples/dit/model.json").read_text())
    save_file(DiTModel(model_config_from_mapping(model, "m")).predictor.state_dict(), tmp_path / "w.safetensors")
    flags = ["--model", f"{trained}/model.json", "--output", f"{tmp_path}/o.npz"]
    assert sample("--checkpoint", f"{tmp_path}/w.safetensors", *flags) == 2
    assert "belongs to another architecture" in capsys.readouterr().err


@pytest.mark.cpu
def test_the_positions_of_a_file_are_used_and_not_computed_anew(trained, tmp_path):
    weights = load_model(f"{trained}/checkpoints", None)[0].predictor.state_dict()
    positions, draw = weights["pos_embed"], torch.Generator().manual_seed(0)
    moved = {name: own + 0.1 * torch.randn(own.shape, generator=draw) for name, own in weights.items()}
    for name, own in (("own", positions), ("other", positions.flip(1).contiguous())):
        save_file(moved | {"pos_embed": own}, tmp_path / f"{name}.safetensors")
        flags = ["--model", f"{trained}/model.json", "--output", f"{tmp_path}/{name}.npz", *COMMON]
        assert sample("--checkpoint", f"{tmp_path}/{name}.safetensors", *flags) == 0
    assert not np.array_equal(numbers(tmp_path / "own.npz")[0], numbers(tmp_path / "other.npz")[0])


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("diffusion", {"model_id": "flow_matching"}, "diffusion.model_id = 'flow_matching': "),
        ("diffusion", {"prediction_type": "sample"}, "diffusion.prediction_type = 'sample': "),
        ("predictor", {"num_heads": 1}, "predictor.num_heads = 1: "),
    ],
)
def test_a_model_that_the_weights_did_not_learn_is_refused(trained, tmp_path, capsys, section, changes, message):
    model = json.loads((trained / "model.json").read_text())
    model[section] = changes if "model_id" in changes else model[section] | changes
    (tmp_path / "model.json").write_text(json.dumps(model))
    flags = ["--model", f"{tmp_path}/model.json", "--output", f"{tmp_path}/o.npz"]
    assert sample("--checkpoint", f"{trained}/checkpoints", *flags) == 2
    said = capsys.readouterr().err
    assert message in said and "was trained with" in said and "leave out --model" in said


def test_lists_of_classes():
    assert labels_of(["1", "5", "7-9"], [], 10) == [1, 5, 7, 8, 9]
    with pytest.raises(ConfigError):
        labels_of(["1-"], [], 10)
    assert labels_of(["golden-retriever", "2", "0-1"], ["cat", "golden-retriever"], 10) == [1, 2, 0, 1]
    with pytest.raises(
        ConfigError, match=r"nor the name of a class\n.*Did you mean 'cat'. The checkpoint knows: cat, dog"
    ):
        labels_of(["cta"], ["cat", "dog"], 2)


def parse_classes(text, names):
    return labels_of(split_classes(text, names), names, 12)


NAMES = ("7-9", "salt, pepper", "a b", "10", "8", '5" disk', " edge")


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("7-9", [0]), ("salt, pepper", [1]), ('a b,"salt, pepper",7-9', [2, 1, 0]), ('"10", "8"', [3, 4]),
        ('5" disk', [5]), ('" edge",edge', None), ('" edge"', [6]), ("10", None), ("7-8", None), ("1-2", [1, 2]),
        ('"none"', None), ('"salt, pepper', None), ("10,8", None),
    ],
)  # fmt: skip
def test_a_class_is_its_name_before_its_number_and_they_may_not_disagree(text, labels):
    if labels is None:
        with pytest.raises(ConfigError):
            parse_classes(text, NAMES)
    else:
        assert parse_classes(text, NAMES) == labels


def test_a_number_that_is_the_name_of_another_class_is_refused_with_both():
    reason = r"--classes: 10: is the name of label 2, and label 10 is 8\n.*double quotes, such as '\"10\"'"
    for text in ("1,10", "10-11"):
        with pytest.raises(ConfigError, match=reason):
            parse_classes(text, sorted(map(str, range(12))))
    assert parse_classes("0,10", [str(number) for number in range(12)]) == [0, 10]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "mm-dit" in said and "%%" not in said


def test_help_needs_no_framework():
    code = "import sys; from mindspeed_mm_dit.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'mindspore', 'matplotlib', 'sklearn'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
