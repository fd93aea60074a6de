"""--dry-run: every check, what would be trained, code 0, and nothing that a run makes."""

from __future__ import annotations

import pytest

from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

FLAGS = "--train-iters {} --global-batch-size 64 --lr 1e-3 --save out --load out "


def content(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, digits_folder):
    return Configs.create(tmp_path_factory.mktemp("tiny"), digits_folder, hidden_size=32, num_layers=2, num_heads=2)


def test_it_says_what_would_be_trained_and_leaves_nothing(tiny):
    before = content(tiny.folder)
    outcome = tiny.run(FLAGS.format(200) + "--dry-run", ranks=2)
    assert outcome.code == 0, outcome.output
    assert "dit, 50,768 parameters, on 8 x 8 grey images, ae pixel, diffusion gaussian_diffusion" in outcome.output
    length = "200 steps of 64 samples up to iteration 200: each of 1,797 images 7.1 times"
    assert length in outcome.output and outcome.output.count("dry run: every check passed") == 1
    assert "ready in" not in outcome.output and content(tiny.folder) == before


def test_weights_to_begin_with_are_read_too(tiny):
    outcome = tiny.run(FLAGS.format(200) + "--init-from nowhere --dry-run")
    assert outcome.code == 2 and "--init-from = nowhere: there is no such file or folder" in outcome.output


def test_it_finds_where_a_run_would_go_on_and_what_does_not_fit(tiny, digits_folder):
    assert tiny.run(FLAGS.format(2)).code == 0
    before = content(tiny.folder)
    outcome = tiny.run(FLAGS.format(5) + "--dry-run")
    assert outcome.code == 0, outcome.output
    assert "3 steps of 64 samples up to iteration 5, from iteration 2 (128 samples) on" in outcome.output
    other = Configs.create(tiny.folder / "other", digits_folder, hidden_size=64, num_layers=2, num_heads=2)
    outcome = other.run((FLAGS.format(5) + "--dry-run").replace(" out", f" {tiny.folder}/out"))
    assert outcome.code == 2 and "was trained with another model.json: predictor.hidden_size is 32" in outcome.output
    assert [name for name in content(tiny.folder) if not name.startswith("other")] == before
