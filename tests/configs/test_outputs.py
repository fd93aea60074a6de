"""A place that cannot be written to is refused before any work; one that can is made ready."""

import os
import re
from functools import partial

import pytest

from mindspeed_mm_dit.configs import run
from mindspeed_mm_dit.configs.run import check_output_file, check_output_folder
from mindspeed_mm_dit.errors import ConfigError


def test_missing_folders_are_made_and_no_file_is_touched(tmp_path):
    check_output_file("--output", tmp_path / "a/b/c.png")
    check_output_folder("--save", tmp_path / "d/e")
    assert list((tmp_path / "a/b").iterdir()) == [] and (tmp_path / "d/e").is_dir()
    (tmp_path / "old").write_text("kept")
    check_output_file("--output", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"
    check_output_folder("--save", tmp_path / "looked/at", make=False)
    assert not (tmp_path / "looked").exists()


def test_place_of_the_wrong_kind_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link.png").symlink_to("/proc/nowhere/x.png")
    for check, name, reason in (
        (check_output_file, "folder", "is a folder"),
        (check_output_file, "file/x.png", "cannot be created"),
        (check_output_folder, "file", "is a file"),
        (check_output_folder, "file/below", "cannot be created"),
        (partial(check_output_folder, make=False), "file/below", "cannot be created: .*file is a file"),
        (check_output_file, "link.png", "the folder /proc/nowhere cannot be created"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"--flag = {tmp_path / name}: ") + f".*{reason}"):
            check("--flag", tmp_path / name)


def test_a_place_without_permission_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(run.os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    for check, name in ((check_output_file, "file"), (check_output_file, "new"), (check_output_folder, "")):
        pytest.raises(ConfigError, check, "--flag", tmp_path / name).match("change its permissions")
