"""Wan's flow matching as an objective."""

from __future__ import annotations

from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.framework.lazy_imports import later
from mindspeed_mm_dit.objectives.contract import Objective, without_noise
from mindspeed_mm_dit.objectives.wan_flow.draws import draws, draws_at

_process = later("mindspeed_mm_dit.objectives.wan_flow.process")
_samplers = later("mindspeed_mm_dit.objectives.wan_flow.samplers")

WAN_FLOW = Objective(
    WanFlowConfig,
    lambda config: _process.WanFlow(config),
    draws,
    draws_at,
    {
        "euler": without_noise(lambda *args: _samplers.euler_trajectory(*args)),
        "unipc": without_noise(lambda *args: _samplers.unipc_trajectory(*args)),
    },
    quick_sampler="unipc",
)
