"""The record's samplers are the chains of their names, asked with what they were given."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.objectives.wan_flow.objective import WAN_FLOW

START = np.random.default_rng(0).standard_normal((2, 1, 1, 2, 2)).astype(np.float32)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_a_sampler_walks_the_chain_of_its_name(framework, name):
    from mindspeed_mm_dit.objectives.wan_flow import samplers

    sampler, process, ops = WAN_FLOW.samplers[name], WAN_FLOW.build(WanFlowConfig()), framework.ops

    def ask(x, t, sigmas):
        return x * 0.5

    chain = {"euler": samplers.euler_chain, "unipc": samplers.unipc_chain}[name]
    wanted = [ops.numpy(x) for x in chain(process, ask, ops.tensor(START), 5)]
    found = [ops.numpy(x) for x in sampler.chain(process, ask, ops.tensor(START), None, 5, sampler.options())]
    assert len(found) == 5
    np.testing.assert_array_equal(found, wanted)


def test_the_two_samplers_are_not_one(framework):
    process, ops = WAN_FLOW.build(WanFlowConfig()), framework.ops

    def end(name):
        sampler = WAN_FLOW.samplers[name]
        *_, x = sampler.chain(process, lambda x, t, sigmas: x * x, ops.tensor(START), None, 5, sampler.options())
        return ops.numpy(x)

    assert np.abs(end("euler") - end("unipc")).max() > 1e-3
