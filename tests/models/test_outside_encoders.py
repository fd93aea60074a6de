"""An autoencoder and a text encoder from outside the package: named in a model.json."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import AUTOENCODERS, TEXT_ENCODERS
from tests.external import plugin


@pytest.fixture
def joined():
    plugin.register()
    yield
    del AUTOENCODERS["folded"], TEXT_ENCODERS["letters"]


def test_latents_of_an_autoencoder_are_shifted_and_scaled_and_come_back(framework, joined, model_json):
    from mindspeed_mm_dit.models.registry import load_autoencoder

    ae = {"model_id": "folded", "channels": 1, "shift_factor": 0.25}
    predictor = {**model_json["predictor"], "in_channels": 4, "input_size": 4}
    config = model_config_from_mapping({**model_json, "ae": ae, "predictor": predictor}, "m")
    assert config.sample_size == (8, 8)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 1, 8, 8)).astype(np.float32)
    autoencoder = load_autoencoder(config.ae)
    latents = autoencoder.encode(framework.ops.tensor(images))
    assert framework.ops.numpy(latents)[:, 1, 2, 3] == pytest.approx((images[:, 0, 4, 7] - 0.25) * 2)
    assert framework.ops.numpy(autoencoder.decode(latents)) == pytest.approx(images, abs=1e-6)


def test_without_the_package_the_name_is_unknown(model_json, monkeypatch):
    monkeypatch.delitem(AUTOENCODERS, "folded", raising=False)  # (tests of other files may have registered it)
    with pytest.raises(ConfigError, match=r"m: ae\.model_id = 'folded': unknown model_id"):
        model_config_from_mapping({**model_json, "ae": {"model_id": "folded"}}, "m")
