import base64
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mindspeed_mm_dit.checkpoint import checksums
from mindspeed_mm_dit.checkpoint.store import find_checkpoint
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.sampling.conditions import SampleConditions, labels_of, split_classes
from mindspeed_mm_dit.sampling.generate import generate, with_defaults
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest
from tests.conftest import ROOT
from tests.tools.tables import refusals
from tests.training.launch import Configs, mm_dit


@pytest.fixture(scope="module")
def trained(tmp_path_factory, digits_folder):
    """A checkpoint folder of a short run."""
    folder = tmp_path_factory.mktemp("trained")
    configs = Configs.create(folder, digits_folder, hidden_size=32, num_layers=2, num_heads=2)
    flags = f"--train-iters 2 --micro-batch-size 8 --lr 1e-2 --save {folder}/checkpoints"
    assert configs.run(flags).code == 0
    return folder


def sample(*flags):
    return main(["sample", *map(str, flags)])


COMMON = ("--classes", "0,3-4", "--num-per-class", "2", "--sampler", "ddim", "--steps", "5", "--cfg-scale", "2")


def test_npz_holds_images_and_labels(trained, tmp_path, capsys):
    given = ("--checkpoint", f"{trained}/checkpoints", *COMMON, "--output", f"{tmp_path}/s.npz")
    assert sample(*given) == 0 and "note: " not in capsys.readouterr().err
    images, labels = numbers(tmp_path / "s.npz")
    assert images.shape == (6, 8, 8, 1) and images.dtype == np.uint8 and labels.tolist() == [0, 0, 3, 3, 4, 4]
    assert sample(*given, "--cfg-scale", "500") == 0
    assert "--cfg-scale 500" in capsys.readouterr().err


def numbers(path):
    with np.load(path) as file:
        return file["arr_0"], file["arr_1"]


@pytest.mark.ranks
def test_two_ranks_draw_the_bytes_of_one(trained, tmp_path):
    flags = ["sample", "--checkpoint", f"{trained}/checkpoints", *COMMON, "--num-per-class", "3", "--batch-size", "2"]
    assert main([*flags, "--output", f"{tmp_path}/one.npz"]) == 0
    done = mm_dit(*flags, "--output", "two.npz", ranks=2, folder=tmp_path)
    assert done.code == 0 and "on 2 rank(s)" in done.output and not list(tmp_path.glob(".*")), done.output
    assert all(a.tobytes() == b.tobytes() for a, b in zip(numbers(tmp_path / "one.npz"), numbers(tmp_path / "two.npz")))


def test_folder_takes_single_pictures_by_number_and_label(trained, tmp_path, capsys, monkeypatch):
    flags = ("--checkpoint", f"{trained}/checkpoints", *COMMON, "--output")
    assert sample(*flags, f"{tmp_path}/all.npz") == sample(*flags, f"{tmp_path}/each/") == 0
    images, labels = numbers(tmp_path / "all.npz")
    names = [f"{number:06d}_{label}.png" for number, label in enumerate(labels)]
    assert sorted(file.name for file in (tmp_path / "each").iterdir()) == names and names[-1] == "000005_4.png"
    for image, name in zip(images, names):
        assert np.array_equal(np.asarray(Image.open(tmp_path / "each" / name)), image[..., 0])
    assert sample(*flags, f"{tmp_path}/each/") == 2 and "is not empty" in capsys.readouterr().err
    (tmp_path / "o.png").mkdir()
    assert sample(*flags, f"{tmp_path}/o.png") == 2 and "is a folder" in capsys.readouterr().err


def test_page_holds_every_picture_with_its_label(trained, tmp_path):
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
    assert "http" not in page


def test_batch_size_and_precision_change_little(trained, tmp_path):
    images = {}
    for name, flags in (
        ("ddpm", ["--sampler", "ddpm", "--batch-size", "6"]), ("smaller", ["--sampler", "ddpm", "--batch-size", "4"]),
        ("dpm++", ["--sampler", "dpm++"]), ("bf16", ["--sampler", "dpm++", "--bf16"]),
    ):  # fmt: skip
        output = f"{tmp_path}/{name}.npz"
        assert sample("--checkpoint", f"{trained}/checkpoints", *COMMON, *flags, "--output", output) == 0
        images[name] = numbers(output)[0].astype(int)
    assert abs(images["ddpm"] - images["smaller"]).max() <= 1  # rounding of float32 sums
    assert abs(images["dpm++"] - images["bf16"]).mean() < 2.0  # of 255; bfloat16 has 8 bits


def test_weights_in_bfloat16_draw_what_autocast_draws(trained):
    described = describe(ModelRequest(f"{trained}/checkpoints"))
    request = with_defaults(SampleRequest(sampler="ddim", steps=5, guidance=2.0, bf16=True), described.config)
    conditions = SampleConditions({"label": [0, 1, 2, 3]})
    images = [
        generate(load_model(described, bf16=bf16), described.config, conditions, request) for bf16 in (False, True)
    ]
    assert np.array_equal(*images)


@pytest.mark.extended
@pytest.mark.cpu
def test_compiled_blocks_draw_the_same_images(trained, tmp_path):
    for name, flags in (("a", []), ("b", ["--torch-compile"])):
        given = ["--checkpoint", f"{trained}/checkpoints", *COMMON, *flags, "--output", f"{tmp_path}/{name}.npz"]
        assert sample(*given) == 0
    a, b = (numbers(tmp_path / f"{name}.npz")[0].astype(int) for name in "ab")
    assert abs(a - b).max() <= 1  # fused kernels round float32 differently


@pytest.mark.cpu
def test_compiling_without_a_compiler_is_refused(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    given = ("--checkpoint", f"{trained}/checkpoints", *COMMON, "--torch-compile", "--output", f"{tmp_path}/o.npz")
    assert sample(*given) == 2 and "g++" in capsys.readouterr().err


def test_pictures_show_every_sample_under_capital_endings(trained, tmp_path):
    flags = [*COMMON, "--steps", "1", "--num-per-class", "25"]
    for name in ("S.PNG", "S.JPG", "S.NPZ"):
        assert sample("--checkpoint", f"{trained}/checkpoints", *flags, "--output", f"{tmp_path}/{name}") == 0
        if name != "S.NPZ":
            width, height = Image.open(tmp_path / name).size
            assert 20 * 50 < width < 21 * 50 and height == 3 * 2 * 50  # 20 in a line, 5 in the next
    assert len(numbers(tmp_path / "S.NPZ")[0]) == 75


def test_classes_are_named_and_shown_by_name(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    facts = find_checkpoint(tmp_path / "checkpoints") / "run.json"
    names, shown = ["zero", "one", "two", "élan", *map(str, range(4, 10))], []
    text = json.dumps({**json.loads(facts.read_text()), "classes": names})
    checksums.write_checksums(facts.parent, {facts.name: checksums.write_durably(facts, text)})
    monkeypatch.setattr("PIL.ImageDraw.ImageDraw.text", lambda *args, **kwargs: shown.append(args[2]))
    flags = ["--checkpoint", f"{tmp_path}/checkpoints", *COMMON, "--steps", "1"]
    assert sample(*flags, "--classes", "e\u0301lan,zero,7-8", "--output", f"{tmp_path}/s.npz") == 0
    assert numbers(tmp_path / "s.npz")[1].tolist() == [3, 3, 0, 0, 7, 7, 8, 8]
    assert sample(*flags, "--classes", "5,one,zero", "--output", f"{tmp_path}/s.png") == 0
    assert shown == ["5", "one", "zero"]
    default = ["--sampler", "ddim", "--steps", "1", "--num-per-class", "1", "--output", f"{tmp_path}/ten.npz"]
    assert sample("--checkpoint", f"{trained}/checkpoints", *default) == 0
    assert numbers(tmp_path / "ten.npz")[1].tolist() == list(range(10))


def test_folder_without_a_checkpoint_names_what_is_there(tmp_path, capsys):
    flags = ["--model", f"{ROOT}/examples/dit/model.json", "--output", f"{tmp_path}/o.npz"]
    for name, content in (("empty", "nothing"), ("pictures", "a.png"), ("diffusers/transformer", "config.json")):
        (tmp_path / name).mkdir(parents=True)
        if content != "nothing":
            (tmp_path / name / content).write_text("{}")
        assert sample("--checkpoint", tmp_path / name.partition("/")[0], *flags) == 2
        assert content in capsys.readouterr().err


def test_converted_and_published_weights_draw_the_same_images(trained, tmp_path):
    from mindspeed_mm_dit.checkpoint.torch_dcp import read_tree

    weights = read_tree(find_checkpoint(trained / "checkpoints"), "ema")
    torch.save({"ema": weights, "model": {}, "opt": {}}, tmp_path / "published.pt")
    save_file(weights, tmp_path / "published.safetensors")
    images = []
    for source in ("checkpoints", "made.pt", "made.safetensors", "published.pt", "published.safetensors"):
        path = trained / source if source == "checkpoints" else tmp_path / source
        if source.startswith("made"):
            assert main(["convert", f"{trained}/checkpoints", str(path)]) == 0
        model = ["--model", f"{trained}/model.json"] if source.startswith("published") else []
        assert sample("--checkpoint", str(path), *model, *COMMON, "--output", f"{tmp_path}/o.npz") == 0
        images.append(numbers(tmp_path / "o.npz")[0])
    assert all(np.array_equal(images[0], each) for each in images[1:])


@refusals(f"""
--classes 10 | 0 ... 9
--classes a | --classes
--classes= | --classes
--classes 9-0 | --classes
--classes 0-99999999999 | 0 ... 9
--classes {"9" * 5000} | --classes
--steps 0
--steps 1001 | 1000 timesteps
--steps x | --steps
--sampler dpm | dpm
--output x.gif | x.gif
--output /dev/null/x.png | /dev/null
--output a.mp4
--output {"a" * 300}.npz | too long
--seed -1
--seed {2**63} | 9,223,372,036,854,775,807
--clip 0 | --clip = 0.0
--clip nan
--cfg-scale nan
--cfg-scale inf
--cfg-scale -1 | --cfg-scale = -1.0
--cfg-scale 1e30 | --cfg-scale = 1e+30
--cfg-interval 1 | two numbers
--cfg-channels 3
--num-per-class 30000 --output x.jpg | JPEG
--num-per-class 200000 | 1,000,000
--num-per-class 201 --output x.html | 2,000
--num-per-class {"9" * 5000} | --num-per-class
--num-per-prompt 2 | --num-per-prompt
--negative-prompt a | --negative-prompt
--fps 8 | --fps = 8.0
--num 3 | --num-per-class, --num-per-prompt
--stepz 3 | '--steps'
--checkpoint nowhere | nowhere
--checkpoint {"a" * 300} | --checkpoint
--model huge.json | predictor.hidden_size = 100000000
--model flow.json | diffusion.model_id = 'flow_matching'
--model sample.json | diffusion.prediction_type = 'sample'
--model heads.json | predictor.num_heads = 1
""")
def test_flags_are_refused_before_weights_are_read(trained, tmp_path, capsys, monkeypatch, flags, named):
    monkeypatch.setattr("mindspeed_mm_dit.sampling.load.read_weights", None)
    monkeypatch.chdir(tmp_path)
    for name, sections in (
        ("huge", {"predictor": {"hidden_size": 10**8}}), ("flow", {"diffusion": {"model_id": "flow_matching"}}),
        ("sample", {"diffusion": {"prediction_type": "sample"}}), ("heads", {"predictor": {"num_heads": 1}}),
    ):  # fmt: skip
        Configs(trained).copy(tmp_path).change("model.json", **sections)
        (tmp_path / "model.json").rename(f"{name}.json")
    given = ["--checkpoint", f"{trained}/checkpoints", "--output", f"{tmp_path}/o.npz", *flags.split()]
    assert sample(*given) == 2
    said = capsys.readouterr().err
    assert named in said and len(said) < 1500 and not (tmp_path / "o.npz").exists()


@pytest.mark.cpu
def test_positions_of_a_file_are_used_and_weights_of_another_model_refused(trained, tmp_path, capsys):
    model = json.loads((ROOT / "examples/dit/model.json").read_text())
    save_file(DiTModel(model_config_from_mapping(model, "m")).predictor.state_dict(), tmp_path / "w.safetensors")
    flags = ["--model", f"{trained}/model.json", "--output", f"{tmp_path}/o.npz"]
    assert sample("--checkpoint", f"{tmp_path}/w.safetensors", *flags) == 2
    assert "architecture" in capsys.readouterr().err
    weights = load_model(describe(ModelRequest(f"{trained}/checkpoints"))).predictor.state_dict()
    positions, draw = weights["pos_embed"], torch.Generator().manual_seed(0)
    moved = {name: own + 0.1 * torch.randn(own.shape, generator=draw) for name, own in weights.items()}
    for name, own in (("own", positions), ("other", positions.flip(1).contiguous())):
        save_file(moved | {"pos_embed": own}, tmp_path / f"{name}.safetensors")
        flags = ["--model", f"{trained}/model.json", "--output", f"{tmp_path}/{name}.npz", *COMMON]
        assert sample("--checkpoint", f"{tmp_path}/{name}.safetensors", *flags) == 0
    assert not np.array_equal(numbers(tmp_path / "own.npz")[0], numbers(tmp_path / "other.npz")[0])


def parse_classes(text, names):
    return labels_of(split_classes(text, names), names, 12)


def test_class_is_its_name_before_its_number():
    assert labels_of(["1", "5", "7-9"], [], 10) == [1, 5, 7, 8, 9]
    assert labels_of(["golden-retriever", "2", "0-1"], ["cat", "golden-retriever"], 10) == [1, 2, 0, 1]
    for words, names, message in ((["1-"], [], "1-"), (["cta"], ["cat", "dog"], "'cat'")):
        pytest.raises(ConfigError, labels_of, words, names, 10).match(message)
    for text in ("1,10", "10-11"):
        with pytest.raises(ConfigError, match=r"10.* label 2.* label 10 is 8"):
            parse_classes(text, sorted(map(str, range(12))))
    assert parse_classes("0,10", [str(number) for number in range(12)]) == [0, 10]
    names = ("7-9", "salt, pepper", "a b", "10", "8", '5" disk', " edge")
    for text, labels in {
        "7-9": [0], "salt, pepper": [1], 'a b,"salt, pepper",7-9': [2, 1, 0], '"10", "8"': [3, 4], '5" disk': [5],
        '" edge"': [6], "1-2": [1, 2],
    }.items():  # fmt: skip
        assert parse_classes(text, names) == labels
    for text in ('" edge",edge', "10", "7-8", '"none"', '"salt, pepper', "10,8"):
        pytest.raises(ConfigError, parse_classes, text, names)
