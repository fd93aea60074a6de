"""Weights of few bits: held to the libraries that wrote them, the same in NumPy and PyTorch, and in a network."""

import json

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.limits import BASE_DTYPES
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.low_bit import LowBitWeight, StoredArray, num_bytes, quantized
from mindspeed_mm_dit.framework.pytorch import low_bit
from mindspeed_mm_dit.framework.pytorch.low_bit import PackedWeight
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.meta import parameters_of, with_tuning
from mindspeed_mm_dit.planning import Placement, memory
from tests.conftest import ROOT

DATA = ROOT / "tests/golden/data"
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "BF16")


def weights(shape=(48, 96)):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def stored_gguf(name, file):
    shape = file[f"weight/{name}"].shape
    return LowBitWeight(name.split(".")[2].lower(), shape, {"codes": file[f"bytes/{name}"].reshape(-1)})


def stored_nf4(name, file):
    """Return a weight of bitsandbytes' state dict."""
    state = json.loads(file[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
    parts = {"codes": file[name].reshape(-1), "absmax": file[f"{name}.absmax"], "table": file[f"{name}.quant_map"]}
    options = {"block": state["blocksize"]}
    if "nested_blocksize" in state:
        parts |= {"nested_absmax": file[f"{name}.nested_absmax"], "nested_map": file[f"{name}.nested_quant_map"]}
        options |= {"nested_block": state["nested_blocksize"], "offset": np.float32(state["nested_offset"])}
    return LowBitWeight("nf4", tuple(state["shape"]), parts, tuple(options.items()))


def packed(weight, requested="bf16"):
    layer = PackedWeight(weight.shape, requested)
    layer.load(weight, torch.device("cpu"))
    return layer


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_types_of_gguf_are_widened_as_ggml_does(kind):
    with np.load(DATA / "low_bit/gguf_types.npz") as file:
        for number in range(2):
            name = f"double_blocks.{number}.{kind}.weight"
            stored, expected = stored_gguf(name, file), file[f"weight/{name}"]
            assert np.array_equal(stored.widened(), expected)
            assert np.array_equal(packed(StoredArray(stored)).widened().numpy(), expected)


@pytest.mark.parametrize("name", ["bnb_nf4", "bnb_nf4_double"])
def test_nf4_is_widened_as_bitsandbytes_does(name):
    arrays, _ = read_safetensors_file(DATA / f"quant_dit_tiny/{name}.safetensors")
    with np.load(DATA / f"quant_dit_tiny/{name}.npz") as truth:
        names = [key.removeprefix("weight/") for key in truth if key.startswith("weight/")]
        for key in names:
            stored = stored_nf4(key, arrays)
            assert np.array_equal(stored.widened(), truth[f"weight/{key}"])
            assert np.array_equal(packed(StoredArray(stored)).widened().numpy(), truth[f"weight/{key}"])
    assert len(names) == 10


def test_nf4_has_the_codes_of_bitsandbytes():
    arrays, _ = read_safetensors_file(DATA / "quant_dit_tiny/bnb_nf4.safetensors")
    for key in (name for name in arrays if f"{name}.absmax" in arrays):
        again = quantized(stored_nf4(key, arrays).widened(), "nf4")
        assert np.array_equal(again.parts["codes"], arrays[key].reshape(-1))
        assert np.array_equal(again.parts["absmax"], arrays[f"{key}.absmax"])


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16)])
def test_floats_are_rounded_as_pytorch_rounds(name, dtype):
    stored = quantized(weights(), name)
    scale = stored.parts.get("scale", np.float32(1))
    assert np.array_equal(stored.widened(), (torch.tensor(weights()) / scale).to(dtype).float().numpy() * scale)


@pytest.mark.parametrize("name", BASE_DTYPES)
@pytest.mark.parametrize("shape", [(48, 96), (777, 65), (1, 3)])
def test_a_quantised_weight_stands_for_itself(name, shape):
    stored = quantized(weights(shape), name)
    assert stored.num_bytes == num_bytes(name, shape) == sum(part.nbytes for part in stored.parts.values())
    again = quantized(stored.widened(), name)
    np.testing.assert_allclose(again.widened(), stored.widened(), rtol=1e-6)
    assert np.array_equal(packed(weights(shape), name).widened().numpy(), stored.widened())
    assert not quantized(np.zeros(shape, np.float32), name).widened().any()


@pytest.mark.parametrize(("name", "error"), [("nf4", 0.1), ("fp8", 0.03), ("int8", 0.01), ("bf16", 0.002)])
def test_the_error_of_a_format_is_the_known_one(name, error):
    distance = np.linalg.norm(quantized(weights(), name).widened() - weights()) / np.linalg.norm(weights())
    assert error / 2 < distance < error


@pytest.mark.parametrize("name", BASE_DTYPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_and_its_gradients_are_those_of_the_widened_weight(name, compiled):
    layer, bias = packed(weights(), name), torch.randn(48, requires_grad=True)
    x = torch.randn(2, 5, 96, requires_grad=True)
    product = torch.compile(layer.product, backend="aot_eager") if compiled else layer.product
    results = []
    for y in (product(x, bias), torch.nn.functional.linear(x, layer.widened(), bias)):
        x.grad = bias.grad = None
        y.square().sum().backward()
        results.append((y.detach(), x.grad, bias.grad))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_a_product_has_a_derivative_along_a_tangent():
    layer, x, tangent = packed(weights(), "nf4"), torch.randn(3, 96), torch.randn(3, 96)
    with torch.autograd.forward_ad.dual_level():
        dual = layer.product(torch.autograd.forward_ad.make_dual(x, tangent), None)
        change = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(change, tangent @ layer.widened().T)


def test_autograd_keeps_the_bits_alone():
    layer, kept = packed(weights((64, 64)), "nf4"), []
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t):
        layer.product(x, None)
    assert sum(kept) == num_bytes("nf4", (64, 64))


def test_parts_keep_their_dtypes_wherever_they_go():
    layer = packed(weights(), "nf4")
    before = layer.widened()
    assert torch.equal(layer.to(torch.bfloat16).double().widened(), before)
    assert layer.state_dict() == {} and not list(layer.parameters())


@pytest.mark.parametrize("name", BASE_DTYPES)
@pytest.mark.parametrize("shape", [(1024, 128), (1000, 64), (777, 65)])
def test_a_weight_that_is_widened_in_parts_is_the_same(monkeypatch, name, shape):
    monkeypatch.setattr(low_bit, "WIDENED_AT_ONCE", 256 * 64)
    assert np.array_equal(packed(weights(shape), name).widened().numpy(), quantized(weights(shape), name).widened())


@pytest.mark.parametrize(("name", "shape", "row"), [("nf4", (6, 64), 2), ("int8", (6, 5), 1), ("bf16", (6, 5), 5)])
def test_rows_stay_as_they_are_stored(name, shape, row):
    array = StoredArray(quantized(weights(shape), name))
    part = array[row:]
    assert isinstance(part, StoredArray) and part.shape == (6 - row, shape[1])
    assert np.array_equal(np.asarray(part), np.asarray(array)[row:])


def test_rows_that_share_a_block_are_widened():
    array = StoredArray(quantized(weights((2, 40)), "nf4"))
    assert isinstance(array[1:], np.ndarray) and np.array_equal(array[1:], np.asarray(array)[1:])


def test_a_stored_array_acts_as_its_numbers():
    array = StoredArray(quantized(weights(), "bf16"))
    wide = array.stored.widened()
    assert (array.shape, array.ndim, array.size, array.dtype, len(array)) == ((48, 96), 2, 48 * 96, np.float32, 48)
    for ours, expected in (
        (array.T, wide.T),
        (array * 2, wide * 2),
        (np.isfinite(array), np.isfinite(wide)),
        (array.reshape(96, 48), wide.reshape(96, 48)),
        (array[3], wide[3]),
        (np.concatenate([array, wide]), np.concatenate([wide, wide])),
    ):
        assert np.array_equal(ours, expected)


def test_a_file_with_fewer_bits_stays_as_it_is_and_another_is_quantised():
    int8 = StoredArray(quantized(weights(), "int8"))
    assert packed(int8, "bf16").format == "int8" and packed(int8, "nf4").format == "nf4"


@pytest.mark.parametrize("name", BASE_DTYPES)
def test_a_network_on_a_base_of_few_bits_is_one_on_the_widened_base(name):
    low, wide = (
        with_tuning(load_model_config(ROOT / "examples/dit/model.json"), Tuning(("all",), 4, 8, base_dtype=base))
        for base in (name, "")
    )
    composites = [DiTModel(config, NoAutoencoder(config.ae)) for config in (low, wide)]
    values = {key: weights(p.shape) * 0.1 for key, p in parameters_of(low).items()}
    declared = parameters_of(low)
    of_bits = {
        key: quantized(value, name).widened() if declared[key].stored_as else value for key, value in values.items()
    }
    results = []
    for composite, start in zip(composites, (values, of_bits)):
        runtime.load_arrays(composite.predictor, start)
        x = torch.linspace(-1, 1, 2 * np.prod(low.latent_shape)).reshape(2, *low.latent_shape)
        y = composite.predictor(x, torch.tensor([0.3, 0.7]), torch.tensor([1, 2]))
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad for _, p in composite.predictor.named_parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for ours, expected in zip(*results):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()
    held = sum(p.nbytes for p in composites[0].predictor.parameters())
    held += sum(
        part.nbytes for part in low_bit.packed_weights(composites[0].predictor).values() for part in part.buffers()
    )
    assert memory(low, Placement(1)).weights == held
