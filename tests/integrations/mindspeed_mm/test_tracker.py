"""What MindSpeed-MM's tracker may say, and what is said of it before the host reads it."""

import pytest

from mindspeed_mm_dit.checkpoint.store import TRACKER
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import newest


@pytest.mark.parametrize(
    ("said", "expected"), [("", "write 12"), ("\ufffd", "says"), ("13", "iter_0000013"), ("release", "release")]
)
def test_tracker_that_names_no_checkpoint_is_refused(tmp_path, said, expected):
    for iteration in (4, 12):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / TRACKER).write_text(said)
    with pytest.raises(CheckpointError) as found:
        newest("--load = here", str(tmp_path))
    assert "--load = here" in str(found.value) and expected in str(found.value)


def test_tracker_names_an_iteration_or_a_release(tmp_path):
    for name, said in (("iter_0000004", "4\n"), ("release", "release")):
        (tmp_path / name).mkdir()
        (tmp_path / TRACKER).write_text(said)
        assert newest("--load = here", str(tmp_path)) == tmp_path / name
