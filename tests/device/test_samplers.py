"""Every sampler: the CPU's images, and steps that make the host wait for nothing."""

import dataclasses

import numpy as np
import pytest

from mindspeed_mm_dit.configs.model import DIFFUSION_CONFIGS
from mindspeed_mm_dit.models.registry import load_encoders
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.request import SampleRequest
from tests.device import counted
from tests.device.steps import Steps, narrow, on_the_cpu


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
