"""What samples are asked for: images in every form that a clip may begin with, and each wrong request by its name."""

import dataclasses
import inspect
import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import command_parser
from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions, FirstFrame, Vector
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.conditions import SampleConditions, check_conditions, requested_conditions
from mindspeed_mm_dit.sampling.conditions import _together as together
from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest, arguments_of, help_of, word_of

FIRST, BOTH = FirstFrame((1, 5, 4, 4), 4), FirstFrame((1, 5, 4, 4), 4, with_last=True)
UNKNOWN = SimpleNamespace(classes=(), captions=(), words=())
"""What is known of a checkpoint without facts."""


def model(*conditions, channels=1):
    """What is asked of a model's config."""
    predictor, ae = SimpleNamespace(conditions=Conditions(*conditions)), SimpleNamespace(channels=channels)
    return SimpleNamespace(predictor=predictor, ae=ae, sample_size=(5, 4, 6), text_encoders=())


def values_of(config, **settings):
    return requested_conditions(SampleRequest(**settings), config, UNKNOWN).values


def picture(grey, channels=3):
    return np.full((4, 6, channels), grey, np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_clip_begins_with_a_file_a_picture_or_an_array(tmp_path, channels):
    Image.fromarray(picture(40)).save(tmp_path / "first.png")
    given = [tmp_path / "first.png", str(tmp_path / "first.png"), Image.open(tmp_path / "first.png"), picture(40)]
    config = model(BOTH, channels=channels)
    for images in values_of(config, image=given, last_image=[picture(50)] * 4)["image"]:
        assert [image.shape for image in images] == [(channels, 4, 6)] * 2
        assert [set(image.flat) for image in images] == [{40}, {50}]
    assert values_of(model(FIRST), image=picture(7, 1))["image"][0][0].shape == (1, 4, 6)
    optional = FirstFrame((1, 5, 4, 4), 1)
    assert values_of(model(ClassLabel(3, 0), optional), classes=1)["image"] == [None]


@pytest.mark.parametrize(("conditions", "first", "last", "words"), [
    ([ClassLabel(3, 0)], picture(0), None, "--image.*classes"),
    ([FIRST], picture(0), picture(0), "--last-image"),
    ([BOTH], None, picture(0), "--image.*--last-image"),
    ([BOTH], [picture(0)] * 3, [picture(0)] * 2, "--last-image.* 2 images.*--image 3"),
    ([FIRST], "missing.png", None, "--image = missing.png"),
    ([FIRST], 5, None, "--image = 5"),
    ([FIRST], picture(0, 2), None, r"--image.*\(4, 6, 2\)"),
    ([FIRST], picture(0) / 1, None, "--image.*float64"),
])  # fmt: skip
def test_impossible_images_are_refused(conditions, first, last, words):
    with pytest.raises(ConfigError, match=words):
        values_of(model(*conditions), image=first, last_image=last)


WHOLE = np.zeros((1, 4, 6), np.uint8)


@pytest.mark.parametrize(("conditions", "values", "words"), [
    ([ClassLabel(3, 0), Vector(2, 0)], {"label": [0]}, "--vectors"),
    ([ClassLabel(3, 0)], {"label": [0, 3]}, "--classes.*0 ... 2"),
    ([Vector(2, 0)], {"vector": [[0, 1], [0]]}, "--vectors.* length"),
    ([Vector(2, 0)], {"vector": [[0, 1, 2]]}, r"--vectors.*\(1, 3\)"),
    ([Vector(2, 0)], {"vector": [[0, np.inf]]}, r"--vectors.*\(1, 2\)"),
    ([FirstFrame((1, 1, 4, 4), 4)], {"label": [0], "image": [(WHOLE,)]}, "--image.* whole of a clip"),
    ([FIRST], {"label": [0]}, "--image.* needed"),
    ([BOTH], {"image": [(WHOLE,)]}, "--last-image.* needed"),
    ([FIRST], {"image": [(WHOLE[:, :3],)]}, "--image.* 3 x 6 .* 4 x 6"),
])  # fmt: skip
def test_samples_that_a_model_cannot_draw_are_refused(conditions, values, words):
    with pytest.raises(ConfigError, match=words):
        check_conditions(SampleConditions(values), model(*conditions))


def test_one_value_goes_with_all_and_two_do_not_go_with_three():
    assert together({"label": [1, 2, 3], "caption": ["a"]}) == {"label": [1, 2, 3], "caption": ["a"] * 3}
    with pytest.raises(ConfigError, match=r"--prompt.* 2 values.*--classes.* 3"):
        together({"label": [1, 2, 3], "caption": ["a", "b"]})


def test_vectors_of_a_file_are_those_of_an_array(tmp_path):
    vectors, path, promised = np.random.default_rng(0).standard_normal((3, 5)), tmp_path / "v.npy", io.BytesIO()
    np.save(path, vectors)
    for given in (str(path), path, vectors.astype(np.float32)):
        read = values_of(model(Vector(5, 0.1)), vectors=given)["vector"]
        np.testing.assert_array_equal(read, vectors.astype(np.float32))
    shape = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 8)}  # of which it has one number
    np.lib.format.write_array_header_1_0(promised, shape)
    for content, words in (
        (b"text", "v.npy"), (promised.getvalue() + bytes(4), "35,184,372,088,832"), (np.ones(4), r"\(4,\)"),
        (np.array([[1.0, np.nan]]), r"\(1, 2\)"), (np.array([[{}]]), "v.npy"), (np.array([["a"]]), r"\(1, 1\)"),
    ):  # fmt: skip
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
        with pytest.raises(ConfigError, match=f"--vectors = .*{words}"):
            values_of(model(Vector(5, 0.1)), vectors=str(path))
    with pytest.raises(ConfigError, match="--vectors"):
        values_of(model(Vector(5, 0.1)), vectors=None)


def test_each_setting_is_a_flag_and_an_argument():
    """--num-per-class and --num-per-prompt are one argument, as are --prompt and --prompts."""
    flags = {word for action in command_parser("sample")._actions for word in action.option_strings}
    for request in (ModelRequest, SampleRequest):
        fields = dataclasses.fields(request)
        assert {word_of(field) for field in fields if word_of(field).startswith("--")} <= flags
        assert list(help_of(request, cfg_scale=4, samplers="")) == [field.name for field in fields if field.name != "_"]
        call = arguments_of(request)(lambda settings: settings)
        assert list(inspect.signature(call).parameters) == [field.name for field in fields]
    request = arguments_of(SampleRequest)(lambda settings: settings)([3], cfg_scale=2, interval="0.2,0.8", size="8x16")
    assert (request.guidance, request.interval, request.size) == (2, (0.2, 0.8), (8, 16))


def test_errors_name_the_argument_that_was_passed():
    for settings, words in (
        ({"guidance": 1, "cfg_scale": 2}, "guidance.* cfg_scale"), ({"cfg_interval": "a"}, "cfg_interval = 'a'"),
        ({"low_noise_cfg_scale": -1}, "low_noise_cfg_scale = -1"),
        ({"low_noise_guidance": -1}, "low_noise_guidance = -1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{words}"):
            arguments_of(SampleRequest)(lambda request: request)(**settings)
