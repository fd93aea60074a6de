"""A small file cannot take all memory: what its headers ask for is compared with its size before anything is read."""

import pickle
import struct
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.configs import files
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.shard_rows import ParquetReader, ShardQuery, scan_parquet
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.sampling import conditions, generate
from mindspeed_mm_dit.tools.evaluate.image_set import open_image_set
from mindspeed_mm_dit.tools.verify.reference.file import read_arrays
from tests.conftest import ROOT

LARGE = np.zeros(1 << 20, np.float32)


@pytest.fixture(autouse=True)
def little_is_free(monkeypatch):
    monkeypatch.setattr(files, "FREE_BYTES", 1 << 20)


def refused(read, path):
    with pytest.raises(UserError, match=r"[\d,]+ bytes.* [\d,]+ bytes of memory") as caught:
        read(path)
    assert path.name in str(caught.value) and "damaged" not in str(caught.value)


def test_an_npz_that_unpacks_to_far_more_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", mu=LARGE, sigma=LARGE, x=LARGE)
    np.savez_compressed(tmp_path / "b.npz", arr_0=np.zeros((4, 1 << 10, 1 << 10, 3), np.uint8))
    refused(read_arrays, tmp_path / "a.npz")
    for name in ("a.npz", "b.npz"):
        refused(lambda path: open_image_set("--samples", path), tmp_path / name)


def test_images_of_an_npz_are_read_by_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_mm_dit.tools.evaluate.image_set.BATCH_BYTES", 1000)
    np.savez(tmp_path / "a.npz", arr_0=np.zeros((5, 16, 16, 1), np.uint8))
    assert [len(batch) for batch in open_image_set("--samples", tmp_path / "a.npz").batches(256)] == [3, 2]
    with pytest.raises(UserError, match="pixels"):
        monkeypatch.setattr("mindspeed_mm_dit.tools.evaluate.image_set.MAX_SCALED_PIXELS", 256)
        open_image_set("--samples", tmp_path / "a.npz")


def test_first_frame_of_another_size_is_refused_undecoded(tmp_path, monkeypatch):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("it was decoded"))
    config = SimpleNamespace(ae=SimpleNamespace(channels=3), sample_size=(5, 32, 32))
    for given in (tmp_path / "a.png", Image.open(tmp_path / "a.png")):
        with pytest.raises(ConfigError, match="64 x 64"):
            conditions._pixels(given, "--image", config)


def test_request_beyond_memory_is_refused_before_it_is_drawn(monkeypatch):
    model = load_model_config(ROOT / "examples/dit/digits_flow/model.json")
    with pytest.raises(ConfigError, match="--size = 32768x32768"):
        monkeypatch.setattr(generate, "host_memory_bytes", lambda: 1 << 36)
        generate.resized(model, None, (32768, 32768))
    with pytest.raises(ConfigError, match="10,000,000 labels"):
        conditions.labels_of(["0-9"] * 1_000_000, (), 10)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_pt_of_more_numbers_than_its_bytes_hold_is_refused(tmp_path, count):
    """One that is compressed, and ones whose tensors show the same numbers again and again."""
    torch, path = pytest.importorskip("torch"), tmp_path / "a.pt"
    row = torch.zeros(1, 2048)
    if count == 0:
        write_torch_file(tmp_path / "whole.pt", {"w": LARGE})
        with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as a:
            for name in whole.namelist():
                a.writestr(name, whole.read(name))
    elif count == 1:
        torch.save({"w": row.expand(1 << 10, -1)}, path)
    else:
        torch.save({f"w{n}": row.view(-1) for n in range(count)}, path)
    refused(read_weights, path)


def test_a_pickle_that_numbers_what_it_does_not_have_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.PROTO + b"\x02Nr" + struct.pack("<I", 1 << 31) + b".")
    with pytest.raises(UserError, match=r"2,147,483,648 of 9 bytes"):
        read_weights(tmp_path / "a.pt")


def test_a_parquet_file_whose_captions_are_one_long_one(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"image": [{"bytes": b"a" * 10_000}] * 500, "caption": ["a" * 10_000] * 500, "label": [1] * 500}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    refused(lambda path: scan_parquet(path, ShardQuery(None, ("caption",))), tmp_path / "a.parquet")
    assert scan_parquet(tmp_path / "a.parquet", ShardQuery("label", ())).labels == ["1"] * 500
    assert ParquetReader().read(tmp_path / "a.parquet", 0, 499) == b"a" * 10_000


def test_an_index_of_tensors_that_no_file_holds(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from mindspeed_mm_dit.checkpoint import torch_dcp, torch_folder

    torch_dcp.write({"model": {"w": torch.zeros(4)}}, tmp_path / "a")
    index = torch_folder.read_metadata(tmp_path / "a")
    index.state_dict_metadata["model.w"].size = torch.Size([1 << 20])
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(index))
    refused(torch_dcp.shapes, tmp_path / "a")
