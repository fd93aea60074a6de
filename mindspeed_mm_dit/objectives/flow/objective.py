"""Flow matching as an objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.contract import Ask, NoiseAt, NoOptions, Objective, Sampler, Tensor, option
from mindspeed_mm_dit.objectives.flow.diffusion_coefficient import DiffusionCoefficient
from mindspeed_mm_dit.objectives.flow.draws import draws, draws_at
from mindspeed_mm_dit.objectives.flow.timesteps import check_heun_end, sde_times


@dataclass(frozen=True)
class Tolerances:
    """Options of dopri5; --steps is the number of states it yields, however many steps it takes in between."""

    rtol: float = option(1e-3, "tolerated error of a step, relative to the state")
    atol: float = option(1e-6, "tolerated error of a step, absolute")

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            if not 1e-7 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"--{name} = {getattr(self, name)}", "must lie between 1e-7, which float32 keeps, and 1"
                )


def _build(config: FlowMatchingConfig) -> Any:
    from mindspeed_mm_dit.objectives.flow.process import FlowMatching

    return FlowMatching(config)


def _ode(name: str) -> Sampler:
    def chain(
        process: Any, ask: Ask, start: Tensor, noise_at: NoiseAt, steps: int, options: NoOptions
    ) -> Iterator[Tensor]:
        from mindspeed_mm_dit.objectives.flow.samplers import ode_chain

        return ode_chain(name, process, ask, start, steps)

    return Sampler(chain, NoOptions)


def _dopri5(
    process: Any, ask: Ask, start: Tensor, noise_at: NoiseAt, steps: int, options: Tolerances
) -> Iterator[Tensor]:
    from mindspeed_mm_dit.objectives.flow.samplers import dopri5_chain

    return dopri5_chain(process, ask, start, steps, options.rtol, options.atol)


def _sde(name: str) -> Sampler:
    def chain(
        process: Any, ask: Ask, start: Tensor, noise_at: NoiseAt, steps: int, options: DiffusionCoefficient
    ) -> Iterator[Tensor]:
        from mindspeed_mm_dit.objectives.flow.samplers import sde_chain

        return sde_chain(name, process, ask, start, noise_at, steps, options)

    def check(config: FlowMatchingConfig, steps: int, options: DiffusionCoefficient) -> None:
        times = sde_times(config, steps, options)
        if name == "sde-heun":
            check_heun_end(config, times, options)

    return Sampler(chain, DiffusionCoefficient, check)


FLOW_MATCHING = Objective(
    FlowMatchingConfig,
    _build,
    draws,
    draws_at,
    {
        "sde-euler": _sde("sde-euler"),
        "sde-heun": _sde("sde-heun"),
        "euler": _ode("euler"),
        "heun": _ode("heun"),
        "dopri5": Sampler(_dopri5, Tolerances),
    },
    quick_sampler="heun",
)
