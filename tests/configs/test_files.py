"""Files a user names: what cannot be reached or read is an error with the name, whatever the system says of it."""

import hashlib
from pathlib import Path

import pytest

from mindspeed_mm_dit.configs.files import (
    UnusableFile,
    add_content,
    digest_of_files,
    fetch_command,
    is_folder,
    read_bytes,
)
from mindspeed_mm_dit.errors import DataError


def test_missing_places_are_no_folders(tmp_path):
    assert not is_folder(Path("x" * 300)) and is_folder(Path("/"))
    with pytest.raises(DataError, match=r"ae.from_pretrained = .*/vae: there is no such file or folder"):
        digest_of_files(str(tmp_path / "vae"))


@pytest.mark.parametrize("read", [read_bytes, lambda path: add_content(hashlib.blake2b(), path)])
def test_a_disk_that_fails_is_the_reason_that_a_file_is_unusable(tmp_path, monkeypatch, read):
    path = tmp_path / "a.bin"
    path.write_bytes(b"content")

    def failing(*given, **settings):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", failing)
    monkeypatch.setattr("builtins.open", failing)
    pytest.raises(UnusableFile, read, path).match("cannot be read: Input/output error")


@pytest.mark.parametrize(("path", "command"), [
    ("weights/FLUX.1-dev/vae", "mm-dit get FLUX.1-dev fetches it"),
    ("/disk/Qwen-Image/transformer/", "mm-dit get Qwen-Image fetches it"),
    ("weights/sd-vae-ft-ema", "mm-dit get sd-vae-ft-ema fetches it"),
    ("weights/mine/vae", ""),
])  # fmt: skip
def test_missing_published_weights_name_their_command(path, command):
    assert fetch_command(path) == command
