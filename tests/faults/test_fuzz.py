"""Whatever stands in a file, who reads it gets it right or names it in one UserError, and no file is written.

15 seeded examples of each here, 2,000 with --campaign.
"""

import copy
import functools
import io
import json
import os
import tarfile
import tempfile
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("hypothesis", reason="pip install hypothesis")
from hypothesis import strategies as st

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.checkpoint.store import RUN_FACTS, read_facts
from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.configs.fsdp2 import load_fsdp2_config
from mindspeed_mm_dit.configs.model import autoencoder_config_of, load_model_config
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.data.shard_rows import ShardQuery, scan_parquet, scan_tar
from mindspeed_mm_dit.data.tables import UnusableEntry, parse_entry, read_annotation, read_table
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework.mindspore_file import write_mindspore_file
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.hosts.preflight import preflight
from mindspeed_mm_dit.integrations.formats.config_json import config_from_diffusers
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays
from mindspeed_mm_dit.tools.planning.facts import _section as section_of
from mindspeed_mm_dit.tools.verify.against import _described as described
from mindspeed_mm_dit.tools.verify.reference.file import read_arrays
from mindspeed_mm_dit.training.dry_run import plan_of_run
from mindspeed_mm_dit.training.flags import parse
from tests.conftest import ROOT
from tests.training.launch import Configs

DIT = ROOT / "examples/dit"
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just([]), st.just({}),
    st.sampled_from([2**63, -(2**70), 1e308, "\0", "\ud800", "é" * 300, [[1]], {"a": [None]}, "pixel", "dit", "auto"]),
)  # fmt: skip
_BYTES = [b"\0" * 600, b"\xff\xfe", b'"', b"{", b"]", b",,", b"\n", b"9" * 500, b"~"]
BYTES = st.one_of(st.binary(max_size=8), st.sampled_from(_BYTES))
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 64), BYTES), min_size=1, max_size=4)


def places(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def put(content, path, value):
    if not path:
        return value
    changed = copy.deepcopy(content)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def edited(content: bytes, edits) -> bytes:
    """Return ``content`` with bytes taken away and others put there, at shares of its length."""
    for share, gone, new in edits:
        at = int(share * len(content))
        content = content[:at] + new + content[at + gone :]
    return content


@st.composite
def of_json(draw, content):
    changed = content
    for _ in range(draw(st.integers(1, 3))):
        changed = put(changed, draw(st.sampled_from(places(changed))), draw(ODD))
    text = json.dumps(changed, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return edited(text, draw(EDITS)) if draw(st.integers(0, 3)) == 0 else text


def of_bytes(content):
    return EDITS.map(lambda edits: edited(content, edits))


ANNOTATION = [
    {"path": "a.mp4", "cap": "a cat", "num_frames": 8, "fps": 8, "resolution": {"height": 8, "width": 8}},
    {"path": "b/c.mp4", "cap": ["two", "captions"], "resolution": [8, 8]},
]
FACTS = {"iteration": 3, "consumed_samples": 9, "seed": 1, "settings": {"--lr": 1.0}, "model": {}, "classes": ["a"],
         "command": {"arguments": ["--lr", "1"], "folder": ".."}, "global_batch_size": 3,
         "power_ema_stds": [0.1]}  # fmt: skip


def tar_of():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in (("a.png", b"p" * 700), ("a.cls", b"1"), ("b.cls", b"0"), ("b.png", b"q")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def parquet_of():
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = io.BytesIO()
    table = pyarrow.table({"image": [{"bytes": b"a", "path": "a"}, {"bytes": b"b", "path": "b"}], "label": [0, 1]})
    parquet.write_table(table, content)
    return content.getvalue()


def metadata_of():
    with tempfile.TemporaryDirectory() as folder:
        torch_dcp.write({"model.w": torch.zeros(3)}, Path(folder))
        return (Path(folder) / ".metadata").read_bytes()


WEIGHTS = {"blocks.0.w": np.ones((2, 3), np.float32), "blocks.0.b": np.zeros(3, np.float16), "step": np.array(5)}


def written_by(write, content=WEIGHTS):
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "file", content)
        return (Path(folder) / "file").read_bytes()


def write_npz(path, content):
    with open(path, "wb") as file:
        np.savez_compressed(file, **content)


def read_entries(path):
    for line in read_annotation(path):
        with suppress(UnusableEntry):
            parse_entry(line)


def read_index(path):
    if torch_dcp.find_damage(path.parent) is None:  # as every reader asks first
        torch_dcp.check_architecture(path.parent, {"w": (3,)})


FOLDER = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 3,
          "attention_head_dim": 16, "joint_attention_dim": 8, "axes_dims_rope": [4, 6, 6], "in_channels": 16,
          "pooled_projection_dim": 8, "guidance_embeds": True, "model_type": "umt5",
          "max_position_embeddings": 512}  # fmt: skip


def read_a_folder(path):
    """Read a config.json as that of a network, of an autoencoder and of a text encoder."""
    folder = str(path.parent)
    for read in (lambda: config_from_diffusers(read_json(path, "SOURCE"), folder),
                 lambda: described(f"diffusers:{folder}"), lambda: autoencoder_config_of(folder, "ae"),
                 lambda: section_of(folder)):  # fmt: skip
        with suppress(UserError):
            read()


def mp4_of():
    pytest.importorskip("av")
    from tests.video_fixtures import film, grey

    with tempfile.TemporaryDirectory() as folder:
        tags = {"colorspace": 1, "color_range": 2, "sample_aspect_ratio": Fraction(3, 2)}
        return film(Path(folder) / "a.mp4", grey(0, 80, 160), [0, 40, 400], **tags).read_bytes()


def read_a_video(path):
    from mindspeed_mm_dit.data.video_file import read_frames, read_video_facts

    with suppress(UnusableFile):
        facts = read_video_facts(path, decode=True)
        assert facts.times is None or (len(facts.times) == facts.num_frames + 1 and (np.diff(facts.times) >= 0).all())
        frames = read_frames(path, np.arange(facts.num_frames))
        assert frames.shape == (facts.num_frames, *facts.size, 3) and frames.dtype == np.uint8


CONFIG = {"model.json": "--mm-model", "data.json": "--mm-data", "fsdp2.yaml": "--fsdp2-config-path"}
DATA = {
    "dataset_param": {"data_folder": "images", "image_size": 8, "valid_fraction": 0.2, "random_flip": True},
    "dataloader_param": {"shuffle": True, "prefetch_batches": 2},
}


def begin(file: Path) -> None:
    """Do all that a run does before its first step, with ``file`` in the place of a good one."""
    if file.name == "train.args":
        flags = read_train_args(file)
    else:
        flags = ["--train-iters", "2", "--micro-batch-size", "2", "--lr", "1e-3", "--use-torch-fsdp2"]
    for name, flag in CONFIG.items():
        flags += [flag, str(file) if file.name == name else name]
    plan_of_run(preflight(parse(flags)), 1, None)


@pytest.fixture(scope="module", autouse=True)
def good(tmp_path_factory, framework):
    """Good files of a run, in the working directory; none is changed, and none comes to them."""
    folder = tmp_path_factory.mktemp("good")
    for number in range(100):
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(path)
    Configs.create(folder, folder / "images", num_classes=2, hidden_size=32, num_layers=1, num_heads=2)
    (folder / "data.json").write_text(json.dumps(DATA))
    (folder / "fsdp2.yaml").write_bytes((DIT / "fsdp2.yaml").read_bytes())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


IMAGES = ShardQuery("label", ("image", "label"))
SURFACES = {
    "model.json": (lambda: of_json(json.loads((DIT / "model.json").read_text())), load_model_config),
    "data.json": (lambda: of_json(DATA), load_data_config),
    "fsdp2.yaml": (lambda: of_bytes((DIT / "fsdp2.yaml").read_bytes()), load_fsdp2_config),
    "train.args": (lambda: of_bytes((DIT / "train.args").read_bytes()), read_train_args),
    "annotation.json": (lambda: of_json(ANNOTATION), read_entries),
    "labels.csv": (lambda: of_bytes(b"image_path,label\na.png,0\nb/c.png,1\nd.png,cat\n"), read_table),
    "tar": (lambda: of_bytes(tar_of()), lambda path: scan_tar(path, ShardQuery())),
    "parquet": (lambda: of_bytes(parquet_of()), lambda path: scan_parquet(path, IMAGES)),
    "tagged.mp4": (lambda: of_bytes(mp4_of()), read_a_video),
    RUN_FACTS: (lambda: of_json(FACTS), lambda path: read_facts(path.parent)),
    "config.json": (lambda: of_json(FOLDER), read_a_folder),
    "w.safetensors": (lambda: of_bytes(written_by(functools.partial(write_arrays, metadata={}))), read_weights),
    "w.pt": (lambda: of_bytes(written_by(write_torch_file, {"model": WEIGHTS, "args": FACTS})), read_weights),
    "w.ckpt": (lambda: of_bytes(written_by(write_mindspore_file)), read_weights),
    "values.npz": (lambda: of_bytes(written_by(write_npz)), read_arrays),
    ".metadata": (lambda: of_bytes(metadata_of()), read_index),
}
SURFACES |= {f"run of {name}": (SURFACES[name][0], begin) for name in (*CONFIG, "train.args")}


@pytest.mark.parametrize("name", [*CONFIG, "train.args"])
def test_a_run_begins_with_the_good_ones(name):
    begin((DIT if name == "train.args" else Path()) / name)


def once(folder: Path, name: str, content: bytes) -> None:
    """Read ``content`` as the file ``name``; another error than a UserError, or another file, is a finding."""
    file = folder / (name.removeprefix("run of ") if "." in name else f"file.{name}")
    file.write_bytes(content)
    try:
        SURFACES[name][1](file)
    except UserError as error:
        assert len(str(error)) < 3000
    assert os.listdir(folder) == [file.name]


@pytest.mark.parametrize("name", SURFACES)
def test_a_file_is_read_or_named(tmp_path, every, name):
    every(SURFACES[name][0](), few=15)(lambda content: once(tmp_path, name, content))


def test_what_was_found_is_mended(tmp_path):
    """A zip file without its beginning, and one of a later version."""
    whole = written_by(write_torch_file)
    once(tmp_path, "w.pt", edited(whole, [(0.0, 27, b"")]))
    once(tmp_path, "w.pt", whole.replace(b"PK\1\2\x14\3\x14", b"PK\1\2\x14\3\x40"))
    (tmp_path / "config").mkdir()  # and values of other types in a config.json
    values = {"_class_name": [], "model_type": {}, "max_position_embeddings": "7", "axes_dims_rope": []}
    for key, value in (values | {"in_channels": None}).items():
        once(tmp_path / "config", "config.json", json.dumps(FOLDER | {key: value}).encode())
