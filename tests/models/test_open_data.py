import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("av", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.condition import PooledText
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.configs.model import load_model_config, model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError, DataError, UserError
from mindspeed_mm_dit.models.data import _check_cached_text, open_data
from mindspeed_mm_dit.tools.evaluate import demo
from tests.clips_fixtures import clip_configs
from tests.conftest import GOLDEN, ROOT

IMAGES = {"data_folder": "data", "image_size": 8}
DIT = json.loads((ROOT / "examples/dit/model.json").read_text()) | {"text_encoder": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "NUM_CLIPS", 4)
    place = tmp_path_factory.mktemp("data") / "moving_digits"
    demo.write_moving_digits(place)
    patch.undo()
    return place


def open_all(folder, frames=9, size=32, max_length=8, text_dim=64, latent=(3, 4, 4)):
    predictor = {"model_id": "custom_dit", "num_layers": 1, "num_heads": 1, "head_dim": 8, "ffn_dim": 8,
                 "text_dim": text_dim, "latent_size": list(latent)}  # fmt: skip
    model = model_config_from_mapping(
        {
            "ae": {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny")},
            "text_encoder": {"from_pretrained": str(folder / "text_encoder"), "max_length": max_length},
            "diffusion": {"model_id": "wan_flow_match_scheduler"},
            "predictor": predictor,
        },
        "model.json",
    )
    return open_data(model, ClipsParam(str(folder), str(folder / "annotation.json"), frames, size, size))


def test_clips_that_fit_are_opened(folder):
    data = open_all(folder)
    assert len(data.rows) == 4 and data.tokenizers[0].vocabulary_size == 19


def test_what_does_not_fit_is_named_before_a_clip_is_opened(folder, tmp_path):
    for place, settings, named in (
        (tmp_path / "empty", {"frames": 8}, "num_frames = 8"),
        (tmp_path / "empty", {"size": 40}, "max_width = 9, 40, 40: makes latents of 3 x 5 x 5"),
        (tmp_path / "empty", {"size": 40, "latent": (3, 5, 5)}, "latent_size"),  # which the patch does not divide
        (folder, {"text_dim": 32}, r"predictor\.text_dim = 32"),
    ):
        with pytest.raises(ConfigError, match=named):
            open_all(place, **settings)


def test_captions_that_are_too_long_are_named_with_the_clips_that_are_short(folder):
    with pytest.raises(DataError) as raised:
        open_all(folder, frames=13, max_length=4, latent=(4, 4, 4))
    assert "4 of 4 clips cannot be used" in str(raised.value) and "is short: it has 9 frames" in str(raised.value)
    with pytest.raises(DataError, match=r"line 2 has a caption of 5 tokens, and text_encoder\.max_length is 4"):
        open_all(folder, max_length=4)


def test_texts_that_a_cache_does_not_keep_are_named():
    def check(name, width):
        cache = SimpleNamespace(index=SimpleNamespace(texts={name: None}), widths=lambda name: {width})
        _check_cached_text("latents = cache", cache, PooledText(6))

    check("pooled", 6)
    with pytest.raises(ConfigError, match="latents = cache: contains no pooled"):
        check("text", 6)
    with pytest.raises(ConfigError, match="latents = cache: contains pooled of width 5"):
        check("pooled", 5)


def test_files_that_do_not_go_together_are_named(folder, tmp_path):
    for sections, param, message in (
        ({"ae": {"model_id": "autoencoder_kl", "from_pretrained": "x"}}, {}, "does not encode videos, which"),
        ({"predictor": {"patch_size": [2, 8, 8], "latent_size": [8, 32, 32]}}, {}, "makes latents of 9 x 32 x 32"),
        ({}, {"json_path": "nowhere.json"}, "dataset_param.json_path = nowhere.json"),
        ({}, {"dataset_type": "films"}, "dataset_param.dataset_type = 'films': unknown kind of data set"),
        ({}, {"features": "nowhere"}, "nowhere: holds no finished cache"),
        ({}, IMAGES, "its samples are images, and predictor 'custom_dit' learns videos"),
        (DIT, {}, "its samples are videos, and predictor 'dit' learns images"),
    ):
        configs = clip_configs(tmp_path, folder).change("model.json", **sections)
        if param is IMAGES:
            (tmp_path / "data.json").write_text(json.dumps({"dataset_param": IMAGES}))
        configs.change("data.json", dataset_param=param)
        with pytest.raises(UserError, match=re.escape(message)):
            model = load_model_config(tmp_path / "model.json")
            open_data(model, load_data_config(tmp_path / "data.json").dataset_param)
