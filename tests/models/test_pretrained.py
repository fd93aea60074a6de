"""Folders of pretrained weights in several files: all that the index lists are looked at before a device is used."""

from __future__ import annotations

import json

import pytest

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.pretrained import _parts


def test_the_parts_that_an_index_lists_are_the_files_each_once(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"}}))
    assert _parts(index, "text_encoder.from_pretrained") == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]


@pytest.mark.parametrize("content", [{}, {"weight_map": ["1.safetensors"]}, {"weight_map": {"a": 1}}])
def test_an_index_that_lists_no_files_is_named(tmp_path, content):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"text_encoder.from_pretrained = .*index.json: lists no weight files"):
        _parts(index, "text_encoder.from_pretrained")
