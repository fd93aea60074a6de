"""mm-dit init: from a folder of images to a config that trains, on crops of scikit-learn's two photographs."""

from __future__ import annotations

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
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.framework import activate
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.captions_fixtures import LAYOUTS
from tests.conftest import GOLDEN, ROOT
from tests.data.test_sharded import write_tar
from tests.text_encoder_fixtures import write_bert, write_clip, write_t5
from tests.training.launch import Configs, run

WORDS = "--text-encoder words"
FILES = ("data.json", "fsdp2.yaml", "model.json", "train.args")


@pytest.fixture(scope="module")
def photographs():
    from sklearn.datasets import load_sample_images

    return dict(zip(("china", "flower"), load_sample_images().images))


@pytest.fixture
def here(tmp_path, monkeypatch, photographs):
    """30 crops of 48 pixels of each photograph, in a folder each; mm-dit is on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, pixels in photographs.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(30):
            top, left = 60 * (number // 6), 90 * (number % 6)
            crop = Image.fromarray(pixels[top : top + 48, left : left + 48])
            crop.save(tmp_path / "images" / name / f"{number:02d}.png")
    return tmp_path


def init(*flags):
    return main(["init", *flags, "--device-memory-gib", "8"])


def dataset(folder="config"):
    return json.loads((folder / "data.json").read_text())["dataset_param"]


@pytest.mark.extended
def test_what_it_writes_trains_at_once_and_is_sampled_as_it_says(here, capsys):
    assert init("images", "--output", "config") == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in (here / "config").iterdir()) == list(FILES)
    assert "2 classes, 54 images to train on, 6 held out: 0 china (30), 1 flower (30)" in said
    assert "train:                 mm-dit train config\n" in said
    assert "what a score can tell: no verdict: " in said  # (most of these crops are sky or leaves)
    model = load_model_config(here / "config/model.json")
    assert (model.sample_size[-1], model.predictor.num_classes, model.ae.channels) == (32, 2, 3)
    param = load_data_config(here / "config/data.json").dataset_param
    assert (param.valid_fraction, param.valid_by_class) == (0.1, True)
    assert all(reason in model.note for reason in ("image_size 32: what a CPU learns soon", "patch_size 4: 64 tokens"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CONFIG": "config", "CUDA_VISIBLE_DEVICES": ""}
    short = "--report always --report-steps 1 --host standalone --train-iters 4 --eval-interval 2"
    done = subprocess.run(
        ["bash", f"{ROOT}/examples/dit/pretrain.sh", *short.split()],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation loss at iteration 4" in done.stdout and (here / "outputs/config/samples.png").is_file()
    assert (here / "outputs/config/loss.png").is_file()
    more = done.stdout[done.stdout.index("draw more:") :].splitlines()[0].split()[3:]
    assert main([*more, "--steps", "1"]) == 0 and (here / "outputs/config/more.png").is_file()
    assert main(["plot", "outputs/config", "--output", "again.png"]) == 0
    words = said[said.index("mm-dit sample") :].replace("\\\n", " ").split()[1:]
    assert main([*words, "--steps", "1", "--num-per-class", "1"]) == 0 and (here / "samples.png").is_file()


def test_every_flag_is_written_with_its_reason_and_read_back(here):
    assert init("images", "--output", "my config") == 0
    words = read_train_args(here / "my config/train.args")
    assert words[words.index("--save") + 1] == words[words.index("--load") + 1] == "outputs/my config/checkpoints"
    lines = (here / "my config/train.args").read_text().splitlines()
    assert lines[lines.index("--lr-decay-style cosine") - 1] == "# down to 0 at the end"


def test_a_class_whose_name_is_no_text_is_learned_too(here, capsys):
    (here / "images/china").rename(here / "images/ch\udce9na")
    assert init("images", "--output", "c\udcf6nfig") == 0
    assert r"0 ch\udce9na (30)" in capsys.readouterr().out
    assert load_data_config(here / "c\udcf6nfig/data.json").dataset_param.data_folder == "images"
    words = read_train_args(here / "c\udcf6nfig/train.args")
    assert words[words.index("--save") + 1] == "outputs/c?nfig/checkpoints"


def test_numbers_that_no_folder_has_are_no_classes_of_few_images(here, capsys):
    for name, number in (("china", "1"), ("flower", "10")):
        (here / "images" / name).rename(here / "images" / number)
    assert init("images", "--output", "config") == 0
    said = capsys.readouterr()
    assert "Expect less here: 30 images a class. Samples" in said.out
    assert "num_classes = 11, and 9 classes have no images (0, 2, 3" in said.err


def test_images_without_folders_are_one_class(here, capsys):
    assert init("images/china", "--output", "config") == 0
    assert dataset(here / "config")["single_class"] is True
    model = load_model_config(here / "config/model.json")
    assert model.predictor.num_classes == 1 and model.predictor.class_dropout_prob == 0
    said = capsys.readouterr().out
    assert "1 class, 30 images to train on: 0 china (30)" in said and "--classes china" in said
    assert "--cfg-scale 1 " in said and "Expect less here: 30 images a class. Samples will be" in said


@pytest.mark.parametrize(
    ("head", "line", "letters", "message"),
    [
        ("file_name;text", '{};"a temple, ünter"', "utf-8", "columns are separated by semicolons: save it with commas"),
        ("file_name\ttext", "{}\ta temple", "utf-8", "its columns are separated by tabs"),
        ("file_name;text", "{};ein café", "cp1252", "line 2: names the images, and is not UTF-8: byte 0xe9"),
        ("file_name,text", "{},a temple", "utf-16", "line 1: names the images, and is not UTF-8"),
        (
            "Filename,Caption",
            "{},a temple",
            "utf-8-sig",
            "names the images, and has the columns ['Filename', 'Caption']",
        ),
        ("file_name,blurb", "{},a temple", "utf-8", "must name file_name,caption, each once; --captions names another"),
        ("file_name,width", "elsewhere/other.jpg,12", "utf-8", ""),
    ],
)
@pytest.mark.parametrize("folder", ["images/china", "images"])
def test_captions_in_a_table_that_cannot_be_read_are_not_lost_in_silence(
    here, capsys, head, line, letters, message, folder
):
    (here / "images/flower").rename(here / "flower")
    lines = [head, *(line.format(f"{number:02d}.png") for number in range(30))]
    (here / folder / "told.csv").write_bytes("\n".join(lines).encode(letters))
    assert init(folder, "--output", "config") == (2 if message else 0)
    assert message in capsys.readouterr().err
    assert init(folder, "--output", "config", "--overwrite", "--captions", "none") == 0


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("captions.txt", "{}\ta temple", True),
        ("captions.txt", "{}: a temple", True),
        ("captions.txt", "{} a temple", True),
        ("told.TSV", "images/china/{}\ta temple", True),
        ("captions.json", '{{"file_name": "{}", "caption": "a temple"}},', True),  # (as COCO's, too)
        ("meta_cap.json", '"{0:.2}": {{"caption": "a temple"}},', True),  # as kohya's
        ("captions.xlsx", "PK", True),
        ("files.txt", "{}", False),
        ("README.txt", "Photographs of a temple", False),
        ("._captions.txt", "{} a temple", False),
        ("01.png.metadata.json", '{{"title": "{}", "description": ""}}', False),  # as Google Takeout's
    ],
)
def test_captions_in_a_file_that_is_not_read_are_not_lost_in_silence(here, capsys, file, content, said):
    (here / "images/flower").rename(here / "flower")
    (here / "images" / file).write_text("\n".join(content.format(f"{number:02d}.png") for number in range(30)))
    assert init("images", "--output", "config") == (2 if said else 0)
    assert (f"{file} may hold the captions, but they are not read from such a file" in capsys.readouterr().err) is said
    assert init("images", "--output", "config", "--overwrite", "--captions", "none") == 0


@pytest.mark.parametrize("letters", ["cp1252", "gb18030", "utf-16", "utf-16-le"])
def test_captions_beside_images_that_are_not_utf_8_are_not_lost_in_silence(here, capsys, letters):
    for number in range(30):
        (here / f"images/china/{number:02d}.txt").write_bytes("a temple, ü".encode(letters))
    assert init("images/china", "--output", "config") == 2
    said = capsys.readouterr().err
    assert "00.txt" in said and "(save it as UTF-8): 30 of 30 images cannot be used" in said
    (here / "images/china/00.txt").write_text("a temple")
    assert init("images/china", "--output", "config", "--captions", ".txt") == 0
    assert "29 image(s) cannot be used and are skipped" in capsys.readouterr().err


def test_captions_of_few_images_are_not_lost_in_silence(here, capsys):
    for number in range(10):
        (here / f"images/china/{number:02d}.txt").write_text("a temple")
    assert init("images/china", "--output", "config") == 2
    said = capsys.readouterr().err
    assert "of 30 images looked at, only 10 with a caption in a .txt beside it" in said and "--captions none" in said
    for place, taken in ((".txt", 10), ("none", 30)):
        assert init("images/china", "--output", place, "--captions", place) == 0
        assert f"{taken} images" in capsys.readouterr().out


def test_texts_under_another_key_are_not_lost_in_silence(here, capsys):
    for number in range(30):
        texts = {"tags": ["temple", "roof"], "id": number, "note": "a temple" if number < 10 else ""}
        (here / f"images/china/{number:02d}.json").write_text(json.dumps(texts))
    for flags, said in (((), True), (("--captions", ".json:tags"), False), (("--captions", "none"), False)):
        assert init("images/china", "--output", "config", "--overwrite", *flags) == 0
        found = capsys.readouterr().out
        assert ("in the .json beside each image, but with --captions .json:tags\n" in found) is said
        assert ("30 images with captions" in found) is (".json:tags" in flags)


def test_of_the_parts_of_a_data_set_the_one_to_train_on_is_named(here, capsys):
    for name, part in (("china", "test"), ("flower", "Train")):
        (here / "images" / name).rename(here / "images" / part)
    assert init("images", "--output", "config") == 2
    assert "name images/Train" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["images", "images/labels.csv"])
def test_an_index_is_used_where_there_is_one(here, named):
    rows = [f"china/{n:02d}.png,temple" for n in range(30)] + [f"flower/{n:02d}.png,blossom" for n in range(20)]
    (here / "images/labels.csv").write_text("\n".join(["image_path,label", *rows]))
    assert init(named, "--output", "config") == 0
    assert dataset(here / "config")["index"] == "labels.csv" and dataset(here / "config")["data_folder"] == "images"
    assert "50 images in 2 classes of images" in json.loads((here / "config/data.json").read_text())["note"]


def test_captions_are_seen_trained_on_in_their_shapes_and_asked_for_as_it_says(here, capsys):
    for number, path in enumerate(sorted((here / "images").glob("*/*.png"))):
        Image.open(path).crop((0, 0, 48, 32 + 16 * (number % 3 == 0))).save(path)
        path.with_suffix(".txt").write_text(f"a {path.parent.name}, the left side\n")
    (here / "images/china/00.txt").write_text("!?\n")
    assert init("images", "--output", "config", "--text-encoder", "words") == 0
    said = capsys.readouterr()
    assert "59 images with captions, such as 'a china, the left side'" in said.out and "no words" in said.err
    found, model = dataset(here / "config"), load_model_config(here / "config/model.json")
    assert (found["captions"], found["bucket_group"], found["random_flip"]) == (".txt", 8, False)
    assert model.sample_size == (24, 40) and model.predictor.num_classes == 0 and "latents" not in found
    assert main(["data", "config", "--output", "sheet.png"]) == 0 and (here / "sheet.png").is_file()
    short = "--report always --report-steps 1 --train-iters 2"
    done = run(Configs(here / "config").command(" ".join([*read_train_args(here / "config/train.args"), short])), here)
    assert done.code == 0 and (here / "outputs/config/samples.png").is_file(), done.output
    [words] = [line for line in said.out.replace("\\\n", " ").splitlines() if line.startswith("draw samples:")]
    assert main([*shlex.split(words)[3:], "--steps", "1"]) == 0 and (here / "samples.png").is_file()


@pytest.mark.parametrize(
    ("layout", "flags", "expected"),
    [
        ("beside", WORDS, {"captions": ".txt"}),
        ("csv", f"--captions de {WORDS}", {"captions": "de", "index": "metadata.csv"}),
        ("lines", WORDS, {"captions": "caption", "index": "metadata.csv"}),
        ("jsonl", WORDS, {"captions": "text", "index": "metadata.jsonl"}),
        ("parquet", WORDS, {"captions": "texts", "dataset_type": "parquet"}),
        ("tar", WORDS, {"captions": ".txt", "dataset_type": "webdataset"}),
        ("json", WORDS, {"captions": ".json:caption", "dataset_type": "webdataset"}),
        ("beside", "--captions none", {}),
    ],
)
def test_captions_are_found_where_they_are(here, layout, flags, expected):
    LAYOUTS[layout](here / "told")
    assert init("told", "--output", "config", *flags.split()) == 0
    found = dataset(here / "config")
    assert {name: found.get(name) for name in expected} == expected and ("captions" in found) == bool(expected)


@pytest.mark.parametrize("kind", ["bert", "clip", "t5"])
def test_the_text_encoder_of_a_folder_is_recognized_and_encodes_once_on_a_cpu(here, capsys, kind):
    LAYOUTS["beside"](here / "told")
    {"bert": write_bert, "t5": write_t5, "clip": lambda folder: write_clip(folder, projected=False)}[kind](here / kind)
    assert init("told", "--output", "config", "--text-encoder", kind) == 0
    model, said = load_model_config(here / "config/model.json"), capsys.readouterr().out
    assert model.text_encoder.model_id == kind and model.predictor.text_dim == model.text_encoder.states_width()
    assert dataset(here / "config")["latents"] == "config/latents" and "encode once and train: mm-dit cache" in said


def write_shards(folder):
    """Write 30 crops in three classes as webdataset's shards, and some of a test split."""
    files = [(folder / f"images/china/{number:02d}.png").read_bytes() for number in range(30)]
    samples = [(f"{n:04d}", {".cls": b"%d" % (n % 3), ".png": content}) for n, content in enumerate(files)]
    write_tar(folder / "shards/train-00000.tar", samples)
    write_tar(folder / "shards/test-00000.tar", samples[:3])


def test_shards_are_taken_as_they_are(here, capsys):
    write_shards(here)
    assert init("shards", "--output", "config") == 0
    found = dataset(here / "config")
    assert (found["dataset_type"], found["split"], found["data_folder"]) == ("webdataset", "train", "shards")
    assert load_model_config(here / "config/model.json").predictor.num_classes == 3
    assert main(["data", "config", "--output", "sheet.png"]) == 0
    assert "shorter side 48 to 48 pixels, middle 48" in capsys.readouterr().out


@pytest.mark.parametrize("images", ["images", "shards"])
def test_with_a_vae_a_cpu_encodes_the_images_once(here, capsys, images):
    write_shards(here)
    activate("pytorch")
    write_folder(here / "vae", SMALL, our_shapes(SMALL))
    assert init(images, "--output", "config", "--vae", "vae", "--image-size", "32") == 0
    model, said = load_model_config(here / "config/model.json"), capsys.readouterr().out
    assert (model.ae.downsample_factor, model.predictor.input_size, model.predictor.in_channels) == (2, 16, 4)
    assert dataset(here / "config")["latents"] == "config/latents"
    [encode] = [line for line in said.splitlines() if line.startswith("encode once and train: mm-dit ")]
    assert main(encode.removesuffix(" && \\").split()[5:]) == 0
    assert main(["data", "config", "--output", "sheet.png"]) == 0
    command = Configs(here / "config").command(" ".join([*read_train_args(here / "config/train.args"), "--dry-run"]))
    done = run(command, here)
    assert done.code == 0 and "dry run: every check passed" in done.output, done.output


def test_with_a_vae_and_an_accelerator_encoding_once_is_a_choice(here, capsys, monkeypatch):
    activate("pytorch")
    monkeypatch.setattr("mindspeed_mm_dit.training.pytorch.launch.count_accelerators", lambda: 1)
    monkeypatch.setattr("mindspeed_mm_dit.framework.pytorch.runtime.device_memory_bytes", lambda: 8 * 2**30)
    monkeypatch.setattr("mindspeed_mm_dit.framework.pytorch.runtime.device_name", lambda: "an accelerator")
    write_folder(here / "vae", SMALL, our_shapes(SMALL))
    assert init("images", "--output", "config", "--vae", "vae", "--image-size", "32") == 0
    said = capsys.readouterr().out
    assert "latents" not in dataset(here / "config") and "encode once and train" not in said
    assert "encode once:           mm-dit cache-latents --model config/model.json" in said
    assert '(optional, faster: then add "latents": "config/latents" to dataset_param)' in said
    assert "train:                 mm-dit train config\n" in said


def test_damaged_images_are_named_and_left_out_of_the_run(here, capsys):
    (here / "images/china/03.png").write_bytes(b"no image")
    (here / "images/china/a.cr2").write_bytes(b"")
    assert init("images", "--output", "config") == 0
    said = capsys.readouterr().err
    assert "images/china/03.png cannot be decoded" in said and "left out: 1 .cr2" in said
    assert dataset(here / "config")["skip_bad_images"] is True


def test_a_folder_with_config_files_is_replaced_only_when_asked(here, capsys):
    assert init("images", "--output", "config") == 0
    assert init("images", "--output", "config", "--image-size", "16") == 2
    assert "holds model.json, data.json, fsdp2.yaml, train.args already" in capsys.readouterr().err
    assert init("images", "--output", "config", "--image-size", "16", "--overwrite") == 0
    assert load_model_config(here / "config/model.json").sample_size[-1] == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("image --output c", "IMAGES = image: is not there\n    Cure: Did you mean 'images'? name a folder"),
        ("im\udce9ges --output c", r"IMAGES = im\udce9ges: is not UTF-8, as data.json must be"),
        ("empty --output c", "IMAGES = empty: holds no images (left out: 1 .cr2)\n    Cure: name a folder that has"),
        ("notes.txt --output c", "IMAGES = notes.txt: is a file, and no index with the columns image_path,label"),
        ("splits --output c", "IMAGES = splits: holds train, which are no classes\n    Cure: name splits/train"),
        ("two --output c", "IMAGES = two: holds several indices: a.csv, b.csv\n    Cure: name one: two/a.csv"),
        ("misnamed --output c", "IMAGES = misnamed: its labels.csv does not begin with the columns image_path,label"),
        ("windows --output c", r"IMAGES = windows: has files such as cat\1.png, and a backslash is no folder here"),
        ("nothing --output c", "IMAGES = nothing: is a link to nothing\n    Cure: name a folder"),
        ("images --output images/c", "--output = images/c: lies among the images"),
        ("'' --output c", "IMAGES = '': is empty"),
        ("images --output notes.txt", "--output = notes.txt: is a file"),
        ("images --output c --captions .txt", "--captions = .txt: images has no captions there"),
        ("images --output c --text-encoder words", "--text-encoder = words: images has no captions"),
        ("told --output c --text-encoder network", "--text-encoder = network: its config.json says model_type None"),
        ("images --output c --image-size 33", "--image-size = 33: is no multiple of 2"),
        ("images --output c --vae none", "--vae = none: no such file or folder; nothing is downloaded"),
        ("images --output c --vae empty", "--vae = empty: holds none of diffusion_pytorch_model.safetensors"),
        (
            "images --output c --vae network",
            "--vae = network: is no autoencoder that is known here: its config.json "
            "says 'DiTTransformer2DModel'\n    Cure: name one of AutoencoderKL,",
        ),
        ("images --output c --vae wan", "--vae = wan: its AutoencoderKLWan encodes videos, not images"),
        (
            "images --output c --vae others",
            "others/diffusion_pytorch_model.safetensors: holds no AutoencoderKL: "
            "it has no weight decoder.conv_in.weight",
        ),
    ],
)
def test_what_cannot_be_begun_is_named_and_nothing_is_written(here, capsys, flags, message):
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
    assert init(*shlex.split(flags)) == 2
    assert message in capsys.readouterr().err
    assert not list(here.glob("c/*"))
