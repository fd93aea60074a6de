"""The first tensor of a step that is not finite is named, by module and sample, and nothing moves for being watched."""

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.pytorch.step_record import NotFinite, Probe


@pytest.fixture
def network(model_json):
    model_json["predictor"].update(hidden_size=32, num_layers=3, num_heads=2)
    config = model_config_from_mapping(model_json, "model.json").predictor
    network, generator = DiT(config), np.random.default_rng(0)
    arrays = initial_weights(parameters_of(config), 0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():  # (adaLN-zero's zeros would hide what blocks compute)
            parameter.copy_(torch.from_numpy(arrays[name] + 0.02 * generator.standard_normal(arrays[name].shape)))
    return network


def step(network, x=None, scale=lambda output: output):
    """Take a forward and a backward pass on three samples; return output and a gradient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 8, 8, generator=generator) if x is None else x
    output = network(x, torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]))
    scale(output).sum().backward()
    return output.detach(), network.x_embedder.proj.weight.grad.clone()


def found(network, **given):
    probe = Probe(network)
    probe.begin()
    probe.micro_batch = 0
    step(network, **given)
    return probe.not_finite


def test_probe_changes_no_number_and_keeps_the_largest(network):
    without = step(network)
    network.zero_grad()
    probe, optimizer_rounding = Probe(network), {}
    network.blocks[1].mlp.register_forward_hook(lambda module, inputs, output: optimizer_rounding.update(mlp=output))
    probe.begin()
    for there, here in zip(without, step(network)):
        assert torch.equal(there, here)
    assert probe.not_finite is None and probe.largest["blocks.1.mlp"] == optimizer_rounding["mlp"].abs().max().item()


def test_module_that_overflows_is_named(network):
    with torch.no_grad():
        network.blocks[1].attn.qkv.weight.fill_(1e30)  # its products are finite, and their squares are not
    assert found(network) == NotFinite("blocks.1.attn.proj", "output", 0, (0, 1, 2))


def test_inputs_and_losses_not_finite_are_named_by_sample(network):
    x = torch.ones(3, 1, 8, 8)
    x[1, 0, 5, 5] = torch.nan
    assert found(network, x=x) == NotFinite("", "input x_t", 0, (1,))
    probe = Probe(network)
    probe.begin()
    probe.micro_batch = 2
    probe.loss(torch.tensor([1.0, torch.inf, 2.0]))
    assert probe.not_finite == NotFinite("", "loss", 2, (1,))


def test_parameters_and_gradients_that_are_not_finite_are_named(network):
    def steep(x):  # zero, with a derivative of 1e60
        return (x - x.detach()) * 1e30 * 1e30

    bias = network.final_layer.linear.bias
    of_a_parameter = found(network, scale=lambda output: output.sum() + steep(bias).sum())
    assert of_a_parameter == NotFinite("final_layer.linear", "gradient of parameter bias", 0, ())
    assert found(network, scale=steep) == NotFinite("", "gradient of output", 0, (0, 1, 2))
    with torch.no_grad():
        network.blocks[2].mlp.fc2.bias[3] = torch.inf
    assert found(network) == NotFinite("blocks.2.mlp.fc2", "parameter bias", -1, ())
