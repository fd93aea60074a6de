"""A run says what it learns from, remembers the names, and refuses to go on under others."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint.store import find_checkpoint, read_classes, read_facts
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.training.data_set import check_classes, log_classes, log_copies_among
from tests.data_fixtures import open_rows, split_rows


def index_of(classes, per_class=20):
    labels = np.repeat(np.arange(len(classes)), per_class)
    return Rows(tuple(map(str, range(len(labels)))), {"label": labels}, tuple(classes))


def test_the_classes_of_a_run_are_said_with_their_images(capsys):
    log_classes(*split_rows(index_of(["cat", "dog", "élan"]), 0.05, seed=1), 3)
    said = capsys.readouterr()
    assert "0 cat (20), 1 dog (20), 2 élan (20)" in said.out and not said.err
    log_classes(*split_rows(index_of(["0", "1"]), 0.0, seed=1), 10)
    assert "num_classes = 10, and 8 classes have no images" in capsys.readouterr().err


def test_a_terminal_without_the_letters_gets_them_spelled_out(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    log_classes(index_of(["élan", "\udce9"]), index_of([], 0), 2)
    assert rb"0 \xe9lan (20), 1 \udce9 (20)" in shown.getvalue()


def test_classes_without_images_and_copies_are_named(tmp_path, capsys):
    for place in ("cat", "dog", "empty"):
        (tmp_path / place).mkdir()
    for name, shade in (("cat/0", 1), ("cat/1", 2), ("cat/2", 2), ("dog/0", 1), ("dog/1", 3)):
        Image.new("L", (8, 8), shade).save(tmp_path / f"{name}.png")
    index = open_rows(DatasetParam(str(tmp_path), 8), 4)
    log_classes(*split_rows(index, 0.4, seed=0), 4)
    log_copies_among(index)
    said = capsys.readouterr().err
    assert index.classes == ("cat", "dog") and "empty" in "".join(index.notes)
    assert "num_classes = 4, and 2 classes have no images" in said
    assert f"{tmp_path}/cat/0.png (0 cat)" in said and f"{tmp_path}/dog/0.png (1 dog)" in said


def test_swapped_and_renamed_classes_are_refused_and_others_taken(tmp_path):
    for before in (["dog", "cat"], ["cat", "bird"]):
        with pytest.raises(CheckpointError, match=f"label .*{', '.join(before)}"):
            check_classes({"classes": before}, ("cat", "dog", "élan"), tmp_path)
    for facts in ({}, {"classes": []}, {"classes": ["cat", "dog"]}, {"classes": ["cat"]}):
        check_classes(facts, ("cat", "dog"), tmp_path)


@pytest.mark.ranks
def test_a_run_goes_on_with_the_classes_it_began_with_alone(tmp_path, tiny):
    configs = tiny.copy(tmp_path).change("model.json", predictor={"num_classes": 2})
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), 50 * number).save(tmp_path / "images" / name / f"{number}.png")
    configs.change("data.json", dataset_param={"data_folder": str(tmp_path / "images"), "index": None})
    flags = "--micro-batch-size 4 --lr 1e-3 --save saved --load saved --train-iters "
    outcome = configs.done(flags + "1")
    kept = read_facts(find_checkpoint(tmp_path / "saved"))["classes"]
    assert kept == ["cat", "dog"] == list(read_classes(tmp_path / "saved"))
    (tmp_path / "images/cat").rename(tmp_path / "images/lion")
    outcome = configs.run(flags + "3")
    assert outcome.code == 2 and "label 0 was 'cat'" in outcome.output
