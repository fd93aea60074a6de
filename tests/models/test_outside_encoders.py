"""An autoencoder and a text encoder from outside the package: named in a model.json, trained with and sampled."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import AUTOENCODERS, TEXT_ENCODERS
from mindspeed_mm_dit.objectives.registry import draw_of
from tests.outside import plugin

CAPTIONS = ["a seven moves left", "a one"]
VIDEO = {
    "model_id": "custom_dit", "num_layers": 2, "num_heads": 2, "head_dim": 8, "ffn_dim": 24, "text_dim": 16,
    "freq_dim": 16, "patch_size": [1, 2, 2], "in_channels": 1, "out_channels": 1, "latent_size": [3, 4, 4],
}  # fmt: skip


@pytest.fixture
def joined():
    plugin.join()
    yield
    del AUTOENCODERS["folded"], TEXT_ENCODERS["letters"]


def trained(config, **given):
    """Return the model of ``config`` after two steps on ``given``, and the mean loss before and after."""
    from mindspeed_mm_dit.framework import optim, runtime
    from mindspeed_mm_dit.models.composite import DiTModel

    model = DiTModel(config)
    runtime.load_arrays(model.predictor, model.initial_weights(0))
    batch = runtime.to_device({**given, **draw_of(config.diffusion)(0, np.arange(2), config.latent_shape)})
    first, _ = optim.gradients(model.predictor, lambda: model(**batch))
    for _ in range(2):
        optim.adamw_step(model.predictor, lambda: model(**batch), 1e-3)
    last, _ = optim.gradients(model.predictor, lambda: model(**batch))
    return model, float(first.mean()), float(last.mean())


def test_an_autoencoder_is_trained_with_and_sampled(framework, joined, model_json):
    from mindspeed_mm_dit.models.registry import load_autoencoder
    from mindspeed_mm_dit.sampling.generate import SampleSettings, generate
    from mindspeed_mm_dit.sampling.request import Asked

    ae = {"model_id": "folded", "channels": 1, "shift_factor": 0.25}
    predictor = {**model_json["predictor"], "in_channels": 4, "input_size": 4, "num_layers": 2}
    config = model_config_from_mapping({**model_json, "ae": ae, "predictor": predictor}, "m")
    assert config.sample_size == (8, 8)
    images = framework.ops.tensor(np.random.default_rng(0).uniform(-1, 1, (2, 1, 8, 8)).astype(np.float32))
    autoencoder = load_autoencoder(config.ae)
    there = framework.ops.numpy(autoencoder.encode(images))
    assert there[:, 1, 2, 3] == pytest.approx((framework.ops.numpy(images)[:, 0, 4, 7] - 0.25) * 2)
    assert framework.ops.numpy(autoencoder.decode(autoencoder.encode(images))) == pytest.approx(
        framework.ops.numpy(images), abs=1e-6
    )
    pixels = np.random.default_rng(0).integers(0, 256, (2, 1, 8, 8), np.uint8)
    model, first, last = trained(config, pixels=pixels, labels=np.arange(2))
    assert last < first
    assert generate(model, config, Asked({"label": [1, 2]}), SampleSettings(steps=2)).shape == (2, 8, 8, 1)


def test_a_text_encoder_is_trained_with_and_sampled(framework, joined):
    from mindspeed_mm_dit.models.registry import load_text_encoder
    from mindspeed_mm_dit.sampling.generate import SampleSettings, generate
    from mindspeed_mm_dit.sampling.request import Asked

    sections = {
        "ae": {"model_id": "pixel", "channels": 1}, "text_encoder": {"model_id": "letters"},
        "diffusion": {"model_id": "wan_flow_match_scheduler"}, "predictor": VIDEO,
    }  # fmt: skip
    config = model_config_from_mapping(sections, "m")
    tokens = load_text_encoder(config.text_encoders[0]).tokenizer(CAPTIONS)
    assert tokens.ids.shape == (2, 24) and tokens.mask.sum(1).tolist() == [19, 6]
    pixels = np.random.default_rng(0).integers(0, 256, (2, 1, 3, 4, 4), np.uint8)
    model, first, last = trained(config, pixels=pixels, caption_ids=tokens.ids, caption_mask=tokens.mask)
    assert last < first
    assert generate(model, config, Asked({"caption": CAPTIONS}), SampleSettings("euler", 2)).shape == (2, 3, 4, 4, 1)


def test_without_the_package_the_name_is_unknown(model_json):
    with pytest.raises(ConfigError, match=r"m: ae\.model_id = 'folded': unknown model_id"):
        model_config_from_mapping({**model_json, "ae": {"model_id": "folded"}}, "m")
