"""A stranger's file: whatever it plants, nothing of it runs, and the refusal names file and class."""

import argparse
import enum
import io
import json
import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as before_2_3
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from mindspeed_mm_dit.checkpoint import checksums, torch_dcp, torch_folder
from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.checkpoint.torch_folder import INDEX, check_pickles, read_metadata
from mindspeed_mm_dit.configs.model import AutoencoderKLConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.models.pytorch_encoders import AutoencoderKL
from mindspeed_mm_dit.tools.evaluate.inception import _read_weights
from mindspeed_mm_dit.tools.verify.parity import compare
from tests.autoencoder_kl_fixtures import SMALL
from tests.conftest import GOLDEN

SAVE = torch.save
WEIGHT = torch.arange(6.0).reshape(2, 3)


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(tmp_path):
    """The folder that planted code makes; it must not be there afterwards."""
    yield tmp_path / "code-ran"
    assert not (tmp_path / "code-ran").exists()


def checkpoint(folder: Path, **more: object) -> Path:
    folder.mkdir()
    torch_dcp.write({"model": {"w": WEIGHT}, **more}, folder)
    return folder


def rewrite(path: Path, change) -> None:
    index = read_metadata(path)
    change(index)
    (path / INDEX).write_bytes(pickle.dumps(index))
    (path / checksums.FILE).unlink()  # a stranger writes good ones, or none


def plant(path: Path, trace: Path) -> None:
    rewrite(path, lambda index: setattr(index, "planner_data", Harmful(trace)))


def convert_it(path: Path) -> None:
    convert(path, path.with_suffix(".safetensors"))


def read_it(path: Path) -> None:
    torch_dcp.read({"model": {"w": torch.empty(2, 3)}}, path)


READERS = (torch_dcp.find_damage, torch_dcp.shapes, torch_dcp.read_tree, torch_dcp.has_optimizer, read_weights,
           convert_it, read_it)  # fmt: skip


def test_code_in_an_index_is_refused_by_every_reader(tmp_path, trace, monkeypatch):
    path = checkpoint(tmp_path / "planted")
    good = read_metadata(path)
    plant(path, trace)
    for reader in READERS:
        with pytest.raises(CheckpointError, match=r"planted/\.metadata.*(posix|nt)\.mkdir"):
            reader(path)
    # DCP reads the index itself when it loads; here it finds another one than we did before.
    before = SimpleNamespace(**{**vars(torch_folder), "read_metadata": lambda path: good})
    monkeypatch.setattr(torch_dcp, "torch_folder", before)
    with pytest.raises(CheckpointError, match="mkdir"):
        read_it(path)


def test_code_in_place_of_a_tensor_is_refused(tmp_path, trace):
    """DCP unpickles an entry that the index calls bytes, whatever the model has under its name."""
    path = checkpoint(tmp_path / "planted")
    (data,) = path.glob("*.distcp")
    stored = io.BytesIO()
    torch.save(Harmful(trace), stored)
    data.write_bytes(stored.getvalue())

    def as_bytes(index):
        (place,) = index.storage_data.values()
        place.offset, place.length = 0, len(stored.getvalue())
        index.state_dict_metadata["model.w"] = BytesStorageMetadata()
        index.storage_data = {MetadataIndex("model.w"): place}

    rewrite(path, as_bytes)
    with pytest.raises(CheckpointError, match="pickled object"):
        read_it(path)


def test_an_index_cannot_reach_out_of_its_folder_nor_change_classes_of_pytorch(tmp_path):
    """BUILD sets attributes on whatever stands on the stack, also on a class."""
    path = checkpoint(tmp_path / "outside")
    rewrite(path, lambda index: [setattr(place, "relative_path", "../x") for place in index.storage_data.values()])
    with pytest.raises(CheckpointError, match=r"\.\./x"):
        torch_dcp.find_damage(path)
    path = checkpoint(tmp_path / "planted")
    cls = "torch.distributed.checkpoint.metadata\nMetadata\n"
    (path / INDEX).write_bytes(f"c{cls}(N(Vversion\nVplanted\ndtb.".encode())
    (path / checksums.FILE).unlink()
    assert torch_dcp.find_damage(path) is not None
    assert getattr(dcp.metadata.Metadata, "version", None) is None  # (PyTorch 2.7 has none)


def test_the_index_of_an_older_pytorch_is_read(tmp_path):
    """Until 2.2 the properties of a tensor were a class of another module."""
    path = checkpoint(tmp_path / "old")

    def as_before(index):
        for entry in index.state_dict_metadata.values():
            entry.properties = before_2_3.TensorProperties(dtype=torch.float32)

    rewrite(path, as_before)
    assert b"_shard.sharded_tensor.metadata" in (path / INDEX).read_bytes()
    assert torch.equal(torch_dcp.read_tree(path, "model")["w"], WEIGHT)


class Kind(enum.Enum):
    encoder = 1


def as_python_3_11_2(member, _protocol):
    return getattr, (type(member), member.name)


def test_what_was_written_by_python_3_11_2_is_looked_at_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp.metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", as_python_3_11_2)
    path = checkpoint(tmp_path / "debian")
    assert b"getattr" in (path / INDEX).read_bytes()
    assert torch.equal(torch_dcp.read_tree(path, "model")["w"], WEIGHT)
    monkeypatch.setattr(Kind, "__reduce_ex__", as_python_3_11_2)
    (tmp_path / "mm").mkdir()
    checkpoint(tmp_path / "mm/iter_0000001", model_type=Kind.encoder)
    check_pickles(tmp_path / "mm", (f"{__name__}.Kind",))
    with pytest.raises(CheckpointError, match="Kind"):
        check_pickles(tmp_path / "mm", ())


@pytest.mark.parametrize("cls", ["torch.distributed.checkpoint.metadata\nMetadata", "builtins\ngetattr"])
def test_getattr_gets_nothing_but_members_of_enums(tmp_path, cls):
    path = checkpoint(tmp_path / "planted")
    (path / INDEX).write_bytes(f"cbuiltins\ngetattr\n(c{cls}\nV__init__\ntR.".encode())
    (path / checksums.FILE).unlink()
    with pytest.raises(pickle.UnpicklingError, match="__init__"):
        read_metadata(path)


def test_what_mindspeed_mm_unpickles_is_looked_at_before(tmp_path, trace):
    """Its own entries pass, planted ones are named with file, entry and class."""
    known = ("argparse.Namespace", "not.installed.Thing")
    args = argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16)
    checkpoint(tmp_path / "iter_0000001", args=args, iteration=3, opt_param_scheduler={"num_steps": 8})
    check_pickles(tmp_path, known)
    checkpoint(tmp_path / "iter_0000002", args=argparse.Namespace(harm=Harmful(trace)))
    with pytest.raises(CheckpointError, match=r"args.*iter_0000002/__0_0\.distcp.*\w+\.mkdir"):
        check_pickles(tmp_path, known)
    folder = tmp_path / "other_lane/iter_0000001/mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"args": argparse.Namespace(a=1), "model": {"w": WEIGHT}}, folder / "model_optim_rng.pt")
    check_pickles(tmp_path / "other_lane", known)
    torch.save({"args": Harmful(trace)}, folder / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt.*\w+\.mkdir"):
        check_pickles(tmp_path / "other_lane", known)


BEYOND_MEMORY = {
    "item of a tensor": ("data.pkl", lambda content: content[:-1] + b"K\x00K\x01s.", "sets items"),
    "items of a tensor": ("data.pkl", lambda content: content[:-1] + b"(K\x00K\x01u.", "sets items"),
    "storage that is cut": ("data/0", lambda content: content[:4], "storage 0 has fewer"),
    "two names": ("version", lambda content: content, "not an archive that PyTorch writes"),
}
"""How CVE-2026-24747 begins: a change of a member of an archive of a tensor; and an archive of two meanings."""


def planted(case, obj):
    """The bytes of an archive of torch.save, changed."""
    name, change, _ = BEYOND_MEMORY[case]
    with io.BytesIO() as before, io.BytesIO() as after:
        SAVE(obj, before)
        with zipfile.ZipFile(before) as old, zipfile.ZipFile(after, "w") as new:
            for info in old.infolist():
                with old.open(info.filename) as member:
                    member._expected_crc = None  # (DCP writes none)
                    content = member.read()
                new.writestr(info.filename, change(content) if info.filename.endswith(f"/{name}") else content)
            if case == "two names":
                new.writestr("other/data.pkl", b"N.")
        return after.getvalue()


@pytest.fixture
def torch_load_forbidden(monkeypatch):
    """torch.load, which versions before 2.10 must not be given such a file, is not called."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))


@pytest.mark.parametrize("case", BEYOND_MEMORY)
def test_cve_2026_24747_is_kept_from_torch_load(tmp_path, monkeypatch, case, torch_load_forbidden):
    (tmp_path / "a.pt").write_bytes(planted(case, WEIGHT))
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        check_pickles(tmp_path, ())
    with pytest.raises(CheckpointError, match=f"--inception = a.*{BEYOND_MEMORY[case][2]}"):
        _read_weights("--inception = a", tmp_path / "a.pt")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda obj, file, **_: file.write(planted(case, obj)))
        path = checkpoint(tmp_path / "planted")
    with pytest.raises(CheckpointError, match=r"model\.w.*__0_0\.distcp"):
        torch_dcp.read_tree(path, "model")


def test_cve_2026_24747_of_an_old_file_is_kept_from_torch_load(tmp_path, torch_load_forbidden):
    torch.save(WEIGHT, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "a.pt").read_bytes()
    stops, rest = [], io.BytesIO(content)
    for _ in range(4):
        *_, (_, _, place) = pickletools.genops(rest)
        stops.append(place)
    (tmp_path / "a.pt").write_bytes(content[: stops[3]] + b"K\x00K\x01s" + content[stops[3] :])
    with pytest.raises(CheckpointError, match=r"--inception = a.*sets items"):
        _read_weights("--inception = a", tmp_path / "a.pt")


def test_a_reference_file_with_objects_is_refused(tmp_path, trace):
    np.savez(tmp_path / "reference.npz", config=np.array([Harmful(trace)], dtype=object))
    with pytest.raises(CheckpointError, match=r"reference\.npz"):
        compare(tmp_path / "reference.npz", GOLDEN / "dit_tiny_p2.pt", 1e-5, 1e-5)


@pytest.mark.parametrize("file", ["diffusion_pytorch_model.bin", "vae.pt"])
def test_an_autoencoder_with_code_in_it_is_refused(tmp_path, trace, framework, file):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps(SMALL))
    torch.save({"decoder.conv_in.weight": Harmful(trace)}, tmp_path / "vae" / file)
    path = tmp_path / "vae" if file.endswith(".bin") else tmp_path / "vae" / file
    with pytest.raises(CheckpointError, match="vae"):
        AutoencoderKL(AutoencoderKLConfig(str(path), downsample_factor=2))
    with pytest.raises(CheckpointError, match="mkdir"):
        convert(path, tmp_path / "vae.ckpt")
