"""Section ``diffusion`` of model.json with ``model_id`` "mean_flow"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class MeanFlowConfig:
    """The average velocity from time t down to r, in one to four steps of sampling (Geng et al. 2025); t = 1 is noise.

    With ``omega`` and ``kappa`` guidance is part of what is learned, of the scale omega / (1 - kappa): sample without.
    """

    logit_mean: float = -0.4
    """Mean of the logit of the times; published as P_mean."""
    logit_std: float = 1.0
    """Standard deviation of the logit of the times; published as P_std."""
    data_proportion: float = 0.75
    """Probability that r = t: the sample learns the velocity at one time."""
    omega: float = 1.0
    """Weight of the sample's own velocity in the target."""
    kappa: float = 0.5
    """Weight of what the network says with the label; what is left to 1 has what it says without one."""
    t_start: float = 0.0
    """Times before it are not guided."""
    t_end: float = 1.0
    """Times after it are not guided."""
    norm_p: float = 1.0
    """Power p of the weight 1 / (error + c)^p of a sample; 0 for none."""
    norm_eps: float = 0.01
    """Its constant c, beside the squared error summed over a latent."""
    model_id: str = "mean_flow"
    """Key in OBJECTIVES."""

    kept_tensors = 8

    def __post_init__(self) -> None:
        for name, low, high in (
            ("logit_mean", -20.0, 20.0), ("logit_std", 1e-6, 20.0), ("data_proportion", 0.0, 1.0),
            ("omega", 0.0, 100.0), ("kappa", 0.0, 0.999), ("norm_p", 0.0, 4.0), ("norm_eps", 1e-12, 1e6),
        ):  # fmt: skip
            check_between(f"diffusion.{name}", getattr(self, name), low, high)
        if not 0.0 <= self.t_start <= self.t_end <= 1.0:
            raise ConfigError(
                f"diffusion.t_start = {self.t_start}, t_end = {self.t_end}", "must satisfy 0 <= t_start <= t_end <= 1"
            )

    @property
    def is_guided(self) -> bool:
        """Whether guidance is part of the target."""
        return (self.omega, self.kappa) != (1.0, 0.0)

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError unless a network puts out a velocity and no variance."""
        if out_channels != in_channels:
            raise ConfigError(
                f"predictor: {out_channels} channels of output",
                f"MeanFlow learns a velocity of each of the {in_channels} channels of a latent, and nothing else",
                "set predictor.learn_sigma to false",
            )

    def check_predictor(self, predictor: Any) -> None:
        """Raise ConfigError for a network that is told one time, or that does not know the null class where it must."""
        if predictor.times_told != 2:
            raise ConfigError(
                f"predictor {predictor.model_id!r}", "is told one time, and MeanFlow asks for an interval of them",
                "set predictor.h_embedder to true",
            )  # fmt: skip
        if predictor.conditions.items != ("label",):
            raise ConfigError(
                "diffusion.model_id = 'mean_flow'",
                f"is for labels alone, and predictor {predictor.model_id!r} is steered by "
                f"{' and '.join(predictor.conditions.items)}",
                "use flow_matching",
            )
        if self.is_guided and not predictor.conditions.has_null:
            raise ConfigError(
                f"diffusion.omega = {self.omega}, kappa = {self.kappa}",
                "guide with what the network says of the null class, which this one does not learn",
                "set predictor.class_dropout_prob to 0.1, or omega to 1 and kappa to 0",
            )
