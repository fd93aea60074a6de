"""Wan's flow matching as an objective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig
from mindspeed_mm_dit.objectives.contract import Ask, NoiseAt, NoOptions, Objective, Sampler, Tensor
from mindspeed_mm_dit.objectives.wan_flow.draws import draws, draws_at


def _build(config: WanFlowConfig) -> Any:
    from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow

    return WanFlow(config)


def _sampler(name: str) -> Sampler:
    def chain(
        process: Any, ask: Ask, start: Tensor, noise_at: NoiseAt, steps: int, options: NoOptions
    ) -> Iterator[Tensor]:
        from mindspeed_mm_dit.objectives.wan_flow import samplers

        walk = samplers.euler_chain if name == "euler" else samplers.unipc_chain
        return walk(process, ask, start, steps)

    return Sampler(chain, NoOptions)


WAN_FLOW = Objective(
    WanFlowConfig, _build, draws, draws_at, {name: _sampler(name) for name in ("euler", "unipc")}, quick_sampler="unipc"
)
