"""PyTorch's zip files are read and written without PyTorch, bit for bit, and run no code."""

import argparse
import collections
import datetime
import decimal
import functools
import os
import pickle
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file

torch = pytest.importorskip("torch")
GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "dit_tiny_p2.pt"


def assert_same(ours, theirs):
    """Assert that our plain containers hold the values of PyTorch's."""
    if isinstance(theirs, dict):
        assert type(ours) is dict and list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_same(*pair)
    elif isinstance(theirs, torch.Tensor):
        values = (theirs.float() if theirs.dtype == torch.bfloat16 else theirs).detach().numpy()
        assert ours.dtype == values.dtype and ours.shape == values.shape and ours.tobytes() == values.tobytes()
    else:
        assert type(ours) is type(theirs) and ours == theirs


def tree():
    draw = np.random.default_rng(0)
    dtypes = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?", "c8", "c16"]
    return {
        "arrays": {code: draw.integers(0, 2, (3, 4)).astype(code) for code in dtypes},
        "scalar": np.float32(0.1), "empty": np.zeros((0, 3), np.float32), "transposed": draw.random((3, 5)).T,
        "plain": [1, -1, 0, 255, 2**40, 0.1, "text äöü", "a byte \udce9", None, True, False, ("a", (2,), ()), [], {}],
        3: "keys may be numbers",
    }  # fmt: skip


def test_a_published_style_checkpoint_is_read_bit_exactly():
    theirs = torch.load(GOLDEN, weights_only=False)
    theirs["args"] = vars(theirs["args"])
    assert_same(read_torch_file(GOLDEN), theirs)


def test_views_parameters_and_bfloat16_are_read(tmp_path):
    base = torch.randn(6, 4)
    content = collections.OrderedDict(base=base, transposed=base.T, row=base[2], strided=base[::2, 1:],
                                      expanded=base[:1].expand(5, 4), scalar=torch.tensor(3.5),
                                      bf16=torch.randn(7, 3).bfloat16(), empty=torch.zeros(0, 2),
                                      parameter=torch.nn.Parameter(base * 2), size=torch.Size([2, 3]))  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    ours = read_torch_file(tmp_path / "a.pt")
    assert ours.pop("size") == tuple(content.pop("size"))
    assert_same(ours, dict(content))


def test_what_we_write_is_read_bit_exactly_by_torch_and_by_us(tmp_path):
    write_torch_file(tmp_path / "a.pt", tree())
    theirs = torch.load(tmp_path / "a.pt", weights_only=True)
    for ours in (tree() | {"scalar": np.asarray(tree()["scalar"])}, read_torch_file(tmp_path / "a.pt")):
        assert_same(ours, theirs)


class Evil:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


@pytest.mark.parametrize(
    ("culprit", "name"), [(Evil(), "posix.system"), (eval, "__builtin__.eval"), (subprocess.Popen, ".Popen")]
)
def test_a_pickle_that_asks_for_more_is_refused_by_name(tmp_path, culprit, name):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"model": culprit}, protocol=2))
    with pytest.raises(CheckpointError, match=name):
        read_torch_file(tmp_path / "a.pt")


class Settings(dict):
    """A dict of some library, with an attribute of its own."""


def test_what_lies_beside_the_weights_does_no_harm_and_runs_nothing(tmp_path):
    own = Settings(lr=1)
    own.frozen = True
    extra_images = {
        "numpy": [np.float64(12.5), np.arange(3), np.dtype("f4")], "torch": [torch.bfloat16, torch.device("cpu")],
        "python": [{1, 2}, frozenset("a"), 1j, range(3), bytearray(b"a"), b"a", slice(3), collections.Counter("aa")],
        "when": datetime.timedelta(days=1), "where": Path("a"), "settings": own, "class": Settings,
        "namespace": argparse.Namespace(out=Path("a"), lr=1e-4), "defaults": collections.defaultdict(list, {"a": [1]}),
        "queue": collections.deque([1]), "exact": decimal.Decimal("0.1"), "schedule": functools.partial(np.clip, 1),
    }  # fmt: skip
    torch.save({"model": {"w": torch.ones(2)}, **extra_images}, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt")
    assert found["model"]["w"].tolist() == [1, 1] and found["defaults"] == {"a": [1]}
    assert found.keys() > extra_images.keys() and not isinstance(found["settings"], Settings)
    assert found["namespace"]["lr"] == 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "uint16"])
def test_numbers_that_numpy_lacks_are_read_bit_for_bit_down_to_a_single_one(tmp_path, dtype):
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    codes = torch.arange(256, dtype=torch.uint8) if "8" in dtype else torch.arange(-(2**15), 2**15, dtype=torch.int16)
    all_of_them = codes.view(kind)
    content = {"all": all_of_them, "one": all_of_them[60].clone(), "none": all_of_them[:0].reshape(0, 3)}
    torch.save(content, tmp_path / "a.pt")
    save_file(content, tmp_path / "a.safetensors")
    for found in (read_torch_file(tmp_path / "a.pt"), read_safetensors_file(tmp_path / "a.safetensors")[0]):
        for name, tensor in content.items():
            wanted = tensor.numpy() if dtype == "uint16" else tensor.float().numpy()
            assert found[name].shape == wanted.shape and found[name].dtype == wanted.dtype
            np.testing.assert_array_equal(found[name], wanted)


def test_other_files_and_values_are_refused(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"not a zip file")
    (tmp_path / "cut.pt").write_bytes(GOLDEN.read_bytes()[:100_000])
    for name, words in (("a", "zip format"), ("missing", "No such file"), ("cut", "zip format")):
        with pytest.raises(CheckpointError, match=words):
            read_torch_file(tmp_path / f"{name}.pt")
    for value, kind in (({1, 2}, "set"), (np.zeros(1, np.uint32), "uint32")):
        with pytest.raises(CheckpointError, match=kind):
            write_torch_file(tmp_path / "a.pt", {"x": value})


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("data/0", None, "has no data/0"),
    ("data/0", b"8 bytes.", "2 stored"),
    ("byteorder", b"big", "big-endian"),
])  # fmt: skip
def test_a_member_that_is_lost_short_or_of_another_machine_is_refused(tmp_path, name, content, reason):
    write_torch_file(tmp_path / "a.pt", {"x": np.arange(4, dtype=np.float32)})
    with zipfile.ZipFile(tmp_path / "a.pt") as whole, zipfile.ZipFile(tmp_path / "b.pt", "w") as other:
        members = {member: whole.read(member) for member in whole.namelist()}
        (changed,) = (member for member in members if member.endswith(f"/{name}"))
        for member, before in members.items():
            if member != changed or content is not None:
                other.writestr(member, content if member == changed else before)
    with pytest.raises(CheckpointError, match=reason):
        read_torch_file(tmp_path / "b.pt")
