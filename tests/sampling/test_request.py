"""What samples are asked for: images in every form that a clip may begin with, and each wrong request by its name."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions, FirstFrame, Vector
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.request import SampleRequest, check_request, requested_images, together

FIRST, BOTH = FirstFrame((1, 5, 4, 4), 4), FirstFrame((1, 5, 4, 4), 4, with_last=True)
STILL = FirstFrame((1, 1, 4, 4), 4)


def model(*conditions, channels=1):
    """What is asked of a model's config."""
    predictor = SimpleNamespace(conditions=Conditions(*conditions))
    return SimpleNamespace(predictor=predictor, ae=SimpleNamespace(channels=channels), sample_size=(5, 4, 6))


def picture(grey, channels=3):
    return np.full((4, 6, channels), grey, np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_clip_begins_with_a_file_a_picture_or_an_array(tmp_path, channels):
    Image.fromarray(picture(40)).save(tmp_path / "first.png")
    given = [tmp_path / "first.png", str(tmp_path / "first.png"), Image.open(tmp_path / "first.png"), picture(40)]
    found = requested_images(model(BOTH, channels=channels), given, [picture(50)] * 4)
    for images in found:
        assert [image.shape for image in images] == [(channels, 4, 6)] * 2
        assert [set(image.flat) for image in images] == [{40}, {50}]
    assert requested_images(model(FIRST), picture(7, 1), None)[0][0].shape == (1, 4, 6)
    assert requested_images(model(FIRST), None, None) == [None]


@pytest.mark.parametrize(
    ("conditions", "first", "last", "message"),
    [
        ([ClassLabel(3, 0)], picture(0), None, "--image: this model takes no first frame"),
        ([FIRST], picture(0), picture(0), "--last-image: this model takes no last frame"),
        ([BOTH], None, picture(0), "--image: is required with --last-image"),
        ([BOTH], [picture(0)] * 3, [picture(0)] * 2, "--last-image: 2 images: go with 3 of --image"),
        ([FIRST], "missing.png", None, "--image = missing.png: "),
        ([FIRST], 5, None, "--image = 5: is not an image"),
        ([FIRST], picture(0, 2), None, "--image: uint8 of shape (4, 6, 2)"),
        ([FIRST], picture(0) / 1, None, "--image: float64 of shape (4, 6, 3)"),
    ],
)
def test_impossible_images_are_refused(conditions, first, last, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        requested_images(model(*conditions), first, last)


WHOLE = np.zeros((1, 4, 6), np.uint8)


@pytest.mark.parametrize(
    ("conditions", "values", "message"),
    [
        ([ClassLabel(3, 0), Vector(2, 0)], {"label": [0]}, "samples without a vector"),
        ([ClassLabel(3, 0)], {"label": [0, 3]}, "--classes: 3: is outside 0 ... 2"),
        ([Vector(2, 0)], {"vector": [[0, 1], [0]]}, "--vectors: must be vectors of numbers, all of the same length"),
        ([Vector(2, 0)], {"vector": [[0, 1, 2]]}, "--vectors: of shape (1, 3)"),
        ([Vector(2, 0)], {"vector": [[0, np.inf]]}, "--vectors: of shape (1, 2)"),
        ([STILL], {"label": [0], "image": [(WHOLE,)]}, "--image: would be the whole of a clip"),
        ([FIRST], {"label": [0]}, "--image: is needed"),
        ([BOTH], {"image": [(WHOLE,)]}, "--last-image: is needed"),
        ([FIRST], {"image": [(WHOLE[:, :3],)]}, "--image: is of 3 x 6 pixels, and the clip of 4 x 6"),
    ],
)
def test_samples_that_a_model_cannot_draw_are_refused(conditions, values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_request(SampleRequest(values), model(*conditions))


def test_one_value_goes_with_all_and_two_do_not_go_with_three():
    assert together({"label": [1, 2, 3], "caption": ["a"]}) == {"label": [1, 2, 3], "caption": ["a"] * 3}
    with pytest.raises(ConfigError, match=r"--prompt.*: 2 values: go with 3 of --classes"):
        together({"label": [1, 2, 3], "caption": ["a", "b"]})
