"""The record's samplers are the chains of their names, asked with what they were given."""

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import WanFlowConfig
from mindspeed_mm_dit.objectives.wan_flow.objective import WAN_FLOW

START = np.random.default_rng(0).standard_normal((2, 1, 1, 2, 2)).astype(np.float32)


def test_samplers_walk_the_chains_of_their_names(framework):
    from mindspeed_mm_dit.objectives.wan_flow import process as wan_flow

    built, ops, ends = WAN_FLOW.build(WanFlowConfig()), framework.ops, []

    def model_fn(x, t, sigmas):
        return x * x

    for name, trajectory in (("euler", wan_flow.euler_trajectory), ("unipc", wan_flow.unipc_trajectory)):
        sampler = WAN_FLOW.samplers[name]
        wanted = [ops.numpy(x) for x in trajectory(built, model_fn, ops.tensor(START), 5)]
        found = [
            ops.numpy(x) for x in sampler.trajectory(built, model_fn, ops.tensor(START), None, 5, sampler.options())
        ]
        assert len(found) == 5
        np.testing.assert_array_equal(found, wanted)
        ends.append(found[-1])
    assert np.abs(ends[0] - ends[1]).max() > 1e-3
