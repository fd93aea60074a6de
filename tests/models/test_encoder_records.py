"""Every record of an autoencoder and of a text encoder answers all that is asked of it; ``words`` tells words apart."""

import dataclasses
import json
from collections import namedtuple

import numpy as np
import pytest

from mindspeed_mm_dit.configs.autoencoder import LatentScale
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.text_encoder import WordsConfig
from mindspeed_mm_dit.data.captions import caption_problems
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import FRAMEWORKS
from mindspeed_mm_dit.models.registry import AUTOENCODERS, TEXT_ENCODERS, load_text_encoder
from mindspeed_mm_dit.models.words_encoder import known_words_of, note_of_words
from tests.autoencoder_kl_fixtures import write_flux2
from tests.external.autoencoder import FOLDED
from tests.external.text_encoder import LETTERS

WITH_OURS = {**AUTOENCODERS, "folded": FOLDED}
TEXTS_WITH_OURS = {**TEXT_ENCODERS, "letters": LETTERS}
SIDES = {"down": "DownEncoderBlock", "up": "UpDecoderBlock"}
LATENTS_OF_WAN = {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}


def of_folder(kind, folder):
    """Return a section of ``kind``, with the default sizes, whose files are in ``folder``."""
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return kind(**dict.fromkeys(required, str(folder)))


@pytest.mark.parametrize("name", WITH_OURS)
def test_an_autoencoder_answers_everything(name, tmp_path):
    facts = LATENTS_OF_WAN if name in ("wan_video_vae", "qwen_image_vae") else {}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    if name == "flux2_vae":
        kinds = {f"{way}_block_types": [f"{word}2D"] * 4 for way, word in SIDES.items()}
        write_flux2(tmp_path, latent_channels=32, block_out_channels=[8] * 4, **kinds)
    config = of_folder(WITH_OURS[name].config, tmp_path)
    assert config.model_id == name and config.channels in (1, 3) and config.dtype in ("fp32", "bf16")
    assert set(config.frameworks) <= set(FRAMEWORKS) and config.pixel_axes
    for axes in config.pixel_axes:
        size = {2: (64, 96), 3: (5, 64, 96)}[axes]
        latent = config.latent_shape(size)
        assert len(latent) == axes + 1 and latent[0] == config.latent_channels
        assert latent[-2:] == (64 // config.downsample_factor, 96 // config.downsample_factor)
        assert tuple(config.sample_size(latent)) == size
        if config.downsample_factor > 1:
            with pytest.raises(ConfigError, match=r"dataset_param.*=.*is not a multiple of the autoencoder's factor"):
                config.latent_shape((*size[:-1], 97))
        assert config.workspace_bytes(size) >= 0
    assert isinstance(config.scale(), LatentScale) and config.samples_posterior in (True, False)
    assert config.weight_bytes() >= 0 and config.identity()
    assert len(config.digest()) == (64 if config.is_cacheable and name != "folded" else 0)


@pytest.mark.parametrize("name", TEXTS_WITH_OURS)
def test_a_text_encoder_answers_everything(name, tmp_path):
    said = {"d_model": 24, "hidden_size": 24, "projection_dim": 12, "architectures": ["CLIPTextModelWithProjection"],
            "num_hidden_layers": 30}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config = of_folder(TEXTS_WITH_OURS[name].config, tmp_path).with_published_settings({})
    widths = {"bert": (24, 24), "clip": (24, 12), "mistral3": (72, None), "letters": (16, 16), "words": (256, 256)}
    assert (config.states_width(), config.pooled_width()) == widths.get(name, (24, None))
    assert config.max_length > 1 and config.truncate is False and config.dtype in ("fp32", "bf16")
    assert set(config.frameworks) <= set(FRAMEWORKS) and config.identity() and config.model_id
    for broken in ({"d_model": 0, "hidden_size": "24"}, {}):
        (tmp_path / "config.json").write_text(json.dumps(broken))
        if name not in ("letters", "words"):  # (these have no files)
            with pytest.raises(ConfigError, match=r"config\.json has (d_model|hidden_size) = (0|'24'|None)"):
                config.states_width()


def test_model_json_may_list_text_encoders(model_json):
    """Their sections are read before it is asked whether the predictor has any use for them."""
    bert = {"model_id": "bert", "from_pretrained": "b"}
    for wrong, named in (
        ({"model_id": "UMT5", "bad": 1}, r"text_encoder\[1\]: bad = 1"),
        ({"model_id": "brt"}, r"text_encoder\[1\]\.model_id = 'brt'(?s:.*)mean 'bert'"),
    ):
        with pytest.raises(ConfigError, match=named):
            model_config_from_mapping({**model_json, "text_encoder": [bert, wrong]}, "m")


@pytest.fixture
def encoded(framework):
    def encode(*captions, **settings):
        found = load_text_encoder(WordsConfig(**{"max_length": 8, **settings})).encode(captions)
        return [framework.ops.numpy(array) for array in found]

    return encode


def test_a_caption_is_its_words_in_order_and_padding_is_zero(encoded):
    states, mask, pooled = encoded("A red Car, &quot;parked&quot;", "一只猫 here", "")
    assert states.shape == (3, 8, 256) and pooled.shape == (3, 256) and states.dtype == np.float32
    assert mask.sum(1).tolist() == [5, 5, 1] and not states[mask == 0].any()
    assert (states[0, 1] ** 2).mean() == pytest.approx(1.25, abs=0.3)  # (a word, and half of the one before)
    states, _, pooled = encoded("red car blue sky", "RED CAR Blue Sky", "blue car red sky", "red car green sky")
    assert np.array_equal(states[0], states[1])
    assert abs(states[0, 1] - states[2, 1]).max() > 0.5 and np.allclose(states[0, 1], states[3, 1])
    alike = np.corrcoef(pooled)
    assert alike[0, 3] > 0.6 and alike[0, 2] > 0.9 and alike[0, 2] < 1


def test_a_caption_without_words_or_too_long_is_named(framework):
    tokenizer = load_text_encoder(WordsConfig(max_length=4)).tokenizer
    problems = caption_problems(tokenizer, ["three words here", "!?", "four words are here"])
    assert problems[0] == "" and "has no words" in problems[1] and "has a caption of 5 tokens" in problems[2]


def test_words_that_no_caption_had_are_noted():
    model = namedtuple("Model", "text_encoders")((WordsConfig(), WordsConfig(width=8)))
    learned = known_words_of(model, ["A red Car", "blue sky, red CAR", "一只猫"])
    assert learned == ["a", "red", "car", "blue", "sky", "一", "只", "猫"]
    assert note_of_words(model, learned, ["a BLUE car", "猫"]) == note_of_words(model, (), ["zebra"]) == ""
    assert "'blew', 'zebra'" in note_of_words(model, learned, ["a blew car", "a zebra"])
    assert known_words_of(model, map(str, range(10_001))) == []
