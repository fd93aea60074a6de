"""mm-dit init: from a folder of images to a config that trains, on crops of scikit-learn's two photographs."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.framework import activate
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.captions_fixtures import LAYOUTS
from tests.conftest import GOLDEN, ROOT
from tests.data.test_sharded import write_tar
from tests.photographs_fixtures import cut_photographs
from tests.text_encoder_fixtures import write_bert, write_clip, write_t5
from tests.tools.tables import refusals, table
from tests.training.launch import Configs, run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Crops of photographs; mm-dit is on the path, and scores are not tested."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setattr("mindspeed_mm_dit.tools.planning.init.MIN_SCORED_IMAGES", 10**6)
    cut_photographs(tmp_path / "images")
    return tmp_path


def init(*flags):
    return main(["init", *flags, "--device-memory-gib", "8"])


def dataset(folder="config"):
    return json.loads((folder / "data.json").read_text())["dataset_param"]


@pytest.mark.extended
def test_config_trains_and_samples_by_the_printed_commands(here, capsys):
    assert init("images", "--output", "config") == 0
    said = capsys.readouterr().out
    files = ["data.json", "fsdp2.yaml", "model.json", "train.args"]
    assert sorted(path.name for path in (here / "config").iterdir()) == files
    model = load_model_config(here / "config/model.json")
    assert (model.sample_size[-1], model.predictor.num_classes, model.ae.channels) == (32, 2, 3)
    param = load_data_config(here / "config/data.json").dataset_param
    assert (param.valid_fraction, param.valid_by_class) == (0.1, True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CONFIG": "config", "CUDA_VISIBLE_DEVICES": ""}
    short = "--report always --report-steps 1 --host standalone --train-iters 4 --eval-interval 2"
    command = ["bash", f"{ROOT}/examples/dit/pretrain.sh", *short.split()]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation loss at iteration 4" in done.stdout
    assert {"samples.png", "loss.png"} <= {path.name for path in (here / "outputs/config").iterdir()}
    more = done.stdout[done.stdout.index("sample more:") :].splitlines()[0].split()[3:]
    assert main([*more, "--steps", "1"]) == 0 and (here / "outputs/config/more.png").is_file()
    assert main(["plot", "outputs/config", "--output", "again.png"]) == 0
    words = said[said.index("mm-dit sample") :].replace("\\\n", " ").split()[1:]
    assert main([*words, "--steps", "1", "--num-per-class", "1"]) == 0 and (here / "samples.png").is_file()


def test_names_that_are_not_utf_8_are_taken_and_damaged_images_left_out(here, capsys):
    (here / "images/china").rename(here / "images/ch\udce9na")
    assert init("images", "--output", "c\udcf6nfig") == 0
    assert r"0 ch\udce9na (30)" in capsys.readouterr().out
    words = read_train_args(here / "c\udcf6nfig/train.args")
    assert words[words.index("--save") + 1] == "outputs/c?nfig/checkpoints"
    (here / "images/flower/03.png").write_bytes(b"no image")
    (here / "images/flower/a.cr2").write_bytes(b"")
    assert init("images", "--output", "config") == 0
    said = capsys.readouterr().err
    assert "images/flower/03.png cannot be decoded" in said and "1 .cr2" in said
    assert dataset(here / "config")["skip_bad_images"] is True


def test_images_without_folders_are_one_class(here, capsys):
    assert init("images/china", "--output", "config") == 0
    assert dataset(here / "config")["single_class"] is True and "--cfg-scale 1 " in capsys.readouterr().out
    model = load_model_config(here / "config/model.json")
    assert model.predictor.num_classes == 1 and model.predictor.class_dropout_prob == 0
    assert init("images/china", "--output", "config", "--image-size", "16") == 2
    assert "model.json" in capsys.readouterr().err  # which is replaced only when asked
    assert init("images/china", "--output", "config", "--image-size", "16", "--overwrite") == 0
    assert load_model_config(here / "config/model.json").sample_size[-1] == 16


TABLES = [
    ("images/china/told.csv", "file_name;text", '{};"a temple, ünter"', "utf-8", "semicolons"),
    ("images/told.csv", "file_name\ttext", "{}\ta temple", "utf-8", "tabs"),
    ("images/china/told.csv", "file_name;text", "{};ein café", "cp1252", "line 2"),
    ("images/told.csv", "file_name,text", "{},a temple", "utf-16", "line 1"),
    ("images/china/told.csv", "Filename,Caption", "{},a temple", "utf-8-sig", "['Filename', 'Caption']"),
    ("images/told.csv", "file_name,blurb", "{},a temple", "utf-8", "file_name,caption"),
    ("images/china/told.csv", "file_name,width", "elsewhere/other.jpg,12", "utf-8", ""),
    ("images/captions.txt", "", "{}\ta temple", "utf-8", "captions.txt"),
    ("images/captions.txt", "", "{} a temple", "utf-8", "captions.txt"),
    ("images/told.TSV", "", "images/china/{}\ta temple", "utf-8", "told.TSV"),
    ("images/captions.json", "", '{{"file_name": "{}", "caption": "a temple"}},', "utf-8", "captions.json"),  # COCO's
    ("images/meta_cap.json", "", '"{0:.2}": {{"caption": "a temple"}},', "utf-8", "meta_cap.json"),  # kohya's
    ("images/captions.xlsx", "", "PK", "utf-8", "captions.xlsx"),
    ("images/files.txt", "", "{}", "utf-8", ""),
    ("images/README.txt", "", "Photographs of a temple", "utf-8", ""),
    ("images/._captions.txt", "", "{} a temple", "utf-8", ""),
    ("images/01.png.metadata.json", "", '{{"title": "{}", "description": ""}}', "utf-8", ""),  # Google Takeout's
]
"""File, its first line, its lines, its letters, and what is said of captions that would be lost."""


@pytest.mark.parametrize(("file", "head", "line", "letters", "message"), TABLES)
def test_captions_that_cannot_be_read_are_not_lost_in_silence(here, capsys, file, head, line, letters, message):
    (here / "images/flower").rename(here / "flower")
    lines = [*filter(None, [head]), *(line.format(f"{number:02d}.png") for number in range(30))]
    (here / file).write_bytes("\n".join(lines).encode(letters))
    folder = file.rpartition("/")[0]
    assert init(folder, "--output", "config") == (2 if message else 0)
    said = capsys.readouterr().err
    assert message in said and ("--captions none" in said or "none to leave" in said or not message), said
    assert init(folder, "--output", "config", "--overwrite", "--captions", "none") == 0


def test_captions_beside_images_that_are_not_utf_8_are_refused(here, capsys):
    for number in range(30):
        (here / f"images/china/{number:02d}.txt").write_bytes("a temple, ü".encode("utf-16" if number else "cp1252"))
    assert init("images/china", "--output", "config") == 2 and "UTF-8" in capsys.readouterr().err
    (here / "images/china/00.txt").write_text("a temple")
    assert init("images/china", "--output", "config", "--captions", ".txt") == 0
    assert "29 image(s)" in capsys.readouterr().err


def test_texts_of_few_images_or_under_another_key_need_a_choice(here, capsys):
    for number in range(10):
        (here / f"images/china/{number:02d}.txt").write_text("a temple")
    assert init("images/china", "--output", "config") == 2 and "--captions none" in capsys.readouterr().err
    for place, taken in ((".txt", 10), ("none", 30)):
        assert init("images/china", "--output", place, "--captions", place) == 0
        assert f"{taken} images" in capsys.readouterr().out
    for number in range(30):
        (here / f"images/china/{number:02d}.txt").unlink(missing_ok=True)
        texts = {"tags": ["temple", "roof"], "id": number, "note": "a temple" if number < 10 else ""}
        (here / f"images/china/{number:02d}.json").write_text(json.dumps(texts))
    for flags in ((), ("--captions", ".json:tags"), ("--captions", "none")):
        assert init("images/china", "--output", "config", "--overwrite", *flags) == 0
        found = capsys.readouterr().out
        assert ("but with --captions .json:tags" in found) == (not flags)
        assert ("30 images with captions" in found) == (".json:tags" in flags)


def test_index_is_used_where_there_is_one(here):
    rows = [f"china/{n:02d}.png,temple" for n in range(30)] + [f"flower/{n:02d}.png,blossom" for n in range(20)]
    (here / "images/labels.csv").write_text("\n".join(["image_path,label", *rows]))
    for named, config in (("images", "a"), ("images/labels.csv", "b")):
        assert init(named, "--output", config) == 0
        assert (dataset(here / config)["index"], dataset(here / config)["data_folder"]) == ("labels.csv", "images")
        assert load_model_config(here / config / "model.json").predictor.num_classes == 2


@pytest.mark.extended
def test_captions_train_in_their_shapes_and_are_sampled(here, capsys):
    for number, path in enumerate(sorted((here / "images").glob("*/*.png"))):
        Image.open(path).crop((0, 0, 48, 32 + 16 * (number % 3 == 0))).save(path)
        path.with_suffix(".txt").write_text(f"a {path.parent.name}, the left side\n")
    (here / "images/china/00.txt").write_text("!?\n")
    assert init("images", "--output", "config", "--text-encoder", "words") == 0
    said = capsys.readouterr()
    assert "59 images with captions" in said.out and "no words" in said.err
    found, model = dataset(here / "config"), load_model_config(here / "config/model.json")
    assert (found["captions"], found["bucket_group"], found["random_flip"]) == (".txt", 8, False)
    assert model.sample_size == (24, 40) and model.predictor.num_classes == 0 and "latents" not in found
    assert main(["data", "config", "--output", "sheet.png"]) == 0 and (here / "sheet.png").is_file()
    short = "--report always --report-steps 1 --train-iters 2"
    done = run(Configs(here / "config").command(" ".join([*read_train_args(here / "config/train.args"), short])), here)
    assert done.code == 0 and (here / "outputs/config/samples.png").is_file(), done.output
    [words] = [line for line in said.out.replace("\\\n", " ").splitlines() if line.startswith("draw samples:")]
    assert main([*shlex.split(words)[3:], "--steps", "1"]) == 0 and (here / "samples.png").is_file()


@table(
    "layout flags captions setting value",
    """
beside  | --text-encoder words               | .txt          |              |
csv     | --captions de --text-encoder words | de            | index        | metadata.csv
lines   | --text-encoder words               | caption       | index        | metadata.csv
jsonl   | --text-encoder words               | text          | index        | metadata.jsonl
parquet | --text-encoder words               | texts         | dataset_type | parquet
tar     | --text-encoder words               | .txt          | dataset_type | webdataset
json    | --text-encoder words               | .json:caption | dataset_type | webdataset
beside  | --captions none                    |               |              |
""",
)
def test_captions_are_found_in_every_layout(here, layout, flags, captions, setting, value):
    LAYOUTS[layout](here / "told")
    assert init("told", "--output", "config", *flags.split()) == 0
    found = dataset(here / "config")
    assert (found.get("captions", ""), found.get(setting, "")) == (captions, value)


@pytest.mark.parametrize("kind", ["bert", "clip", "t5"])
def test_text_encoder_of_a_folder_is_recognized(here, kind):
    LAYOUTS["beside"](here / "told")
    {"bert": write_bert, "t5": write_t5, "clip": lambda folder: write_clip(folder, projected=False)}[kind](here / kind)
    assert init("told", "--output", "config", "--text-encoder", kind) == 0
    model = load_model_config(here / "config/model.json")
    assert model.text_encoder.model_id == kind and model.predictor.text_dim == model.text_encoder.states_width()
    assert dataset(here / "config")["latents"] == "config/latents"


@pytest.mark.parametrize("images", ["images", "shards"])
def test_latents_are_encoded_once_on_a_cpu(here, capsys, images):
    """Shards: 30 crops in three classes as webdataset's, and some of a test split."""
    files = [(here / f"images/china/{number:02d}.png").read_bytes() for number in range(30)]
    samples = [(f"{n:04d}", {".cls": b"%d" % (n % 3), ".png": content}) for n, content in enumerate(files)]
    write_tar(here / "shards/train-00000.tar", samples)
    write_tar(here / "shards/test-00000.tar", samples[:3])
    activate("pytorch")
    write_folder(here / "vae", SMALL, our_shapes(SMALL))
    assert init(images, "--output", "config", "--vae", "vae", "--image-size", "32") == 0
    model, said = load_model_config(here / "config/model.json"), capsys.readouterr().out
    assert (model.ae.downsample_factor, model.predictor.input_size, model.predictor.in_channels) == (2, 16, 4)
    found = dataset(here / "config")
    assert found["latents"] == "config/latents" and found["data_folder"] == images
    if images == "shards":
        assert (found["dataset_type"], found["split"], model.predictor.num_classes) == ("webdataset", "train", 3)
    [encode] = [line for line in said.splitlines() if line.startswith("encode once and train: mm-dit ")]
    assert main(encode.removesuffix(" && \\").split()[5:]) == 0
    assert main(["data", "config", "--output", "sheet.png"]) == 0
    assert images == "images" or "shorter side 48 to 48 pixels, middle 48" in capsys.readouterr().out
    command = Configs(here / "config").command(" ".join([*read_train_args(here / "config/train.args"), "--dry-run"]))
    done = run(command, here)
    assert done.code == 0 and "dry run: every check passed" in done.output, done.output


def test_latents_are_encoded_online_with_an_accelerator(here, capsys, monkeypatch):
    activate("pytorch")
    monkeypatch.setattr("mindspeed_mm_dit.training.pytorch.launch.count_accelerators", lambda: 1)
    for name, value in (("device_memory_bytes", 8 * 2**30), ("device_name", "an accelerator")):
        monkeypatch.setattr(f"mindspeed_mm_dit.framework.pytorch.runtime.{name}", lambda value=value: value)
    write_folder(here / "vae", SMALL, our_shapes(SMALL))
    assert init("images", "--output", "config", "--vae", "vae", "--image-size", "32") == 0
    said = capsys.readouterr().out
    assert "latents" not in dataset(here / "config") and "encode once and train" not in said


@refusals("""
image | IMAGES = image
im\udce9ges | IMAGES = im\\udce9ges
empty | IMAGES = empty
notes.txt | IMAGES = notes.txt
splits | splits/train
two | a.csv, b.csv
misnamed | labels.csv
windows | cat\\1.png
nothing | IMAGES = nothing
images --output images/c
'' | IMAGES = ''
images --output notes.txt
images --captions .txt
images --text-encoder words
told --text-encoder network
images --image-size 33
images --vae none
images --vae empty
images --vae network
images --vae wan
images --vae others | decoder.conv_in.weight
""")
def test_images_and_flags_that_cannot_be_begun_with_are_refused(here, capsys, flags, named):
    (here / "notes.txt").write_text("no image")
    LAYOUTS["beside"](here / "told")
    write_folder(here / "network", {"_class_name": "DiTTransformer2DModel"}, {"proj_out.weight": (2, 2)})
    write_folder(here / "others", SMALL, {"proj_out.weight": (2, 2)})
    shutil.copytree(GOLDEN / "wan_vae_tiny", here / "wan")
    for folder in ("empty", "splits/train/cat", "two", "windows"):
        (here / folder).mkdir(parents=True)
    shutil.copy(here / "images/china/01.png", here / r"windows/cat\1.png")
    (here / "empty/a.cr2").write_bytes(b"")
    (here / "misnamed").symlink_to("images/china")
    (here / "misnamed/labels.csv").write_text("path,class\n00.png,0\n")
    (here / "nothing").symlink_to("nowhere")
    for name in "ab":
        (here / f"two/{name}.csv").write_text("image_path,label\n")
    assert init("--output", "c", *shlex.split(flags)) == 2
    assert named in capsys.readouterr().err and not list(here.glob("c/*"))
