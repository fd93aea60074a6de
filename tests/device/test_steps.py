"""A step of every embedded config, and every sampler: the CPU's numbers, and no wait of the host."""

import dataclasses
import gc

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.fsdp2 import FLOAT32
from mindspeed_mm_dit.configs.model import DIFFUSION_CONFIGS, load_model_config
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import load_encoders
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.planning import Placement, memory
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.request import SampleRequest
from tests.conftest import ROOT
from tests.device import counted
from tests.device.steps import Steps, narrow, on_the_cpu

EXAMPLES = ROOT / "examples/dit"
CONFIGS = sorted(str(path.parent.relative_to(EXAMPLES)) for path in EXAMPLES.glob("**/model.json"))
OPERATORS = {"imagenet256": 1781, "t2v_custom": 3330, "wan2.1_1.3b": 3390}
"""Operators of a step of DiT-XL/2, CustomDiT and Wan 1.3B (docs/scaling.md); fewer are welcome."""


@pytest.mark.parametrize("config", CONFIGS)
def test_step_needs_the_memory_of_the_plan(config):
    """Two micro-batches; the plan has the gradients beside all activations, which meet in the second."""
    model, samples = load_model_config(EXAMPLES / config / "model.json"), 8
    if parameters_of(model).num_elements() > 1e7:
        model = narrow(config)
        samples = max(1, 128 // model.predictor.num_tokens)
    planned = memory(model, Placement(precision=FLOAT32), online_vae=False).total(samples)
    if counted.KIND == "cuda":
        Steps(model, samples=1).step()  # (its products keep 32 MiB in each thread that asks for them)
    gc.collect()
    before = counted.counts()["device_bytes"]
    steps = Steps(model, samples=samples, micro_batches=2)
    steps.step()
    counted.reset()
    steps.step()
    assert (counted.counts()["most_device_bytes"] - before) / planned == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("config", CONFIGS)
def test_step_is_that_of_the_cpu_and_waits_for_nothing(config):
    there = Steps(narrow(config))
    there.step()
    counted.reset()
    loss = there.step()
    found = counted.counts()
    assert (found["waits"], found["bytes_to_host"]) == (0, 0), found["waited_at"]
    assert sum(found["operators"].values()) <= OPERATORS.get(config, 10_000), found["operators"]
    counted.reset()
    losses = there.validate()
    assert counted.counts()["waits"] == 0
    with on_the_cpu():
        here = Steps(narrow(config))
        here.step()
        expected, whole = here.step(), here.validate()
    torch.testing.assert_close(loss.cpu(), expected, rtol=counted.CLOSE, atol=0)
    torch.testing.assert_close(losses.cpu(), whole, rtol=2 * counted.CLOSE, atol=counted.CLOSE)
    torch.testing.assert_close(there.weights(), here.weights(), rtol=counted.LOOSE, atol=counted.CLOSE)


def model_of(diffusion):
    if diffusion == "gaussian_diffusion":
        return narrow(".")
    config = narrow("digits_meanflow" if diffusion == "mean_flow" else "digits_flow")
    return dataclasses.replace(config, diffusion=DIFFUSION_CONFIGS[diffusion]())


SAMPLERS = [
    (name, sampler) for name in DIFFUSION_CONFIGS for sampler in objective_of(DIFFUSION_CONFIGS[name]()).samplers
]
ADAPTIVE = ("dopri5",)
"""The host reads the error of a step to choose the next one."""


def drawn(config, sampler, steps):
    from mindspeed_mm_dit.sampling.generate import generate, with_defaults

    model = Steps(config).engine.model
    model.ae, _ = load_encoders(config, True)
    counted.reset()
    request = with_defaults(SampleRequest(sampler=sampler, steps=steps, guidance=1.5, channels="all"), config)
    return generate(model, config, SampleConditions({"label": np.array([3, 7])}), request)


@pytest.mark.parametrize(("diffusion", "sampler"), SAMPLERS)
def test_sampler_draws_what_it_draws_on_the_cpu(diffusion, sampler):
    config, found = model_of(diffusion), {}
    for steps in (4, 8):
        images = drawn(config, sampler, steps)
        found[steps] = counted.counts()
    if sampler not in ADAPTIVE:
        assert found[8]["waits"] == found[4]["waits"], found[8]["waited_at"]
    with on_the_cpu():
        expected = drawn(config, sampler, 8)
    assert np.abs(images.astype(int) - expected).max() <= 1 and np.ptp(expected) > 0
