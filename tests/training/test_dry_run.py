"""--dry-run: every check, what would be trained, code 0, and nothing that a run makes."""

import pytest

pytestmark = pytest.mark.ranks

FLAGS = "--train-iters {} --global-batch-size 64 --lr 1e-3 --save out --load out "


def content(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_it_says_what_would_be_trained_and_leaves_nothing(tiny):
    before = content(tiny.folder)
    outcome = tiny.done(FLAGS.format(200) + "--dry-run", ranks=2)
    assert "dit, 50,768 parameters" in outcome.output and "each of 400 images 32" in outcome.output
    assert outcome.output.count("dry run: every check passed") == 1
    assert "ready in" not in outcome.output and content(tiny.folder) == before


def test_it_finds_where_a_run_would_go_on(tiny):
    assert tiny.run(FLAGS.format(2)).code == 0
    before = content(tiny.folder)
    outcome = tiny.done(FLAGS.format(5) + "--dry-run")
    assert "from iteration 2 (128 samples) on" in outcome.output and content(tiny.folder) == before
