"""Scores of anybody's images without a published network: each says what its name says."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.tools.evaluate import images_judge
from mindspeed_mm_dit.tools.evaluate.evaluation import Candidates
from mindspeed_mm_dit.tools.evaluate.image_set import open_image_set
from mindspeed_mm_dit.tools.evaluate.images_judge import ImagesJudge
from mindspeed_mm_dit.tools.evaluate.real_images import RealImages, held_out

NAMES = ("disc", "frame", "ramp")


def drawn(name, count, seed):
    """Images (count, 24, 24, 3) uint8 of one kind: each in a colour, size and place of its own, with some noise."""
    rng = np.random.default_rng([seed, NAMES.index(name)])
    y, x = np.mgrid[:24, :24]
    images = np.zeros((count, 24, 24, 3))
    for image in images:
        (cy, cx), size, colour = rng.uniform(9, 15, 2), rng.uniform(4, 8), rng.uniform(0.3, 1, 3)
        far = np.maximum(abs(y - cy), abs(x - cx))
        kinds = {"disc": (y - cy) ** 2 + (x - cx) ** 2 < size**2, "frame": abs(far - size) < 1.5, "ramp": y / 24}
        image[:] = kinds[name][..., None] * colour
    return np.clip(images * 200 + rng.normal(20, 8, images.shape), 0, 255).astype(np.uint8)


def write(folder, images_by_name):
    for name, images in images_by_name.items():
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / name / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return write(tmp_path_factory.mktemp("real"), {name: drawn(name, 30, seed=0) for name in NAMES})


def judgement(samples, real, output):
    assert main(["evaluate", "--samples", str(samples), "--reference", str(real), "--output", str(output)]) == 0
    return json.loads((output / "report.json").read_text())["judgement"]


def test_new_images_score_as_held_out_ones(real, tmp_path):
    found = judgement(write(tmp_path / "new", {name: drawn(name, 20, seed=1) for name in NAMES}), real, tmp_path / "r")
    scores, held = found["scores"], found["yardstick"]
    assert scores["accuracy"] > 0.9 and held["accuracy"] > 0.9
    assert scores["copies"] <= 2 and held["copies"] <= 2  # one in a hundred is as near, by the rule
    assert scores["variety"] == pytest.approx(1, abs=0.1) and held["variety"] == pytest.approx(1, abs=0.15)
    assert scores["frechet"] < 2 * held["frechet"] < found["destroyed"]["frechet"]
    assert found["reference"]["held out"] == 30


def test_classes_are_paired_by_name(real, tmp_path):
    some = {name: drawn(name, 15, seed=2) for name in ("frame", "ramp")}  # numbers 0 and 1 here, 1 and 2 there
    assert judgement(write(tmp_path / "some", some), real, tmp_path / "r")["scores"]["accuracy"] > 0.9
    wrong = write(tmp_path / "wrong", {"frame": some["ramp"], "ramp": some["frame"]})
    assert judgement(wrong, real, tmp_path / "w")["scores"]["accuracy"] < 0.1


def test_copies_and_means_are_seen(real, tmp_path):
    means = {name: np.repeat(drawn(name, 30, seed=0).mean(0, keepdims=True).astype(np.uint8), 10, 0) for name in NAMES}
    found = judgement(real, real, tmp_path / "c")["scores"]
    assert found["copies"] == 90 and found["variety"] == pytest.approx(1)
    of_means = judgement(write(tmp_path / "means", means), real, tmp_path / "m")["scores"]
    assert of_means["variety"] == pytest.approx(0) and of_means["frechet"] > 5 * found["frechet"]


def test_images_of_one_class_are_read_by_shape(tmp_path, capsys):
    sets = {"real": drawn("disc", 30, 0), "new": drawn("disc", 30, 1), "ramps": drawn("ramp", 30, 1)}
    folders = {name: write(tmp_path / name, {"all": images}) for name, images in sets.items()}
    new, ramps = (judgement(folders[name], folders["real"], tmp_path / "r") for name in ("new", "ramps"))
    assert new["scores"]["accuracy"] > 0.9 and ramps["scores"]["accuracy"] < 0.1
    assert new["scores"]["variety"] == pytest.approx(1, abs=0.1)


def crops(photograph, count, seed):
    """Squares (count, 32, 32, 3) uint8 of a photograph, half to nine tenths of its height."""
    photo, rng = Image.fromarray(load_sample_image(f"{photograph}.jpg")), np.random.default_rng(seed)
    found = []
    for side in (photo.height * rng.uniform(0.5, 0.9, count)).astype(int):
        x, y = rng.integers(photo.width - side), rng.integers(photo.height - side)
        found.append(np.asarray(photo.resize((32, 32), box=(x, y, x + side, y + side))))
    return np.stack(found)


def as_drawn_early(images):
    """Draws from the Gaussian of the images, which is what a model learns first: colours and coarse places."""
    flat = images.reshape(len(images), -1) / 255
    weights = np.random.default_rng(0).normal(size=(len(flat), len(flat))) / np.sqrt(len(flat))
    drawn = flat.mean(0) + weights @ (flat - flat.mean(0))
    return (np.clip(drawn, 0, 1) * 255).astype(np.uint8).reshape(images.shape)


@pytest.mark.extended
def test_sets_are_ranked_as_people_rank_them(tmp_path):
    photographs, rng = ("china", "flower"), np.random.default_rng(0)
    known, new = ({name: crops(name, 40, seed) for name in photographs} for seed in (0, 1))
    early = {name: as_drawn_early(known[name]) for name in photographs}
    late = {name: (0.75 * new[name] + 0.25 * early[name]).astype(np.uint8) for name in photographs}
    destroyed = {name: rng.permuted(images.reshape(40, 8, 4, 32, 3), axis=1).reshape(images.shape)
                 for name, images in new.items()}  # fmt: skip
    real, found = write(tmp_path / "known", known), {}
    for name, images in {"destroyed": destroyed, "early": early, "late": late, "new": new, "copied": known}.items():
        found[name] = judgement(write(tmp_path / name, images), real, tmp_path / "r")["scores"]
    read, frechet, copies = (
        {name: scores[kind] for name, scores in found.items()} for kind in ("accuracy", "frechet", "copies")
    )
    assert read["destroyed"] < read["early"] + 0.05 < read["late"] - 0.1 and read["late"] <= read["new"]
    assert read["destroyed"] < 0.1 and read["early"] < 0.4 and read["new"] > 0.85
    assert frechet["new"] < frechet["late"] < frechet["early"] < frechet["destroyed"]
    assert copies["copied"] == 80 and max(copies[name] for name in ("early", "late", "new")) < 10


def test_classes_of_colours_alone_get_no_verdict(tmp_path, capsys):
    rng, colours = np.random.default_rng(0), {"red": (1, 0.2, 0.2), "green": (0.2, 1, 0.2)}
    sets = {name: (rng.uniform(0, 255, (40, 16, 16, 1)) * colour).astype(np.uint8) for name, colour in colours.items()}
    found = judgement(write(tmp_path / "new", sets), write(tmp_path / "real", sets), tmp_path / "r")
    assert capsys.readouterr().out.startswith("no verdict")
    assert found["scores"]["accuracy"] is None and found["scores"]["recall"] is None
    assert "No verdict" in (tmp_path / "r/report.html").read_text()
    for classes, words in ((4, "recognises"), (15, "held out")):
        said = str(images_judge.self_test(drawn("disc", 30, seed=0), np.arange(30) * classes // 30))
        assert said.startswith("no verdict") and words in said


def test_samples_that_cannot_be_scored_are_refused(real, tmp_path, capsys):
    few = write(tmp_path / "real", {"disc": drawn("disc", 3, 3)})
    np.savez(tmp_path / "reference.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    for number, (folders, reference, words) in enumerate((
        ({"disc": 20, "cat": 20}, real, "'cat'"),
        ({"disc": 5, "ramp": 5}, real, "at least 20"),
        ({"disc": 24}, few, "3 image(s)"),
        ({"disc": 24}, tmp_path / "reference.npz", "weights-inception"),
    )):  # fmt: skip
        samples = write(tmp_path / f"s{number}", {name: drawn("disc", n, 1) for name, n in folders.items()})
        flags = ["--samples", str(samples), "--reference", str(reference), "--output", str(tmp_path / "r")]
        assert main(["evaluate", *flags]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_classifier_has_not_seen_held_out_images():
    assert held_out(np.array([0, 0, 0, 1, 1, 0, 1])).tolist() == [False, False, True, False, False, False, True]
    images = drawn("disc", 150, seed=0) / 255  # nothing tells these classes apart
    one_kind = RealImages.of(images, np.arange(150) % 2)
    assert one_kind.score_held_out().accuracy == pytest.approx(0.5, abs=0.15)
    assert one_kind.score(images[one_kind.reference], one_kind.labels[one_kind.reference]).accuracy > 0.8


def test_samples_unlike_the_reference_are_refused(tmp_path):
    np.savez(tmp_path / "real.npz", drawn("disc", 24, seed=4), np.arange(24) % 2)
    reference = open_image_set("--reference", tmp_path / "real.npz")
    samples = Candidates("--checkpoint = c", (24, 24, 3), 24, "--num-samples = 24", num_labels=3)
    for words, given in (("3 classes", samples), ("16 x 24", replace(samples, shape=(16, 24, 3)))):
        with pytest.raises(ConfigError, match=words):
            ImagesJudge(reference).check(given)


def test_damaged_images_of_the_reference_are_skipped(real, tmp_path, monkeypatch):
    reference = shutil.copytree(real, tmp_path / "with_damaged")
    (reference / "disc/000.png").write_bytes((reference / "disc/001.png").read_bytes()[:-200])  # its header is whole
    samples = write(tmp_path / "new", {name: drawn(name, 12, seed=5) for name in NAMES})
    assert judgement(samples, reference, tmp_path / "r")["reference"]["images"] == 89
    monkeypatch.setattr(images_judge, "MAX_REFERENCE_IMAGES", 45)
    assert "45 of 89 real images were used" in " ".join(judgement(samples, reference, tmp_path / "l")["notes"])
