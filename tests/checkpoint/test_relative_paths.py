"""Files that leave a machine name none of its folders."""

import json

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import relative_argument, without_folders
from mindspeed_mm_dit.integrations.formats import convert

FACTS = {
    "iteration": 3, "model": {"ae": {"from_pretrained": "/home/alice/vae"}, "predictor": {"model_id": "dit"}},
    "command": {"arguments": ["--mm-data", "/home/alice/d.json", "--save=/home/alice/ck"], "folder": "/home/alice"},
    "settings": {}, "classes": ["a/b", "cat"],
}  # fmt: skip


def test_absolute_paths_are_cut_to_their_names_and_nothing_else_is():
    assert without_folders(FACTS) == {
        **FACTS, "model": {"ae": {"from_pretrained": "vae"}, "predictor": {"model_id": "dit"}},
        "command": {"arguments": ["--mm-data", "d.json", "--save=ck"], "folder": "."},
    }  # fmt: skip
    assert without_folders({"what": "--reference = /home/alice/ref.npz"}) == {"what": "--reference = ref.npz"}
    assert relative_argument("--save=/a/b/c", "/a") == "--save=b/c" and relative_argument("/a/b", "/a") == "b"
    assert relative_argument("/ab/c", "/a") == "/ab/c" and relative_argument("b/c", "/a") == "b/c"


@pytest.mark.parametrize("kind", ["pt", "safetensors", "pytorch"])
def test_what_is_written_for_others_says_nothing_of_where_it_was_made(tmp_path, kind):
    weights = {"w": np.ones(3, np.float32)}
    trees = {"model": weights} if kind == "safetensors" else {"model": weights, "ema": weights}
    endings = FORMATS[kind].endings
    convert.write(tmp_path / f"out{endings[0] if endings else ''}", kind, State(trees, FACTS))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"alice" not in written and (b"from_pretrained" in written) and json.dumps("vae").encode()[1:-1] in written
