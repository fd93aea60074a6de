from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
from mindspeed_mm_dit.configs.clips import ClipsParam
from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.data import moving_digits
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.models.clip_data import open_clip_data
from tests.conftest import GOLDEN


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(moving_digits, "NUM_CLIPS", 4)
    place = tmp_path_factory.mktemp("data") / "moving_digits"
    moving_digits.write_moving_digits(place)
    patch.undo()
    return place


def open_all(folder, frames=9, size=32, patch=(1, 2, 2), max_length=8):
    return open_clip_data(
        ClipsParam(str(folder), str(folder / "annotation.json"), frames, size, size),
        WanVAEConfig(str(GOLDEN / "wan_vae_tiny")),
        UMT5Config(str(folder / "text_encoder"), max_length=max_length),
        patch,
    )


def test_clips_that_fit_are_opened(folder):
    data = open_all(folder)
    assert len(data.index) == 4 and data.latent_shape == (16, 3, 4, 4) and data.tokenizer.vocabulary_size == 19


def test_what_does_not_fit_is_named_before_a_clip_is_opened(folder, tmp_path):
    elsewhere = tmp_path / "empty"
    with pytest.raises(ConfigError, match="num_frames = 8"):
        open_all(elsewhere, frames=8)
    with pytest.raises(ConfigError, match="max_height = 40: makes latents of 5, which the patch does not divide"):
        open_all(elsewhere, size=40)


def test_captions_that_are_too_long_are_named_with_the_clips_that_are_short(folder):
    with pytest.raises(DataError) as raised:
        open_all(folder, frames=13, max_length=4)
    assert "4 of 4 clips cannot be used" in str(raised.value) and "is short: it has 9 frames" in str(raised.value)
    with pytest.raises(DataError, match=r"line 2 has a caption of 5 tokens, and text_encoder\.max_length is 4"):
        open_all(folder, max_length=4)
