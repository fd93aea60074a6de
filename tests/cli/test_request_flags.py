"""Vectors that a model is conditioned on, from a file that the command line names."""

import io
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.cli.sample import _vectors, add_request, parse_request
from mindspeed_mm_dit.configs.arguments import Parser
from mindspeed_mm_dit.configs.condition import Conditions, Vector
from mindspeed_mm_dit.errors import ConfigError


def npy_of(shape):
    """An .npy that promises float32 numbers of this shape, and has one."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + b"\0" * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--vectors: is missing"),
        (b"text", r"--vectors = .*v.npy: cannot be read"),
        (np.ones(4), r"has shape \(4,\); must be finite vectors"),
        (np.array([[1.0, np.nan]]), r"has shape \(1, 2\); must be finite vectors"),
        (np.array([[{}]]), r"--vectors = .*v.npy: cannot be read"),
        (np.array([["a"]]), r"has shape \(1, 1\); must be finite vectors"),
        (npy_of((1 << 40, 8)), r"--vectors = .*v.npy: holds 4 bytes of data, expected 35,184,372,088,832"),
    ],
)
def test_file_of_no_vectors_is_refused(tmp_path, content, message):
    path = tmp_path / "v.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(ConfigError, match=message):
        _vectors(Namespace(vectors=None if content is None else str(path)))


def test_vectors_of_a_file_are_asked_for_in_float32(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((3, 5))
    np.save(tmp_path / "v.npy", vectors)
    parser = Parser()
    add_request(parser)
    args = parser.parse_args(["--vectors", f"{tmp_path}/v.npy"])
    args.output = f"{tmp_path}/samples.png"
    conditions = Conditions(Vector(5, 0.1))
    config = SimpleNamespace(predictor=SimpleNamespace(conditions=conditions), sample_size=(8, 8), text_encoders=())
    request = parse_request(args, config, ())
    assert len(request) == 3
    np.testing.assert_array_equal(request.values["vector"], vectors.astype(np.float32))
