"""What the standalone host finds, and says, before a device is touched."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mindspeed_mm_dit.configs.arguments import build_parser, dit_flags
from mindspeed_mm_dit.training.preflight import preflight
from tests.training.launch import Configs


@pytest.fixture
def check(tmp_path, digits_folder, monkeypatch):
    """Run the checks on two classes of ten images each, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    configs = Configs.create(tmp_path, digits_folder, num_classes=2)
    for number in range(20):
        path = tmp_path / "images" / str(number % 2) / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(path)

    def check(flags="", **param):
        param = {"data_folder": str(tmp_path / "images"), "image_size": 8, **param}
        (tmp_path / "data.json").write_text(json.dumps({"dataset_param": param}))
        argv = [*configs.command(flags)[4:], "--train-iters", "2", "--lr", "1", "--micro-batch-size", "2"]
        return preflight(dit_flags(build_parser()).parse_strictly(argv))

    return check


def test_the_first_files_that_are_skipped_are_named_and_all_are_counted(check, tmp_path, capsys):
    check(skip_bad_images=True)
    assert "skipped" not in capsys.readouterr().err
    bad = [tmp_path / "images" / str(number % 2) / f"{number:02d}.png" for number in range(0, 14, 2)]
    for path in bad:
        path.write_bytes(b"no image")
    check(skip_bad_images=True, random_flip=True)
    said = capsys.readouterr().err
    assert "7 image(s) cannot be read and are skipped:\n" in said and "and 2 more" in said
    assert [f"{path} cannot be decoded" in said for path in bad] == [True] * 5 + [False] * 2
