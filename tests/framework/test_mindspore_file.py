"""MindSpore's checkpoint file, written and read without MindSpore."""

import numpy as np
import pytest

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.mindspore_file import read_mindspore_file, write_mindspore_file
from tests.checkpoint_fixtures import assert_same, random_arrays


def test_our_ckpt_is_mindspores_byte_for_byte(mindspore, tmp_path):
    draw = np.random.default_rng(0)
    codes = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
    arrays = {code: draw.integers(0, 2, (3, 4)).astype(code) for code in codes}
    arrays |= {"scalar": np.array(3, np.float32), "long" * 60: draw.standard_normal((300, 7)).astype("f4")}
    tensors = [{"name": n, "data": mindspore.Tensor(a)} for n, a in arrays.items()]
    mindspore.save_checkpoint(tensors, str(tmp_path / "a.ckpt"))
    write_mindspore_file(tmp_path / "b.ckpt", arrays)
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()
    assert_same(read_mindspore_file(tmp_path / "a.ckpt"), arrays)
    back = mindspore.load_checkpoint(str(tmp_path / "b.ckpt"))
    assert_same({n: p.asnumpy() for n, p in back.items()}, arrays)
    extra = {"epoch": 3, "note": "text"}
    half = [{"name": "half", "data": mindspore.Tensor([1.5, -2], mindspore.bfloat16)}]
    mindspore.save_checkpoint(half, str(tmp_path / "c.ckpt"), append_dict=extra, crc_check=True)
    found = read_mindspore_file(tmp_path / "c.ckpt")
    assert list(found) == ["half", "epoch"] and found["half"].tolist() == [1.5, -2] and found["epoch"] == 3


def test_an_array_in_several_slices_is_whole_again_and_one_cut_short_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_mm_dit.framework.mindspore_file._SLICE_BYTES", 64)
    arrays = random_arrays({"a": (30, 3), "b": (2,)}, 0)
    write_mindspore_file(tmp_path / "a.ckpt", arrays)
    assert_same(read_mindspore_file(tmp_path / "a.ckpt"), arrays)
    whole = (tmp_path / "a.ckpt").read_bytes()
    for keep in (0, 1, 5, 40, -1):
        (tmp_path / "a.ckpt").write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"a\.ckpt"):
            read_mindspore_file(tmp_path / "a.ckpt")
