"""Files in few bits that other libraries wrote: the numbers that they stand for, and a LoRA step over such a base.

Each weight is compared to the bit with what the library itself makes of it; the step runs through frozen layers that
hold the bits of the file.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.framework import ops, optim, runtime
from mindspeed_mm_dit.framework.low_bit import StoredArray, as_stored
from mindspeed_mm_dit.integrations.formats import diffusers_folder, families, lora_files, single_files
from mindspeed_mm_dit.integrations.formats.config_json import config_from_diffusers
from mindspeed_mm_dit.integrations.formats.gguf_files import read_gguf
from mindspeed_mm_dit.models.joint import pack
from mindspeed_mm_dit.models.layers import add_lora
from mindspeed_mm_dit.models.registry import network_of
from tests.conftest import GOLDEN

pytestmark = pytest.mark.pytorch
FLUX = (
    *("bnb_nf4", "bnb_nf4_double", "fp8_scaled.safetensors", "comfy_mixed.safetensors"),
    *("torchao_int8wo.safetensors", "torchao_float8wo.safetensors", "q8_0.gguf", "q4_0.gguf", "bf16.gguf"),
)
DIT = ("bnb_nf4", "bnb_nf4_double", "comfy_mixed", "torchao_int8wo", "torchao_float8wo")
CASES = [
    *(("quant_flux_tiny", file) for file in FLUX),
    *(("quant_flux_k_tiny", file) for file in ("k_mixed.gguf", "q5_k.gguf")),
    *(("quant_dit_tiny", f"{name}.safetensors") for name in DIT),
]


def values_of(folder, file):
    name = file.partition(".")[0]
    if folder != "quant_dit_tiny":
        with np.load(GOLDEN / folder / "values.npz") as values:
            return {key.removeprefix(f"{name}/"): values[key] for key in values if key.startswith(f"{name}/")}
    found = {}
    for path in (GOLDEN / folder).glob(f"{name}*.npz"):
        if path.stem in (name, f"{name}_lora"):
            with np.load(path) as values:
                found |= dict(values)
    return found


@cache
def state_of(folder, file):
    path = GOLDEN / folder / file
    if path.suffix == ".gguf":
        pytest.importorskip("gguf")
        return read_gguf(path)
    return diffusers_folder.read(path) if path.is_dir() else single_files.read_safetensors(path)


def by_our_names(weights):
    """The reference's weights, which have the names in the file, cut as ours are."""
    flux = families.FAMILIES["flux"]
    return families.to_diffusers(weights, flux.rules) if any("double_blocks" in name for name in weights) else weights


@pytest.mark.parametrize(("folder", "file"), CASES)
def test_each_weight_is_what_its_library_makes_of_it(folder, file):
    weights, values = state_of(folder, file).weights, values_of(folder, file)
    truth = by_our_names({n.removeprefix("weight/"): v for n, v in values.items() if n.startswith("weight/")})
    assert len(truth) >= (2 if folder == "quant_flux_k_tiny" else 6)
    for name, expected in truth.items():
        assert isinstance(weights[name], StoredArray), name
        if dict(weights[name].stored.options).get("rotation"):
            np.testing.assert_allclose(weights[name], expected, rtol=0, atol=8e-8 * np.abs(expected).max())
        else:
            assert np.array_equal(weights[name], expected), name
    assert {name for name, array in weights.items() if isinstance(array, StoredArray)} >= truth.keys()


def network_in(folder, config):
    if folder != "quant_dit_tiny":
        return network_of(config_from_diffusers(read_json(GOLDEN / folder / "config.json", "test"), folder))
    hidden, depth, heads, patch, size, channels, classes = map(int, config)
    return network_of(
        DiTConfig(
            input_size=size, patch_size=patch, in_channels=channels, hidden_size=hidden, num_layers=depth,
            num_heads=heads, num_classes=classes,
        )
    )  # fmt: skip


def packed(folder, config, weights, adapter=None):
    """The network with the adapter, on a base that keeps the bits of the file."""
    network = network_in(folder, config)
    layers = dict(network.named_modules())
    linear = (name for name, array in weights.items() if array.ndim == 2 and as_stored(array) is not None)
    runtime.pack_weights(network, {n: "bf16" for n in linear if type(layers.get(n[:-7])).__name__ == "Linear"})
    for parameter in network.parameters():
        parameter.requires_grad = False
    if adapter is not None:
        add_lora(network, adapter.specs())
        weights = {**weights, **adapter.arrays()}
    runtime.load_arrays(network, weights)
    return network


@pytest.mark.parametrize(("folder", "file"), CASES)
def test_a_lora_step_over_the_bits_is_that_of_the_library(folder, file):
    weights, values = state_of(folder, file).weights, values_of(folder, file)
    with np.load(GOLDEN / folder / "inputs.npz") as npz:
        given = dict(npz)
    is_flux = folder != "quant_dit_tiny"
    source = GOLDEN / folder / ("lora" if is_flux else "lora.safetensors")
    layers = [name.removesuffix(".weight") for name, a in weights.items() if name.endswith(".weight") and a.ndim == 2]
    adapter = lora_files.read(source, layers)
    alpha = float(given["alpha"])  # (that of the DiT's file stands nowhere else)
    adapter = replace(adapter, layers={name: lora._replace(alpha=alpha) for name, lora in adapter.layers.items()})
    x = ops.tensor(given["x_t"])
    if is_flux:
        target = pack(ops.tensor(given["noise"] - given["latents"]))
        names = [name for name in ("timestep", "text", "pooled", "guidance") if name in given]
        rest = [ops.tensor(given[name].astype(np.float32)) for name in names]
        predict = lambda network: pack(network(x, *rest))  # noqa: E731
        kept = lambda output: output  # noqa: E731
    else:
        target = ops.tensor(given["x1"] - given["x0"])
        times, labels = ops.tensor(given["t"].astype(np.float32)), ops.tensor(given["y"])
        predict = lambda network: network(x, times, labels)  # noqa: E731
        kept = lambda output: output[:, : target.shape[1]]  # noqa: E731
    config = given.get("config")
    with ops.no_grad():
        base = ops.numpy(predict(packed(folder, config, weights)))
    network = packed(folder, config, weights, adapter)
    stored = [module.format for module in network.modules() if hasattr(module, "format")]
    assert len(stored) >= (6 if is_flux else 10)
    with ops.no_grad():
        output = ops.numpy(predict(network))

    def losses():
        return ops.mean_per_sample((kept(predict(network)) - target) ** 2)

    loss, gradients = optim.gradients(network, losses)
    for ours, name in ((base, "output_base"), (output, "output"), (loss, "loss")):
        assert np.linalg.norm(ours - values[name]) <= 5e-5 * np.linalg.norm(values[name]), name
    norms = {name.removeprefix("grad_norm/"): norm for name, norm in values.items() if name.startswith("grad_norm/")}
    assert len(norms) >= 16
    for name, norm in norms.items():
        assert abs(np.linalg.norm(gradients[name]) - norm) <= 5e-5 * norm, name
