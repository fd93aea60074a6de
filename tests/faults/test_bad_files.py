"""Files that cannot be right: foreign weights, logs and reference values are named with what is wrong in them."""

import dataclasses
import json
import os
import re
import struct

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, read_source
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError, DataError
from mindspeed_mm_dit.integrations.formats import diffusers_folder as folders
from mindspeed_mm_dit.integrations.formats import single_files
from mindspeed_mm_dit.integrations.formats.config_json import config_from_diffusers, dit_json
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import sincos_positions_2d
from mindspeed_mm_dit.tools.verify.parity import compare
from mindspeed_mm_dit.tools.visualize.plot import read_curve
from tests.conftest import FRAMEWORK, GOLDEN

TINY = DiTConfig(input_size=8, num_classes=5, hidden_size=16, num_layers=2, num_heads=2)
LINE = "iteration {}/ 5 | elapsed time per iteration (ms): 1.0 | loss: 1.0E+00 |"
FLOW_KEYS = ("config", "x0", "x1", "t", "y", "path/Linear/x_t")
GAUSSIAN_KEYS = ("config", "x0", "noise", "t", "y", "x_t")


@pytest.fixture
def diffusers_folder(tmp_path):
    weights = {name: np.zeros(shape, np.float32) for name, shape in parameters_of(TINY).shapes().items()}
    weights["pos_embed"] = sincos_positions_2d(16, 4)[None]
    folder = tmp_path / "folder"
    folder.mkdir()
    folders.write(folder, State({"model": weights}, config=dit_json(TINY)))
    return folder


def test_sizes_of_a_config_json_are_checked_before_they_are_believed(diffusers_folder, tmp_path):
    config = json.loads((diffusers_folder / "config.json").read_text())
    for key, value in (("num_layers", 900), ("num_layers", 10**9), ("sample_size", 10**9), ("sample_size", 8.0),
                       ("num_attention_heads", "many"), ("patch_size", None)):  # fmt: skip
        (diffusers_folder / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(CheckpointError, match=re.escape(f"{key} = {value!r}")):
            convert(diffusers_folder, tmp_path / "x.pt")
        assert not (tmp_path / "x.pt").exists()


def without_a_part(folder, monkeypatch):
    monkeypatch.setattr(folders, "MAX_FILE_BYTES", 50_000)
    convert(GOLDEN / "flux_tiny", folder / "flux", "diffusers")
    next((folder / "flux").glob("*-00002-*")).unlink()
    return [folder / "flux"]


def without_a_scale(folder, monkeypatch):
    weight = {"dtype": "F8_E4M3", "shape": [1, 4], "data_offsets": [0, 4]}
    header = {"x.weight": weight, "scaled_fp8": ONE | {"data_offsets": [4, 8]}}
    (folder / "low.safetensors").write_bytes(safetensors_bytes(header) + bytes(8))
    return [folder / "low.safetensors"]


def test_weights_of_an_image_transformer_that_do_not_fit_are_named(tmp_path, monkeypatch, capsys):
    for arguments, message in (
        (without_a_part, "diffusion_pytorch_model-00002-of-00008.safetensors"),
        (without_a_scale, "x.weight"),
        (["flux_schnell_tiny", "--merge-lora", "flux_lora_tiny/flux_lora"], "no linear layer of this network"),
        (["sd35_tiny", "--merge-lora", "flux_lora_tiny/kohya.safetensors"], "no linear layer of this network"),
    ):
        given = arguments(tmp_path, monkeypatch) if callable(arguments) else arguments
        source, *merged = (GOLDEN / own if "tiny" in str(own) else own for own in given)
        assert main(["convert", str(source), str(tmp_path / "x.safetensors"), *map(str, merged)]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "x.safetensors").exists()


def test_an_image_transformer_begins_with_its_own_family_and_settings_alone():
    told = config_from_diffusers(json.loads((GOLDEN / "flux_tiny/config.json").read_text()), "x")
    assert read_source(GOLDEN / "flux_tiny", told).predictor == told
    with pytest.raises(CheckpointError, match=r"'sd3'.*'flux'"):
        read_source(GOLDEN / "sd3_tiny", told)
    turned = dataclasses.replace(told, axes_dims_rope=(4, 4, 4))
    with pytest.raises(CheckpointError, match=r"axes_dims_rope.*\(2, 4, 6\).*\(4, 4, 4\)"):
        adapt_weights(read_source(GOLDEN / "flux_tiny", turned), turned, (), 0)


def test_what_would_be_read_for_ever_is_no_log(tmp_path, capsys):
    os.mkfifo(tmp_path / "events.out.tfevents.1")
    for log in (tmp_path / "events.out.tfevents.1", "/dev/zero", tmp_path):
        assert main(["plot", str(log), "--output", str(tmp_path / "loss.png")]) == 2
        assert "not a file" in capsys.readouterr().err


def test_a_step_that_no_run_reaches_is_named(tmp_path):
    for digits in (23, 5000):
        (tmp_path / "log.txt").write_text(LINE.format("9" * digits))
        with pytest.raises(DataError, match=r"log\.txt.*9999"):
            read_curve(tmp_path / "log.txt")


def safetensors_bytes(header: object, length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def test_a_header_that_cannot_be_right_is_named(tmp_path):
    for content, message in (
        (safetensors_bytes({"__metadata__": 5}), "__metadata__"),
        (safetensors_bytes({"a": ONE, "b": ONE}) + b"0000", "overlap"),
        (safetensors_bytes('{"a": {}, "a": {}}'), "twice"),
        (safetensors_bytes({"a": ONE | {"shape": [2]}}) + b"0000", r"4 bytes.*\[2\]"),
        (safetensors_bytes({"a": ONE | {"data_offsets": [-4, 0]}}), "-4 to 0"),
        (safetensors_bytes({}, 2**63 - 1), "9223372036854775815"),
        (safetensors_bytes({"__metadata__": {"facts": "{"}}), "'facts'"),
        (safetensors_bytes({"__metadata__": {"config": "[1]"}}), "'config'"),
    ):
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"a\.safetensors.*{message}"):
            single_files.read_safetensors(tmp_path / "a.safetensors")


def values(kind: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{kind}_tiny_p2.npz") as file:
        return {name: file[name] for name in (GAUSSIAN_KEYS if kind == "dit" else FLOW_KEYS)}


def config(position: int, value: int) -> np.ndarray:
    sizes = np.array([64, 2, 4, 2, 8, 4, 10])
    sizes[position] = value
    return sizes


def test_an_array_of_a_reference_file_that_cannot_be_right_is_named(framework, tmp_path):
    for kind, name, array, message in (
        ("dit", "config", np.arange(1, 6), "config .*hidden_size"),
        ("dit", "config", np.array(["a"] * 7), "config.* real numbers"),
        ("dit", "config", config(0, 10**12), "config .*1000000000000"),
        ("dit", "config", config(1, 10**12), "num_layers = 1000000000000"),
        ("dit", "t", np.array([0, 1]), r"t.*\(2,\).*\(4,\)"),
        ("dit", "t", np.array([0, 1, 2, 1000]), "t.* 999"),
        ("dit", "y", np.array([0, 1, 2, 11]), "y.* 10"),
        ("dit", "noise", np.zeros((4, 4, 8, 9), np.float32), "noise"),
        ("dit", "x_t", np.array(["a"]), "x_t.* real numbers"),
        ("sit", "t", np.full(6, 1.5, np.float32), "t.* real numbers from 0 to 1"),
        ("sit", "t", np.full(6, np.nan, np.float32), "t.* real numbers from 0 to 1"),
        ("sit", "t", None, "t is not in --reference"),
    ):
        given = {**values(kind), name: array}
        np.savez(tmp_path / "odd.npz", **{key: value for key, value in given.items() if value is not None})
        with pytest.raises(CheckpointError, match=message):
            compare(tmp_path / "odd.npz", GOLDEN / f"{kind}_tiny_p2.pt", 1e-5, 1e-12)


def test_a_file_that_is_no_reference_is_one_error(framework, tmp_path, capsys):
    for name, write, named in (
        ("sizes", lambda path: np.savez(path, config=config(0, 64)), "no results"),
        ("empty", np.savez, "no arrays"),
        ("cut", lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "not an .npz"),
        ("pipe", os.mkfifo, "named pipe"),
    ):
        file = tmp_path / f"{name}.npz"
        write(file)
        chosen = ["--checkpoint", str(GOLDEN / "dit_tiny_p2.pt"), "--ai-framework", FRAMEWORK]
        assert main(["parity", "--reference", str(file), *chosen]) == 2
        assert named in capsys.readouterr().err
