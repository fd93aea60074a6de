"""Scores of anybody's images without a published network: each says what its name says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.wings.scores import images_judge
from mindspeed_mm_dit.wings.scores.evaluation import Candidates
from mindspeed_mm_dit.wings.scores.image_set import open_image_set
from mindspeed_mm_dit.wings.scores.images_judge import ImagesJudge
from mindspeed_mm_dit.wings.scores.real_images import RealImages, held_out

NAMES = ("disc", "frame", "ramp")


def drawn(name: str, count: int, seed: int) -> np.ndarray:
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


def write(folder, images_by_name: dict[str, np.ndarray]):
    for name, images in images_by_name.items():
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / name / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return write(tmp_path_factory.mktemp("real"), {name: drawn(name, 60, seed=0) for name in NAMES})


def judgement(samples, real, output) -> dict:
    assert main(["evaluate", "--samples", str(samples), "--reference", str(real), "--output", str(output)]) == 0
    return json.loads((output / "report.json").read_text())["judgement"]


def test_new_images_of_the_same_kinds_score_as_held_out_ones_do(real, tmp_path):
    found = judgement(write(tmp_path / "new", {name: drawn(name, 20, seed=1) for name in NAMES}), real, tmp_path / "r")
    scores, held = found["scores"], found["yardstick"]
    assert scores["accuracy"] > 0.9 and held["accuracy"] > 0.9
    assert scores["copies"] <= 2 and held["copies"] <= 2  # one in a hundred is as near, by the rule
    assert scores["variety"] == pytest.approx(1, abs=0.1) and held["variety"] == pytest.approx(1, abs=0.1)
    assert scores["frechet"] < 2 * held["frechet"] < found["destroyed"]["frechet"]
    assert found["reference"]["held out"] == 60 and "60 that were held out" in " ".join(found["notes"])


def test_classes_are_found_by_name_though_a_set_lacks_one(real, tmp_path):
    some = {name: drawn(name, 15, seed=2) for name in ("frame", "ramp")}  # numbers 0 and 1 here, 1 and 2 there
    assert judgement(write(tmp_path / "some", some), real, tmp_path / "r")["scores"]["accuracy"] > 0.9
    wrong = write(tmp_path / "wrong", {"frame": some["ramp"], "ramp": some["frame"]})
    assert judgement(wrong, real, tmp_path / "w")["scores"]["accuracy"] < 0.1


def test_a_copy_machine_and_a_model_of_means_are_seen(real, tmp_path):
    copies = write(tmp_path / "copies", {name: drawn(name, 60, seed=0) for name in NAMES})
    means = {name: np.repeat(drawn(name, 60, seed=0).mean(0, keepdims=True).astype(np.uint8), 10, 0) for name in NAMES}
    found = judgement(copies, real, tmp_path / "c")["scores"]
    assert found["copies"] == 180 and found["variety"] == pytest.approx(1)
    of_means = judgement(write(tmp_path / "means", means), real, tmp_path / "m")["scores"]
    assert of_means["variety"] == pytest.approx(0) and of_means["frechet"] > 5 * found["frechet"]


def test_images_of_one_class_are_told_from_images_without_their_shape(tmp_path, capsys):
    sets = {"real": drawn("disc", 30, 0), "new": drawn("disc", 30, 1), "ramps": drawn("ramp", 30, 1)}
    folders = {name: write(tmp_path / name, {"all": images}) for name, images in sets.items()}
    new, ramps = (judgement(folders[name], folders["real"], tmp_path / "r") for name in ("new", "ramps"))
    assert new["scores"]["accuracy"] > 0.9 and ramps["scores"]["accuracy"] < 0.1
    assert new["scores"]["variety"] == pytest.approx(1, abs=0.1)


def crops(photograph: str, count: int, seed: int) -> np.ndarray:
    """Squares (count, 32, 32, 3) uint8 of a photograph, half to nine tenths of its height."""
    photo, rng = Image.fromarray(load_sample_image(f"{photograph}.jpg")), np.random.default_rng(seed)
    found = []
    for side in (photo.height * rng.uniform(0.5, 0.9, count)).astype(int):
        x, y = rng.integers(photo.width - side), rng.integers(photo.height - side)
        found.append(np.asarray(photo.resize((32, 32), box=(x, y, x + side, y + side))))
    return np.stack(found)


def as_drawn_early(images: np.ndarray) -> np.ndarray:
    """Draws from the Gaussian of the images, which is what a model learns first: colours and coarse places."""
    flat = images.reshape(len(images), -1) / 255
    weights = np.random.default_rng(0).normal(size=(len(flat), len(flat))) / np.sqrt(len(flat))
    drawn = flat.mean(0) + weights @ (flat - flat.mean(0))
    return (np.clip(drawn, 0, 1) * 255).astype(np.uint8).reshape(images.shape)


def test_sets_are_ranked_as_people_rank_them_early_late_destroyed_copied_and_real(tmp_path):
    photographs, rng = ("china", "flower"), np.random.default_rng(0)
    known, new = ({name: crops(name, 40, seed) for name in photographs} for seed in (0, 1))
    early = {name: as_drawn_early(known[name]) for name in photographs}
    late = {name: (0.75 * new[name] + 0.25 * early[name]).astype(np.uint8) for name in photographs}
    destroyed = {name: rng.permuted(images.reshape(40, 8, 4, 32, 3), axis=1).reshape(images.shape)
                 for name, images in new.items()}  # fmt: skip
    real, found = write(tmp_path / "known", known), {}
    for name, images in {"destroyed": destroyed, "early": early, "late": late, "new": new, "copied": known}.items():
        found[name] = judgement(write(tmp_path / name, images), real, tmp_path / "r")["scores"]
    read = {name: scores["accuracy"] for name, scores in found.items()}
    assert read["destroyed"] < read["early"] + 0.05 < read["late"] - 0.1 and read["late"] <= read["new"]
    assert read["destroyed"] < 0.1 and read["early"] < 0.4 and read["new"] > 0.85
    assert (
        found["new"]["frechet"] < found["late"]["frechet"] < found["early"]["frechet"] < found["destroyed"]["frechet"]
    )
    assert found["copied"]["copies"] == 80 and max(found[name]["copies"] for name in ("early", "late", "new")) < 10


def test_where_only_colours_differ_no_verdict_is_given_and_that_is_said_first(tmp_path, capsys):
    rng, colours = np.random.default_rng(0), {"red": (1, 0.2, 0.2), "green": (0.2, 1, 0.2)}
    sets = {name: (rng.uniform(0, 255, (40, 16, 16, 1)) * colour).astype(np.uint8) for name, colour in colours.items()}
    found = judgement(write(tmp_path / "new", sets), write(tmp_path / "real", sets), tmp_path / "r")
    assert capsys.readouterr().out.startswith("no verdict: of real images that it has not seen")
    assert found["scores"]["accuracy"] is None and found["scores"]["recall"] is None
    assert "No verdict: " in (tmp_path / "r/report.html").read_text()


@pytest.mark.parametrize(
    ("classes", "words"), [(4, "the classifier reads"), (15, "none can be held out of fewer than 3")]
)
def test_a_classifier_that_cannot_be_tested_or_reads_few_real_images_gives_no_verdict(classes, words):
    said = str(images_judge.self_test(drawn("disc", 30, seed=0), np.arange(30) * classes // 30))
    assert said.startswith("no verdict: ") and words in said


def test_grey_samples_are_held_against_colours_as_grey(real, tmp_path, capsys):
    images = np.concatenate([drawn(name, 10, seed=3) for name in NAMES]).mean(-1, keepdims=True).astype(np.uint8)
    np.savez(tmp_path / "grey.npz", images, np.repeat(np.arange(3), 10))
    found = judgement(tmp_path / "grey.npz", real, tmp_path / "r")
    assert found["scores"]["accuracy"] > 0.8 and "grey.npz is grey" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ({"disc": 20, "cat": 20}, "has no class 'cat', which --samples"),
        ({"disc": 5, "ramp": 5}, "10 image(s): variety within a class wants at least 20"),
    ],
)
def test_what_cannot_be_scored_is_named(real, tmp_path, folders, words, capsys):
    samples = write(tmp_path / "s", {name: drawn("disc", count, 1) for name, count in folders.items()})
    flags = ["--samples", str(samples), "--reference", str(real), "--output", str(tmp_path / "r")]
    assert main(["evaluate", *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_a_reference_of_statistics_alone_names_the_file_to_download_and_where(real, tmp_path, capsys):
    np.savez(tmp_path / "reference.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    flags = ["--samples", str(real), "--reference", str(tmp_path / "reference.npz"), "--output", str(tmp_path / "r")]
    assert main(["evaluate", *flags]) == 2
    said = capsys.readouterr().err
    assert "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception" in said


def test_every_third_image_of_each_class_is_held_out():
    assert held_out(np.array([0, 0, 0, 1, 1, 0, 1])).tolist() == [False, False, True, False, False, False, True]


def test_the_classifier_has_not_seen_what_is_held_out():
    images = drawn("disc", 150, seed=0) / 255  # nothing tells these classes apart
    one_kind = RealImages.of(images, np.arange(150) % 2)
    assert one_kind.score_held_out().accuracy == pytest.approx(0.5, abs=0.15)
    assert one_kind.score(images[one_kind.reference], one_kind.labels[one_kind.reference]).accuracy > 0.8


def test_too_few_real_images_are_refused(tmp_path, capsys):
    few, new = (write(tmp_path / name, {"disc": drawn("disc", n, seed=3)}) for name, n in (("real", 3), ("new", 24)))
    flags = ["--samples", str(new), "--reference", str(few), "--output", str(tmp_path / "r")]
    assert main(["evaluate", *flags]) == 2
    assert "3 image(s): scores without --inception need at least 20" in capsys.readouterr().err


def test_another_size_and_more_classes_than_the_reference_has_are_refused_though_none_has_a_name(tmp_path):
    np.savez(tmp_path / "real.npz", drawn("disc", 24, seed=4), np.arange(24) % 2)
    reference = open_image_set("--reference", tmp_path / "real.npz")
    samples = Candidates("--checkpoint = c", (24, 24, 3), 24, "--num-samples = 24", num_labels=3)
    with pytest.raises(ConfigError, match=r"--checkpoint = c: has 3 classes, and .* has 2"):
        ImagesJudge(reference).check(samples)
    with pytest.raises(ConfigError, match=r"real.npz: has images of 24 x 24, and --checkpoint = c of 16 x 24"):
        ImagesJudge(reference).check(replace(samples, shape=(16, 24, 3)))


def test_damaged_images_of_the_reference_are_skipped_as_in_training_and_named(real, tmp_path, capsys):
    reference = shutil.copytree(real, tmp_path / "with_damaged")
    (reference / "disc/000.png").write_bytes((reference / "disc/001.png").read_bytes()[:-200])  # its header is whole
    found = judgement(
        write(tmp_path / "new", {name: drawn(name, 12, seed=5) for name in NAMES}), reference, tmp_path / "r"
    )
    assert found["reference"]["images"] == 179
    assert "1 image(s) that cannot be read are skipped, the first is disc/000.png" in capsys.readouterr().out


def test_that_not_all_of_a_large_reference_was_used_is_said(real, tmp_path, monkeypatch):
    monkeypatch.setattr(images_judge, "MOST_IMAGES", 90)
    samples = write(tmp_path / "new", {name: drawn(name, 12, seed=5) for name in NAMES})
    assert "90 of 180 real images were used" in " ".join(judgement(samples, real, tmp_path / "r")["notes"])
