"""Section ``diffusion`` of model.json with ``model_id`` "mean_flow"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError


@dataclass(frozen=True)
class MeanFlowConfig:
    """MeanFlow: learn the average velocity from time t down to r, to sample in one to four steps (Geng et al. 2025).

    t = 1 is noise. ``omega`` and ``kappa`` build guidance of scale omega / (1 - kappa) into what is learned, so sample
    without guidance.
    """

    logit_mean: float = -0.4
    """Mean of the logit of the times, -20 to 20; published as P_mean."""
    logit_std: float = 1.0
    """Standard deviation of the logit of the times, 1e-6 to 20; published as P_std."""
    data_proportion: float = 0.75
    """Probability that r = t, where the target is the velocity at a single time."""
    omega: float = 1.0
    """Weight of the sample's own velocity in the target, 0 to 100."""
    kappa: float = 0.5
    """Weight in the target of the network's prediction with the label, 0 to 0.999. The prediction without a label gets
    the rest, up to a total of 1."""
    t_start: float = 0.0
    """Times before this have no guidance; 0 to 1."""
    t_end: float = 1.0
    """Times after this have no guidance; 0 to 1."""
    norm_p: float = 1.0
    """Power p of a sample's weight 1 / (error + c)^p, 0 to 4; 0 for no weighting."""
    norm_eps: float = 0.01
    """Constant c of that weight, added to the squared error summed over a latent; 1e-12 to 1e6."""
    model_id: str = "mean_flow"
    """Kind of objective."""

    saved_tensors = 8

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
        """Raise ConfigError unless the network outputs a velocity and no variance."""
        if out_channels != in_channels:
            raise ConfigError(
                f"predictor: {out_channels} channels of output",
                f"MeanFlow learns only a velocity for each of the {in_channels} channels of a latent",
                "set predictor.learn_sigma to false",
            )

    def check_predictor(self, predictor: Any) -> None:
        """Raise ConfigError for a network that takes one timestep, or lacks the unconditional class guidance needs."""
        if predictor.num_time_inputs != 2:
            raise ConfigError(
                f"predictor {predictor.model_id!r}",
                "takes one timestep; MeanFlow needs two, r and t",
                "set predictor.h_embedder to true",
            )
        if predictor.conditions.items != ("label",):
            raise ConfigError(
                "diffusion.model_id = 'mean_flow'",
                f"only supports labels, but predictor {predictor.model_id!r} is conditioned on "
                f"{' and '.join(predictor.conditions.items)}",
                "use flow_matching",
            )
        if self.is_guided and not predictor.conditions.has_unconditional:
            raise ConfigError(
                f"diffusion.omega = {self.omega}, kappa = {self.kappa}",
                "need the prediction for the unconditional class, which this network does not learn",
                "set predictor.class_dropout_prob to 0.1, or omega to 1 and kappa to 0",
            )
