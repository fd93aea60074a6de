"""The record's samplers are the chains of their names, asked with what they were given."""

import numpy as np

from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.objectives.wan_flow.objective import WAN_FLOW

START = np.random.default_rng(0).standard_normal((2, 1, 1, 2, 2)).astype(np.float32)


def test_samplers_walk_the_chains_of_their_names(framework):
    from mindspeed_mm_dit.objectives.wan_flow import samplers

    process, ops, ends = WAN_FLOW.build(WanFlowConfig()), framework.ops, []

    def ask(x, t, sigmas):
        return x * x

    for name, chain in (("euler", samplers.euler_chain), ("unipc", samplers.unipc_chain)):
        sampler = WAN_FLOW.samplers[name]
        wanted = [ops.numpy(x) for x in chain(process, ask, ops.tensor(START), 5)]
        found = [ops.numpy(x) for x in sampler.chain(process, ask, ops.tensor(START), None, 5, sampler.options())]
        assert len(found) == 5
        np.testing.assert_array_equal(found, wanted)
        ends.append(found[-1])
    assert np.abs(ends[0] - ends[1]).max() > 1e-3
