"""Files and folders a user names: what cannot be reached, read or written is an error with the name."""

import ast
import hashlib
import os
from functools import partial
from pathlib import Path

import pytest

from mindspeed_mm_dit.configs import files, run
from mindspeed_mm_dit.configs.run import check_output_file, check_output_folder
from mindspeed_mm_dit.errors import ConfigError, DataError


def test_missing_places_are_no_folders(tmp_path):
    assert not files.is_folder(Path("x" * 300)) and files.is_folder(Path("/"))
    pytest.raises(DataError, files.digest_of_files, str(tmp_path / "vae")).match("ae.from_pretrained = .*/vae")


@pytest.mark.parametrize("read", [files.read_bytes, lambda path: files.add_content(hashlib.blake2b(), path)])
def test_a_disk_that_fails_is_the_reason_that_a_file_is_unusable(tmp_path, monkeypatch, read):
    path = tmp_path / "a.bin"
    path.write_bytes(b"content")

    def failing(*given, **settings):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", failing)
    monkeypatch.setattr("builtins.open", failing)
    pytest.raises(files.UnusableFile, read, path).match("Input/output error")


@pytest.mark.parametrize(("path", "command"), [
    ("weights/FLUX.1-dev/vae", "Fetch it with mm-dit get FLUX.1-dev."),
    ("/disk/Qwen-Image/transformer/", "Fetch it with mm-dit get Qwen-Image."),
    ("weights/sd-vae-ft-ema", "Fetch it with mm-dit get sd-vae-ft-ema."),
    ("weights/mine/vae", ""),
])  # fmt: skip
def test_missing_published_weights_name_their_command(path, command):
    assert files.fetch_command(path) == command


def test_missing_folders_are_made_and_those_without_permission_refused(tmp_path, monkeypatch):
    check_output_file("--output", tmp_path / "a/b/c.png")
    check_output_folder("--save", tmp_path / "d/e")
    assert list((tmp_path / "a/b").iterdir()) == [] and (tmp_path / "d/e").is_dir()
    (tmp_path / "old").write_text("kept")
    check_output_file("--output", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"
    check_output_folder("--save", tmp_path / "looked/at", make=False)
    assert not (tmp_path / "looked").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(run.os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    for check, name in ((check_output_file, "file"), (check_output_file, "new"), (check_output_folder, "")):
        pytest.raises(ConfigError, check, "--flag", tmp_path / name).match("permissions")


def test_place_of_the_wrong_kind_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link.png").symlink_to("/proc/nowhere/x.png")
    for check, name, reason in (
        (check_output_file, "folder", "is a folder"),
        (check_output_file, "file/x.png", "cannot be created"),
        (check_output_folder, "file", "is a file"),
        (check_output_folder, "file/below", "cannot be created"),
        (partial(check_output_folder, make=False), "file/below", "file is a file"),
        (check_output_file, "link.png", "folder /proc/nowhere.* cannot be created"),
    ):
        pytest.raises(ConfigError, check, "--flag", tmp_path / name).match(f"--flag = {tmp_path / name}.*{reason}")


PACKAGE = Path(__file__).parents[2] / "mindspeed_mm_dit"


@pytest.mark.extended
def test_no_class_variable_is_without_its_type():
    plain = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).rpartition(".")[2] == "ClassVar"
    ]
    assert not plain, f"Python 3.10 refuses a plain ClassVar: {', '.join(plain)}"
