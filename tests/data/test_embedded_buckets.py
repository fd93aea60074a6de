"""Digits on rectangles: trained whole by the embedded example, and found by the score wherever they stand."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.buckets import count_shapes
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.tools.evaluate.demo import read_digits
from mindspeed_mm_dit.tools.evaluate.digits import cut_out
from tests.conftest import ROOT


@pytest.mark.extended
def test_digits_on_rectangles_are_trained_whole_and_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = ROOT / "examples/dit/digits_buckets"
    model, param = load_model_config(folder / "model.json"), load_data_config(folder / "data.json").dataset_param
    data = open_data(model, param)
    assert count_shapes(data.rows.shapes) == [((8, 16), 599), ((12, 12), 599), ((16, 8), 599)]
    np.testing.assert_array_equal(data.rows.shapes, data.rows.sizes)
    samples = data.samples(data.rows, 0, True, lambda *_: {})
    for shape in ((12, 12), (8, 16), (16, 8)):
        own = np.flatnonzero((data.rows.shapes == shape).all(1))
        images = samples.visuals.read(own, np.zeros(len(own))).arrays["pixels"]
        digits = np.round(read_digits().images[own] * (255 / 16))
        found = cut_out(images.transpose(0, 2, 3, 1))
        assert np.mean((found[..., 0] == digits).all((1, 2))) > 0.95, shape
