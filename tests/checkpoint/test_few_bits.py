"""Weights of few bits in files: written and read back bit for bit, never widened all at once, refused when damaged."""

import dataclasses
import gc
import json
import shutil
import weakref

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, base_digest, read_source
from mindspeed_mm_dit.checkpoint.state import shapes_of
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.files import read_safetensors_header
from mindspeed_mm_dit.configs.tuning import BASE_DTYPES, Tuning, is_linear_weight
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.low_bit import LowBitWeight, StoredArray, join_rows, quantized, split_rows
from mindspeed_mm_dit.framework.safetensors_file import StoredTensor, read_safetensors_file, write_safetensors_file
from mindspeed_mm_dit.integrations.formats import diffusers_folder, single_files
from mindspeed_mm_dit.integrations.formats import quantized as quantized_files
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import network_of
from tests.conftest import GOLDEN

DIT = GOLDEN / "quant_dit_tiny"
NF4 = DIT / "bnb_nf4_double.safetensors"
LAYER = "blocks.0.attn.qkv"
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"


def convert(*arguments):
    return main(["convert", *map(str, arguments)])


def weights_of(path):
    return single_files.read_safetensors(path).weights


def stored_in(path):
    return {name: array.stored for name, array in weights_of(path).items() if isinstance(array, StoredArray)}


def same_bits(a, b):
    return (a.format, a.shape, a.parts.keys()) == (b.format, b.shape, b.parts.keys()) and all(
        np.asarray(part).tobytes() == np.asarray(b.parts[name]).tobytes() for name, part in a.parts.items()
    )


def linear_of(predictor):
    return {name for name, parameter in parameters_of(predictor).items() if is_linear_weight(name, parameter)}


# --- written and read back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BASE_DTYPES)
@pytest.mark.parametrize("source", ["comfy_mixed", "torchao_int8wo"])
def test_a_file_of_few_bits_is_read_back_bit_for_bit(kind, source, tmp_path):
    assert convert(DIT / f"{source}.safetensors", tmp_path / "a.safetensors", "--dtype", kind) == 0
    before, found = weights_of(DIT / f"{source}.safetensors"), stored_in(tmp_path / "a.safetensors")
    assert len(found) >= 13 and {stored.format for stored in found.values()} == {kind}
    for name, stored in found.items():
        kept = isinstance(before[name], StoredArray) and before[name].stored.format == kind
        expected = before[name].stored if kept else quantized(np.asarray(before[name], np.float32), kind)
        assert same_bits(stored, expected), name
    rest = weights_of(tmp_path / "a.safetensors")
    assert all(np.array_equal(rest[name], before[name]) for name in before.keys() - found.keys())
    assert shapes_of(rest) == shapes_of(before)


def test_double_quantisation_is_kept(tmp_path):
    assert convert(NF4, tmp_path / "a.safetensors", "--dtype", "nf4") == 0
    before, found = stored_in(NF4), stored_in(tmp_path / "a.safetensors")
    assert len(before) == 10 and all(same_bits(found[name], before[name]) for name in before)
    assert all(found[name].options == before[name].options for name in before)
    theirs, ours = (
        json.loads(bytes(read_safetensors_file(path)[0][STATE])) for path in (NF4, tmp_path / "a.safetensors")
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["bnb_nf4", "comfy_mixed", "torchao_float8wo"])
@pytest.mark.parametrize("kind", ["float32", None])
def test_any_form_is_widened(name, kind, tmp_path, capsys):
    source = DIT / f"{name}.safetensors"
    assert convert(source, tmp_path / "a.safetensors", *(["--dtype", kind] if kind else [])) == 0
    assert {entry["dtype"] for entry in read_safetensors_header(tmp_path / "a.safetensors").tensors.values()} == {"F32"}
    found, before = weights_of(tmp_path / "a.safetensors"), weights_of(source)
    assert all(np.array_equal(found[name], before[name]) for name in before) and found.keys() == before.keys()
    assert "tensors are stored in" in capsys.readouterr().out


def test_a_folder_of_bitsandbytes_is_written_without_its_settings(tmp_path):
    assert convert(GOLDEN / "quant_flux_tiny/bnb_nf4", tmp_path / "wide", "--to", "diffusers") == 0
    assert "quantization_config" not in json.loads((tmp_path / "wide/config.json").read_text())
    found, before = (
        diffusers_folder.read(path).weights for path in (tmp_path / "wide", GOLDEN / "quant_flux_tiny/bnb_nf4")
    )
    assert all(np.array_equal(found[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", BASE_DTYPES)
def test_fused_layers_of_authors_are_quantised_whole_and_split_as_stored(kind, tmp_path):
    assert convert(GOLDEN / "flux_tiny", tmp_path / "a.safetensors", "--to", "original", "--dtype", kind) == 0
    state = single_files.read_safetensors(tmp_path / "a.safetensors")
    wide = diffusers_folder.read(GOLDEN / "flux_tiny")
    fused = "single_blocks.0.linear1.weight"
    parts = [
        f"single_transformer_blocks.0.{part}.weight" for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ]
    assert fused in read_safetensors_file(tmp_path / "a.safetensors")[0]
    whole = quantized(np.concatenate([wide.weights[name] for name in parts]), kind).widened()
    assert np.array_equal(np.concatenate([state.weights[name] for name in parts]), whole)
    assert all(isinstance(state.weights[name], StoredArray) for name in parts)
    assert {name for name, array in state.weights.items() if isinstance(array, StoredArray)} >= linear_of(
        wide.predictor
    )


def test_the_network_of_a_whole_checkpoint_is_read(tmp_path):
    def in_a_pipeline(tensors):
        network = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
        text = {"text_encoders.a.weight.quant_state.bitsandbytes__fp4": tensors[STATE]}
        tensors.clear()
        tensors.update(network | text)

    rewrite(NF4, tmp_path / "a.safetensors", in_a_pipeline)
    found, before = stored_in(tmp_path / "a.safetensors"), stored_in(NF4)
    assert len(found) == 10 and all(same_bits(found[name], before[name]) for name in found)


def test_adapters_are_merged_before_the_weights_are_quantised(tmp_path):
    lora = ["--merge-lora", DIT / "lora.safetensors"]
    assert convert(NF4, tmp_path / "wide.safetensors", *lora) == 0
    assert convert(NF4, tmp_path / "int8.safetensors", *lora, "--dtype", "int8") == 0
    wide, found = weights_of(tmp_path / "wide.safetensors"), stored_in(tmp_path / "int8.safetensors")
    assert all(same_bits(stored, quantized(wide[name], "int8")) for name, stored in found.items()) and len(found) >= 10
    assert not np.array_equal(wide[f"{LAYER}.weight"], weights_of(NF4)[f"{LAYER}.weight"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.pt", "--dtype", "nf4"], "ends in .safetensors"),
        (["folder", "--to", "diffusers", "--dtype", "fp8"], "ends in .safetensors"),
        (["a.gguf"], "read, and not written"),
    ],
)
def test_other_targets_are_refused(arguments, words, tmp_path, capsys):
    assert convert(NF4, tmp_path / arguments[0], *arguments[1:]) != 0
    assert words in capsys.readouterr().err


def test_adapters_have_no_format_of_a_base(tmp_path, capsys):
    source = GOLDEN / "quant_flux_tiny/lora"
    assert convert(source, tmp_path / "a.safetensors", "--to", "kohya", "--dtype", "nf4") != 0
    assert "--dtype = nf4 is for whole weights" in capsys.readouterr().err


def test_what_is_written_is_what_safetensors_reads(tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    arrays = {"b": np.arange(3, dtype=np.uint8), "a/ü": np.ones((2, 3), np.float32), "c": np.float64(2) * np.ones(())}
    arrays |= {"empty": np.zeros((0, 3), np.float16), "bool": np.array([True, False]), "turned": np.eye(3)[:, ::-1]}
    single_files.write_arrays(tmp_path / "a.safetensors", arrays, {"key": "value"})
    for found in (load_file(tmp_path / "a.safetensors"), read_safetensors_file(tmp_path / "a.safetensors")[0]):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(found[name], array) and found[name].dtype == array.dtype
    with pytest.raises(CheckpointError, match="x is of dtype complex"):
        single_files.write_arrays(tmp_path / "b.safetensors", {"x": np.ones(2, complex)}, {})


# --- the memory of the host -------------------------------------------------------------------------------------------


@pytest.fixture
def widened(monkeypatch):
    """The most numbers, and tensors, of few bits that were widened at a time since it was last read."""
    alive, most = [0, 0], [0, 0]
    widen = LowBitWeight.widened

    def gone(size):
        alive[0], alive[1] = alive[0] - 1, alive[1] - size

    def counted(self, *args):
        array = widen(self, *args)
        if isinstance(array, np.ndarray):
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            alive[0], alive[1] = alive[0] + 1, alive[1] + array.size
            weakref.finalize(owner, gone, array.size)
            most[:] = [max(pair) for pair in zip(alive, most)]
        return array

    monkeypatch.setattr(LowBitWeight, "widened", counted)

    def read():
        gc.collect()
        found, most[:] = list(most), [0, 0]
        assert alive == [0, 0], "widened tensors were kept"
        return found

    return read


@pytest.mark.pytorch
@pytest.mark.parametrize("name", ["bfloat16", "bnb_nf4_double", "fp8_scaled.safetensors", "comfy_mixed.safetensors"])
@pytest.mark.parametrize("base", ["nf4", "int8", "bf16", None])
def test_a_base_is_read_and_quantised_one_tensor_at_a_time(name, base, widened, tmp_path):
    path = GOLDEN / "quant_flux_tiny" / name
    if name == "bfloat16":
        path = tmp_path / "a.safetensors"
        assert convert(GOLDEN / "flux_tiny", path, "--dtype", "bf16") == 0
    state = diffusers_folder.read(path) if path.is_dir() else single_files.read_safetensors(path)
    here = state.predictor or diffusers_folder.infer_predictor(shapes_of(state.weights), {})
    source = read_source(path, here)
    values = {value.name: value.value for value in adapt_weights(source, here, (), 0)}
    assert sum(isinstance(value, StoredArray) for value in values.values()) > 10 and widened() == [0, 0]
    digest = base_digest(values)
    largest = max(value.size for value in values.values() if isinstance(value, StoredArray))
    assert widened() == [1, largest]
    tuning = Tuning(("all",), 4, 8, base_dtype=base or "").spelled_out(parameters_of(here))
    parameters = tuning.applied(parameters_of(here))
    network = network_of(here)
    runtime.pack_weights(network, {name: p.stored_as for name, p in parameters.items() if p.stored_as})
    runtime.load_arrays(network, values)
    assert widened()[0] <= 1
    assert digest == base_digest({name: np.asarray(value, np.float32) for name, value in values.items()})


@pytest.mark.parametrize("kind", ["nf4", "fp8", "float32"])
def test_a_file_is_converted_one_tensor_at_a_time(kind, widened, tmp_path):
    assert convert(GOLDEN / "quant_flux_tiny/comfy_mixed.safetensors", tmp_path / "a.safetensors", "--dtype", kind) == 0
    assert widened()[0] == 1


def test_a_wide_file_is_the_base_that_the_small_one_is(tmp_path):
    assert convert(NF4, tmp_path / "wide.safetensors", "--dtype", "float32") == 0
    assert base_digest(weights_of(tmp_path / "wide.safetensors")) == base_digest(weights_of(NF4))


@pytest.mark.parametrize("changes", [{}, {"num_classes": 4}, {"patch_size": 4}, {"learn_sigma": False}])
def test_weights_of_few_bits_are_adapted_as_others_are(changes, tmp_path):
    small, wide = tmp_path / "small.safetensors", tmp_path / "wide.safetensors"
    rounded = {n: quantized(np.asarray(a, np.float32), "bf16").widened() for n, a in weights_of(NF4).items()}
    single_files.write_arrays(small, rounded, {}, as_bfloat16=True)
    single_files.write_arrays(wide, rounded, {})
    there = single_files.infer_predictor(shapes_of(weights_of(wide)), {})
    here = dataclasses.replace(there, **changes)
    found, expected = (
        {v.name: v for v in adapt_weights(read_source(path, here), here, (), 0)} for path in (small, wide)
    )
    assert isinstance(weights_of(small)["final_layer.linear.weight"], StoredArray)
    assert isinstance(found["blocks.0.attn.qkv.weight"].value, StoredArray)
    for name, value in found.items():
        assert np.array_equal(value.value, expected[name].value) and value.how == expected[name].how


# --- rows of squares, and of parts ------------------------------------------------------------------------------------


def squares(rows, columns):
    rng = np.random.default_rng(0)
    scale = rng.random((-(-rows // 128), -(-columns // 128))).astype(np.float32)
    codes = rng.integers(0, 120, (rows, columns)).astype(np.uint8)
    stored = LowBitWeight(
        "fp8", codes.shape, {"codes": codes, "scale": scale}, (("dtype", "float8_e4m3fn"), ("square", 128))
    )
    wide = single_files.StoredArray(LowBitWeight("fp8", codes.shape, {"codes": codes}, (("dtype", "float8_e4m3fn"),)))
    return stored, wide * scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 5)])
def test_squares_that_share_a_scale_are_widened_by_rows_too(shape):
    stored, wide = squares(*shape)
    assert np.array_equal(stored.widened(), wide)
    part = StoredArray(stored)[:128]
    assert np.array_equal(part, wide[:128]) and isinstance(part, StoredArray) == (shape[0] % 128 == 0)


@pytest.mark.pytorch
@pytest.mark.parametrize("kind", ["squares", "zero", "float16"])
def test_pytorch_widens_what_files_have_besides(kind, monkeypatch):
    torch = pytest.importorskip("torch")
    from mindspeed_mm_dit.framework.pytorch import low_bit

    monkeypatch.setattr(low_bit, "WIDENED_AT_ONCE", 256 * 130)  # (in parts)
    array = np.random.default_rng(1).standard_normal((640, 130)).astype(np.float16)
    if kind == "squares":
        array = StoredArray(squares(640, 130)[0])
    elif kind == "zero":
        codes = quantized(array, "int8").parts
        array = StoredArray(LowBitWeight("int8", array.shape, {**codes, "zero": codes["scale"] * 100}))
    layer = low_bit.PackedWeight(array.shape, "bf16")
    layer.load(array, torch.device("cpu"))
    assert layer.format == {"squares": "fp8", "zero": "int8", "float16": "f16"}[kind]
    assert np.array_equal(layer.widened().numpy(), np.asarray(array, np.float32))


@pytest.mark.parametrize("kind", [*BASE_DTYPES, "squares"])
def test_parts_of_a_matrix_make_it_again(kind):
    wide = np.random.default_rng(0).standard_normal((384, 128)).astype(np.float32)
    array = StoredArray(squares(384, 128)[0] if kind == "squares" else quantized(wide, kind))
    parts = split_rows(array, [128, 256])
    again = join_rows(parts)
    assert all(isinstance(each, StoredArray) for each in (*parts, again)) and same_bits(again.stored, array.stored)
    assert np.array_equal(join_rows([parts[0], np.asarray(parts[1])]), np.asarray(array)[:256])


def test_matrices_with_a_scale_each_keep_them_when_they_become_one():
    one, other = (StoredArray(quantized(factor * np.eye(8, dtype=np.float32), "fp8")) for factor in (1, 3))
    joined = join_rows([one, other])
    assert isinstance(joined, StoredArray) and np.array_equal(joined, np.concatenate([one, other]))


# --- damaged files ----------------------------------------------------------------------------------------------------


def rewrite(source, target, change):
    """Write a file again with some tensors changed: (dtype, bits) by name, None to leave it out."""
    header = read_safetensors_header(source)
    arrays, metadata = read_safetensors_file(source, as_bits=True)
    tensors = {name: (header.tensors[name]["dtype"], array) for name, array in arrays.items()}
    change(tensors)
    written = {n: StoredTensor(t[0], t[1].shape, lambda bits=t[1]: bits) for n, t in tensors.items() if t is not None}
    write_safetensors_file(target, written, metadata)


def with_state(**changes):
    def change(tensors):
        state = json.loads(bytes(tensors[STATE][1])) | changes
        tensors[STATE] = ("U8", np.frombuffer(json.dumps(state).encode(), np.uint8))

    return change


def without(part):
    return lambda tensors: tensors.pop(f"{LAYER}.{part}")


def part_as(part, make):
    def change(tensors):
        dtype, array = tensors[f"{LAYER}.{part}"]
        tensors[f"{LAYER}.{part}"] = (dtype, make(array.copy()))

    return change


def spoiled(array):
    array.reshape(-1)[0] = np.nan
    return array


DAMAGED = {
    "no absmax": (NF4, without("weight.absmax"), "absmax is missing"),
    "no table": (NF4, without("weight.quant_map"), "quant_map is missing"),
    "no scales of scales": (NF4, without("weight.nested_absmax"), "nested_absmax is missing"),
    "no weight": (NF4, without("weight"), "weight is missing"),
    "no state": (NF4, without("weight.quant_state.bitsandbytes__nf4"), "quant_state is missing"),
    "state that is no JSON": (
        NF4,
        part_as("weight.quant_state.bitsandbytes__nf4", lambda a: a[:20]),
        "does not hold a JSON object",
    ),
    "other block size": (NF4, with_state(blocksize=128), "absmax has 48 numbers, not 24"),
    "block of 63": (NF4, with_state(blocksize=63), "blocks of 63"),
    "block of text": (NF4, with_state(blocksize="64"), "blocks of \"64\"|blocks of '64'"),
    "other nested block": (NF4, with_state(nested_blocksize=32), "nested_absmax has 1 numbers, not 2"),
    "offset that is no number": (NF4, with_state(nested_offset="x"), "nested_offset"),
    "other shape": (NF4, with_state(shape=[96, 64]), "1536 bytes are not those of"),
    "negative shape": (NF4, with_state(shape=[-96, -32]), "the shape"),
    "no shape": (NF4, with_state(shape=None), "no shape"),
    "fp4": (NF4, with_state(quant_type="fp4"), "does not say so"),
    "truncated codes": (NF4, part_as("weight", lambda a: a[:-1]), "1535 bytes"),
    "truncated table": (NF4, part_as("weight.quant_map", lambda a: a[:-1]), "quant_map has 15"),
    "NaN in scales": (NF4, part_as("weight.nested_absmax", spoiled), "no finite numbers"),
    "NaN in the table": (NF4, part_as("weight.quant_map", spoiled), "no finite numbers"),
    "NaN in absmax": (DIT / "bnb_nf4.safetensors", part_as("weight.absmax", spoiled), "no finite numbers"),
    "NaN in a scale": (DIT / "comfy_mixed.safetensors", part_as("weight_scale", spoiled), "no finite numbers"),
    "NaN in torchao's scale": (
        DIT / "torchao_int8wo.safetensors",
        part_as("_weight_scale", spoiled),
        "no finite numbers",
    ),
    "no torchao scale": (DIT / "torchao_int8wo.safetensors", without("_weight_scale"), "scale is missing"),
    "no torchao data": (DIT / "torchao_int8wo.safetensors", without("_weight_qdata"), "data or its scale is missing"),
    "scale of torchao of other size": (
        DIT / "torchao_float8wo.safetensors",
        part_as("_weight_scale", lambda a: a[:7]),
        "has a scale of shape",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_layer_is_refused_by_name(case, tmp_path):
    source, change, words = DAMAGED[case]
    rewrite(source, tmp_path / "a.safetensors", change)
    with pytest.raises(CheckpointError, match=f"{LAYER}.*(?:{words})"):
        weights_of(tmp_path / "a.safetensors")


def test_fp4_and_other_types_of_torchao_are_refused_by_name(tmp_path):
    rewrite(NF4, tmp_path / "a.safetensors", lambda t: t.update({STATE.replace("nf4", "fp4"): t.pop(STATE)}))
    with pytest.raises(CheckpointError, match=f"{LAYER} is stored in fp4 of bitsandbytes"):
        weights_of(tmp_path / "a.safetensors")
    metadata = {"tensor_names": "[]", f"{LAYER}.weight": '{"_type": "Int4Tensor"}'}
    with pytest.raises(CheckpointError, match=f"{LAYER} is stored in .Int4Tensor. of torchao"):
        quantized_files.read_formats({}, metadata, "a file")


def test_points_of_zero_of_torchao_are_subtracted(tmp_path):
    source = DIT / "torchao_int8wo.safetensors"
    rewrite(source, tmp_path / "a.safetensors", part_as("_weight_zero_point", lambda a: a + np.int8(3)))
    found, before = weights_of(tmp_path / "a.safetensors")[f"{LAYER}.weight"], stored_in(source)[f"{LAYER}.weight"]
    assert np.array_equal(found, (before.parts["codes"].astype(np.float32) - 3) * before.parts["scale"])
    assert convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--dtype", "int8") == 0
    assert np.allclose(weights_of(tmp_path / "b.safetensors")[f"{LAYER}.weight"], found, atol=np.abs(found).max() / 200)


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf")


def write_gguf(gguf, path, tensors, shapes=()):
    writer = gguf.GGUFWriter(path, "flux")
    for name, shape in shapes:
        writer.add_array(f"comfy.gguf.orig_shape.{name}", shape)
    for name, (kind, array) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=getattr(gguf.GGMLQuantizationType, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_types_that_are_not_read_are_named(gguf, tmp_path):
    from mindspeed_mm_dit.integrations.formats.gguf_files import read_gguf

    q8 = np.zeros((4, 34), np.uint8)
    write_gguf(
        gguf, tmp_path / "a.gguf", {"a.weight": ("Q8_0", q8), "b.weight": ("Q3_K", np.zeros((4, 110), np.uint8))}
    )
    with pytest.raises(CheckpointError, match=r"b\.weight is of type Q3_K"):
        read_gguf(tmp_path / "a.gguf")
    q8[1, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    write_gguf(gguf, tmp_path / "b.gguf", {"a.weight": ("Q8_0", q8)})
    with pytest.raises(CheckpointError, match=r"a\.weight has scales that are no finite numbers"):
        read_gguf(tmp_path / "b.gguf")


def test_the_shape_that_comfyui_notes_is_taken(gguf, tmp_path):
    from mindspeed_mm_dit.integrations.formats.gguf_files import read_gguf

    array = np.arange(24, dtype=np.float16).reshape(4, 6)
    write_gguf(gguf, tmp_path / "a.gguf", {"a.weight": ("F16", array)}, [("a.weight", [2, 2, 1, 3, 2])])
    assert np.array_equal(read_gguf(tmp_path / "a.gguf").weights["a.weight"], array.reshape(2, 2, 1, 3, 2))
    write_gguf(gguf, tmp_path / "b.gguf", {"a.weight": ("F16", array)}, [("a.weight", [5, 5])])
    with pytest.raises(CheckpointError, match=r"a\.weight is of shape"):
        read_gguf(tmp_path / "b.gguf")


@pytest.mark.parametrize("length", [0, 3, 20, 30, 300, 5000, 100_000])
def test_a_file_that_is_cut_short_is_refused(gguf, length, tmp_path):
    from mindspeed_mm_dit.integrations.formats.gguf_files import read_gguf

    (tmp_path / "a.gguf").write_bytes((GOLDEN / "quant_flux_tiny/q8_0.gguf").read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"a\.gguf cannot be read"):
        read_gguf(tmp_path / "a.gguf")


def test_a_list_that_claims_to_be_endless_is_refused(gguf, tmp_path):
    from mindspeed_mm_dit.integrations.formats.gguf_files import read_gguf

    entry = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (0).to_bytes(4, "little")
    content = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + entry
    (tmp_path / "a.gguf").write_bytes(content + (1 << 62).to_bytes(8, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="cut short"):
        read_gguf(tmp_path / "a.gguf")


def test_gguf_becomes_a_safetensors_file(gguf, tmp_path):
    source = GOLDEN / "quant_flux_tiny/q4_0.gguf"
    assert convert(source, tmp_path / "wide.safetensors", "--dtype", "float32") == 0
    assert convert(source, tmp_path / "nf4.safetensors", "--dtype", "nf4") == 0
    from mindspeed_mm_dit.integrations.formats.gguf_files import read_gguf

    before, wide = read_gguf(source).weights, weights_of(tmp_path / "wide.safetensors")
    assert all(np.array_equal(wide[name], before[name]) for name in before) and wide.keys() == before.keys()
    assert (tmp_path / "nf4.safetensors").stat().st_size < (tmp_path / "wide.safetensors").stat().st_size / 3


def test_the_package_is_named_where_it_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    shutil.copy(GOLDEN / "quant_flux_tiny/q4_0.gguf", tmp_path / "a.gguf")
    assert convert(tmp_path / "a.gguf", tmp_path / "a.safetensors") != 0
    assert "pip install gguf" in capsys.readouterr().err
