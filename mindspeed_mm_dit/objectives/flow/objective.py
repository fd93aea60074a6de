"""Flow matching as an objective."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework.contract import lazy_module
from mindspeed_mm_dit.objectives.flow.path import DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.timesteps import check_heun_end, draws, draws_at, sde_times
from mindspeed_mm_dit.objectives.registry import Objective, Sampler, option, without_noise

_process = lazy_module("mindspeed_mm_dit.objectives.flow.process")
_samplers = lazy_module("mindspeed_mm_dit.objectives.flow.samplers")


@dataclass(frozen=True)
class Tolerances:
    """Options of dopri5; --steps is the number of states it yields, not of the steps in between."""

    rtol: float = option(1e-3, "tolerated error of a step, relative to the state")
    atol: float = option(1e-6, "tolerated error of a step, absolute")

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            if not 1e-7 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"--{name} = {getattr(self, name)} must lie between 1e-7, which float32 keeps, and 1."
                )


def _sde(name: str) -> Sampler:
    def check(config: FlowMatchingConfig, steps: int, options: DiffusionCoefficient) -> None:
        times = sde_times(config, steps, options)
        if name == "sde-heun":
            check_heun_end(config, times, options)

    return Sampler(lambda *args: _samplers.sde_trajectory(name, *args), DiffusionCoefficient, check)


FLOW_MATCHING = Objective(
    FlowMatchingConfig,
    lambda config: _process.FlowMatching(config),
    draws,
    draws_at,
    {
        "sde-euler": _sde("sde-euler"),
        "sde-heun": _sde("sde-heun"),
        "euler": without_noise(lambda *args: _samplers.ode_trajectory("euler", *args)),
        "heun": without_noise(lambda *args: _samplers.ode_trajectory("heun", *args)),
        "dopri5": Sampler(
            lambda process, model_fn, start, _, steps, options: _samplers.dopri5_trajectory(
                process, model_fn, start, steps, options.rtol, options.atol
            ),
            Tolerances,
        ),
    },
    quick_sampler="heun",
)
