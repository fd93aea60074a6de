import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from benchmarks.sweep import random_weights
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.generate import generate, with_defaults
from mindspeed_mm_dit.sampling.load import describe, load_model
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest
from tests.conftest import ROOT
from tests.inception_fixtures import write_random_weights
from tests.tools.tables import refusals
from tests.training.launch import mm_dit, run

COUNT = 600
CHAIN = ("--sampler", "ddim", "--steps", "2", "--cfg-scale", "1.5", "--reference", "digits")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """Flags that name a small model of digits with random weights."""
    folder = tmp_path_factory.mktemp("untrained")
    model = json.loads((ROOT / "examples/dit/model.json").read_text())
    model["predictor"].update(hidden_size=32, num_layers=1, num_heads=2)
    (folder / "model.json").write_text(json.dumps(model))
    predictor = model_config_from_mapping(model, "model.json").predictor
    positions = np.zeros(parameters_of(predictor).shapes()["pos_embed"], np.float32)
    save_file({**random_weights(predictor, 0), "pos_embed": positions}, folder / "weights.safetensors")
    return ("--checkpoint", f"{folder}/weights.safetensors", "--model", f"{folder}/model.json")


def evaluate(*flags):
    return main(["evaluate", *map(str, flags)])


def digest(folder):
    return hashlib.sha256((folder / "samples.npz").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def alone(untrained, tmp_path_factory):
    """The report of one process that nothing interrupted: 600 images in three files."""
    folder = tmp_path_factory.mktemp("alone") / "report"
    assert evaluate(*untrained, *CHAIN, "--num", COUNT, "--output", folder) == 0
    return folder


def test_report_has_scores_and_every_setting(alone, untrained):
    report = json.loads((alone / "report.json").read_text())
    images, judgement = report["images"], report["judgement"]
    expected = {"num": COUNT, "labels": "equal", "seed": 0, "sampler": "ddim", "steps": 2, "cfg_scale": 1.5,
                "cfg_channels": "3", "cfg_interval": [0.0, 1.0], "weights": "ema", "bf16": False}  # fmt: skip
    assert {name: images[name] for name in expected} == expected
    assert images["checkpoint_sha256"] == hashlib.sha256(Path(untrained[1]).read_bytes()).hexdigest()
    assert {"accuracy", "frechet", "precision", "recall", "variety", "copies"} == set(judgement["scores"])
    assert judgement["yardstick"]["variety"] == pytest.approx(1.0, abs=0.05) and "torch" in report["versions"]
    page = (alone / "report.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page.split("</style>")[1]
    assert f"<td>{images['checkpoint_sha256']}</td>" in page, "a hash is no number, whatever it begins with"
    with np.load(alone / "samples.npz") as file:  # as ADM has them
        assert file["arr_0"].shape == (COUNT, 8, 8, 1) and file["arr_0"].dtype == np.uint8
        assert np.bincount(file["arr_1"]).tolist() == [COUNT // 10] * 10


def test_images_have_the_noise_of_their_numbers(alone, untrained):
    """Image 260 lies in the second file; drawn from its number by hand it is the same, up to rounding."""
    described = describe(ModelRequest(untrained[1], model=untrained[3]))
    request = with_defaults(SampleRequest(sampler="ddim", steps=2, guidance=1.5), described.config)
    conditions = SampleConditions({"label": [260 % 10]}, first_number=260)
    by_hand = generate(load_model(described), described.config, conditions, request)
    with np.load(alone / "samples.npz") as file:
        assert abs(file["arr_0"][260].astype(int) - by_hand[0]).max() <= 1
        assert abs(file["arr_0"][10].astype(int) - by_hand[0]).max() > 1  # the same class, another number


@pytest.mark.ranks
def test_two_ranks_draw_the_bytes_of_one(alone, untrained, tmp_path):
    done = mm_dit("evaluate", *untrained, *CHAIN, "--num", COUNT, "--output", tmp_path / "report", ranks=2)
    assert done.code == 0 and "on 2 rank(s)" in done.output, done.output
    assert digest(tmp_path / "report") == digest(alone)
    scores = [json.loads((folder / "report.json").read_text())["judgement"] for folder in (alone, tmp_path / "report")]
    assert scores[0] == scores[1]


@pytest.mark.ranks
@pytest.mark.extended
def test_rank_without_a_file_waits_for_the_other(untrained, tmp_path):
    convert(untrained[1], tmp_path / "checkpoints", "pytorch", description=json.loads(Path(untrained[3]).read_text()))
    folder = ("--checkpoint", tmp_path / "checkpoints", "--num", 100)
    done = mm_dit("evaluate", *folder, *CHAIN, "--output", tmp_path / "two", ranks=2)
    assert done.code == 0 and "on 2 rank(s)" in done.output, done.output


KILLED = """
import os, signal, sys
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.tools.evaluate.drawing import Shards
write = Shards.write
Shards.write = lambda self, *given: (write(self, *given), os.kill(os.getpid(), signal.SIGKILL))
main(sys.argv[1:])
"""
"""kill -9 behind the first of three files."""


@pytest.mark.ranks
def test_killed_evaluation_goes_on_to_the_same_bytes(alone, untrained, tmp_path):
    folder = tmp_path / "report"
    flags = ("evaluate", *untrained, *CHAIN, "--num", COUNT, "--output", folder)
    (tmp_path / "killed.py").write_text(KILLED)
    assert run([sys.executable, f"{tmp_path}/killed.py", *map(str, flags)], ROOT).code != 0
    assert [file.name for file in folder.glob("images/0*.npy")] == ["000000.npy"]
    assert not (folder / "samples.npz").exists() and not (folder / "report.json").exists()
    again = mm_dit(*flags, ranks=2)
    assert again.code == 0 and "350 of 600 images generated now" in again.output, again.output
    assert digest(folder) == digest(alone)


def test_batch_size_and_the_same_command_again_change_nothing(alone, untrained, tmp_path, capsys):
    assert evaluate(*untrained, *CHAIN, "--num", COUNT, "--batch-size", 17, "--output", tmp_path) == 0
    a, b = (np.load(folder / "samples.npz")["arr_0"].astype(int) for folder in (alone, tmp_path))
    assert abs(a - b).max() <= 1  # rounding
    before = digest(alone)
    assert evaluate(*untrained, *CHAIN, "--num", COUNT, "--output", alone) == 0
    assert " 0 of 600 images" in capsys.readouterr().out and digest(alone) == before


def test_images_of_any_size_are_drawn_and_scored(untrained, tmp_path, capsys):
    for number in range(30):
        Image.new("L", (20, 9 + number), 8 * number).save(tmp_path / f"{number}.png")
    flags = ("--sampler", "ddim", "--steps", "2", "--reference", tmp_path, "--num", 20, "--output", tmp_path / "r")
    assert evaluate(*untrained, *flags, "--size", "8x16") == 0
    assert "30 image(s)" in capsys.readouterr().out
    with np.load(tmp_path / "r" / "samples.npz") as file:
        assert file["arr_0"].shape == (20, 8, 16, 1)
    assert evaluate(*untrained, *flags, "--size", "16x8") == 2 and "--size" in capsys.readouterr().err


def test_fewer_images_than_asked_for_are_never_scored(untrained, tmp_path, capsys):
    flags = (*untrained, *CHAIN, "--num", 30, "--output", tmp_path)
    assert evaluate(*flags) == 0
    with np.load(tmp_path / "samples.npz") as file:
        images, labels = file["arr_0"][:-1], file["arr_1"][:-1]
    np.savez(tmp_path / "samples.npz", images, labels)
    (tmp_path / "report.json").unlink()
    assert evaluate(*flags) == 2 and " 29 images" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()


def test_npz_is_scored_without_a_model(alone, tmp_path, capsys):
    assert evaluate("--samples", alone / "samples.npz", "--reference", "digits", "--output", tmp_path) == 0
    found, drawn = (json.loads((f / "report.json").read_text())["judgement"]["scores"] for f in (tmp_path, alone))
    assert found == drawn
    assert json.loads((tmp_path / "report.json").read_text())["images"]["sha256"] == digest(alone)


@refusals("""
--num 9 | --samples
--samples a.npz --statistics b | --statistics
--samples a.npz | --reference
--samples a.npz --reference digits | a.npz
--statistics pictures | weights-inception-2015-12-05-6726825d.pth
--statistics pictures --inception w.pth | .npz
--checkpoint c --reference digits --num 0
--checkpoint c --reference digits --inception w.pth
--samples a.npz --reference digits --size 8x8
--samples a.npz --inception w.pth --ai-framework mindspore | PyTorch
UNTRAINED --num 19
UNTRAINED --steps 0
UNTRAINED --sampler euler | flow_matching
UNTRAINED --num 1000001
--samples colour.npz --reference digits | grey
--samples unlabelled.npz --reference digits | no labels
--samples others.npz --reference digits | labels up to 19
""")
def test_evaluations_that_cannot_be_made_are_refused(untrained, tmp_path, monkeypatch, flags, named, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("colour.npz", np.zeros((20, 8, 8, 3), np.uint8), np.zeros(20, int))
    np.savez("unlabelled.npz", np.zeros((20, 8, 8, 1), np.uint8))
    np.savez("others.npz", np.zeros((20, 8, 8, 1), np.uint8), np.arange(20))
    given = [each for word in flags.split() for each in ((*untrained, *CHAIN) if word == "UNTRAINED" else (word,))]
    assert evaluate(*given, "--output", tmp_path / "report") == 2
    assert named in capsys.readouterr().err and not (tmp_path / "report").exists()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Random weights of the Inception; skips where torch-fidelity is not installed."""
    if importlib.util.find_spec("torch_fidelity") is None:
        pytest.skip("pip install --no-deps torch-fidelity")
    return write_random_weights(tmp_path_factory.mktemp("inception") / "random.pth")


@pytest.mark.extended
def test_statistics_of_a_folder_score_like_the_folder(weights, tmp_path, capsys):
    pictures, samples = (np.random.default_rng(n).integers(0, 256, (6 + 2 * n, 16, 16, 3), np.uint8) for n in (0, 1))
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, image in enumerate(pictures):
        Image.fromarray(image).save(folder / f"{number}.png")
    np.savez(tmp_path / "samples.npz", samples)
    common, found = ("--inception", weights, "--batch-size", 8), []
    assert evaluate("--statistics", folder, *common, "--output", tmp_path / "reference.npz") == 0
    for name, reference in (("a", folder), ("b", tmp_path / "reference.npz")):
        flags = ("--samples", tmp_path / "samples.npz", "--reference", reference, "--output", tmp_path / name)
        assert evaluate(*flags, *common) == 0
        found.append(json.loads((tmp_path / name / "report.json").read_text())["judgement"])
    assert found[0]["scores"] == pytest.approx(found[1]["scores"], rel=1e-6)
    assert set(found[0]["scores"]) == {"fid", "sfid", "inception_score", "precision", "recall"}
    assert found[0]["features"]["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert "FID" in capsys.readouterr().out


def test_reference_of_another_size_or_network_is_refused(weights, tmp_path, capsys):
    np.savez(tmp_path / "samples.npz", np.zeros((8, 32, 32, 3), np.uint8))
    np.savez(tmp_path / "small.npz", np.zeros((8, 16, 16, 3), np.uint8))
    foreign = {"mu": np.zeros(2048), "sigma": np.eye(2048), "inception_sha256": np.array("ab" * 32)}
    np.savez(tmp_path / "foreign.npz", **foreign)
    flags = ("--samples", tmp_path / "samples.npz", "--inception", weights, "--output", tmp_path / "report")
    for name, words in (("small", "16 x 16"), ("foreign", "other weights")):
        assert evaluate(*flags, "--reference", tmp_path / f"{name}.npz") == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
