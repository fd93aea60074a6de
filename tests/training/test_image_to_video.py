"""Clips that begin with an image: training on a clip's own frames, and samples from an image that a user names."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import ConfigError
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import FRAMEWORK

pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="the text encoder runs on PyTorch")
NETWORKS = {
    "channels": {"in_channels": 6},
    "channels, last frame": {"in_channels": 6, "last_frame": True},
    "times by token": {"expand_timesteps": True},
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    pytest.importorskip("av", reason="requirements/video.txt")
    pytest.importorskip("transformers", reason="requirements/video.txt")
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module", params=NETWORKS.values(), ids=NETWORKS)
def trained(request, clips, tmp_path_factory):
    """A run of two steps, and the files of a first and a last frame."""
    folder = tmp_path_factory.mktemp("run")
    configs = clip_configs(folder, clips, "wan")
    model = json.loads((folder / "model.json").read_text())
    model["predictor"] |= {"patch_size": [1, 8, 8], **request.param}
    (folder / "model.json").write_text(json.dumps(model))
    outcome = configs.run(f"--train-iters 2 --global-batch-size 4 --lr 1e-2 --save {folder}/out")
    assert outcome.code == 0, outcome.output
    for name, grey in (("first", 200), ("last", 40)):
        Image.new("L", (32, 32), grey).save(folder / f"{name}.png")
    Image.new("L", (16, 32)).save(folder / "narrow.png")
    images = ["--image", str(folder / "first.png")]
    return folder, [*images, "--last-image", str(folder / "last.png")] if "last_frame" in request.param else images


def sample(folder, *flags):
    asked = ("--prompt", "a seven moves left", "--steps", "3", "--cfg-scale", "2", "--output", str(folder / "clip.npz"))
    return main(["sample", "--checkpoint", str(folder / "out"), *asked, *flags])


def test_a_sample_begins_with_the_image_that_is_named(trained, capsys):
    folder, images = trained
    assert sample(folder, *images) == 0
    clip = np.load(folder / "clip.npz")["arr_0"]
    by_token = json.loads((folder / "model.json").read_text())["predictor"].get("expand_timesteps")
    if by_token:
        assert (np.abs(clip[0, 0].astype(int) - 200) <= 1).all() and (clip[0, 1] != 200).any()
    code = sample(folder)
    assert code == (0 if by_token else 2)
    if by_token:
        assert (np.load(folder / "clip.npz")["arr_0"][0, 0] != 200).any()
    else:
        assert "--image: is needed: the model begins a clip with an image" in capsys.readouterr().err


def test_pictures_during_training_need_no_image_or_are_refused(trained):
    from mindspeed_mm_dit.configs.model import load_model_config

    conditions = load_model_config(trained[0] / "model.json").predictor.conditions
    if conditions.frames.mask_channels == 1:
        conditions.check_draws_alone("--report")
    else:
        with pytest.raises(ConfigError, match="--report: draws samples without an image"):
            conditions.check_draws_alone("--report")


def test_an_image_that_does_not_fit_is_named_before_weights_are_read(trained, capsys):
    folder, images = trained
    for wrong, words in (
        ("narrow.png", "--image: is of 32 x 16 pixels, and the clip of 32 x 32"),
        ("none.png", "none.png"),
    ):
        assert sample(folder, "--image", str(folder / wrong), *images[2:]) == 2
        assert words in capsys.readouterr().err
