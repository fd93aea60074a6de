"""The embedded examples of several shapes: what buckets keep, at what cost, against their square siblings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.buckets import counted, part_kept
from mindspeed_mm_dit.data.builtin import IMAGES
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.models.data import open_data, sized
from mindspeed_mm_dit.planning.arithmetic import train_flop
from mindspeed_mm_dit.wings.scores.demo import moving_digits
from mindspeed_mm_dit.wings.scores.demo.digits import read_digits
from mindspeed_mm_dit.wings.scores.digits import cut_out
from tests.conftest import ROOT


def opened(name, place, monkeypatch):
    monkeypatch.chdir(place)
    folder = ROOT / "examples/dit" / name
    model, param = load_model_config(folder / "model.json"), load_data_config(folder / "data.json").dataset_param
    return open_data(model, param)


def kept_per_flop(opened, one_size=None):
    """Pixels of the files that training sees, for a FLOP; ``one_size``: with all samples brought to it."""
    rows = opened.rows
    shapes = rows.shapes if one_size is None else np.broadcast_to(one_size, rows.shapes.shape)
    flop = sum(train_flop(sized(opened.model, shape).predictor) * count for shape, count in counted(shapes))
    volume = rows.shapes.prod(1)  # the files' own, at the scale that they are trained at
    return float((part_kept(rows.shapes, shapes) * volume).sum()) / flop


def test_digits_on_rectangles_are_trained_on_whole_and_a_square_crop_keeps_less_for_its_arithmetic(
    tmp_path, monkeypatch
):
    data = opened("digits_buckets", tmp_path, monkeypatch)
    assert counted(data.rows.shapes) == [((8, 16), 599), ((12, 12), 599), ((16, 8), 599)]
    np.testing.assert_array_equal(data.rows.shapes, data.rows.sizes)
    assert kept_per_flop(data) > 1.3 * kept_per_flop(data, (12, 12))


def test_clips_of_three_shapes_and_two_lengths_fill_their_buckets(tmp_path, monkeypatch):
    pytest.importorskip("av", reason="requirements/video.txt")
    monkeypatch.setattr(moving_digits, "NUM_CLIPS", 60)
    data = opened("moving_digits_buckets", tmp_path, monkeypatch)
    assert [shape for shape, _ in counted(data.rows.shapes)] == sorted(data.param.buckets)
    assert (data.rows.sizes == data.rows.shapes * (1, 4, 4)).all()
    assert kept_per_flop(data) > 1.3 * kept_per_flop(data, (5, 12, 12))


def test_a_digit_is_found_wherever_it_stands(tmp_path):
    IMAGES["digits_buckets"].write(tmp_path / "digits_buckets")
    from mindspeed_mm_dit.configs.images import DatasetParam
    from tests.data_fixtures import open_rows

    param = DatasetParam(str(tmp_path / "digits_buckets"), 8, index="labels.csv")
    rows = open_rows(param)
    rows = replace(rows, shapes=np.array([[(12, 12), (8, 16), (16, 8)][n % 3] for n in range(len(rows))]))
    for shape in ((12, 12), (8, 16), (16, 8)):
        own = np.flatnonzero((rows.shapes == shape).all(1))
        images = ImageReader(rows, param.sample_size, 1).read(own, np.zeros(len(own))).arrays["pixels"]
        digits = np.round(read_digits().images[own] * (255 / 16))
        found = cut_out(images.transpose(0, 2, 3, 1))
        assert np.mean((found[..., 0] == digits).all((1, 2))) > 0.95, shape
