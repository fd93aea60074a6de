"""Section ``diffusion`` of model.json with ``model_id`` "gaussian_diffusion"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError

MOST_TIMESTEPS = 1_000_000
"""Most steps of a diffusion chain: float64 tables of this length take 0.1 GB, and seconds to make."""


@dataclass(frozen=True)
class GaussianDiffusionConfig:
    """Section ``diffusion`` with ``model_id`` "gaussian_diffusion"."""

    num_train_timesteps: int = 1000
    """Number T of diffusion steps that the network is trained on, 2 to 1,000,000; more than 20 with "linear"."""
    noise_schedule: Literal["linear", "squaredcos_cap_v2"] = "linear"
    """Noise schedule: linear betas (Ho et al. 2020) or squared cosine (Nichol & Dhariwal 2021)."""
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    """What the network predicts: the noise, x_0, or v (Salimans & Ho 2022)."""
    variance_type: Literal["learned_range", "fixed_small", "fixed_large"] = "learned_range"
    """Variance of p(x_{t-1} | x_t): interpolated by the network (needs the predictor's ``learn_sigma``), or one of Ho
    et al.'s two constants."""
    model_id: str = "gaussian_diffusion"
    """Kind of objective."""

    def __post_init__(self) -> None:
        cure = "the published DiT has 1000"
        check_between("diffusion.num_train_timesteps", self.num_train_timesteps, 2, MOST_TIMESTEPS, cure)
        if self.noise_schedule == "linear" and self.num_train_timesteps <= 20:
            raise ConfigError(
                f"diffusion.num_train_timesteps = {self.num_train_timesteps}",
                f"the linear schedule would end at beta = 20 / {self.num_train_timesteps}, which must be below 1",
                "use more than 20, or noise_schedule squaredcos_cap_v2",
            )

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError unless ``out_channels`` is ``in_channels``, or twice as many if the variance is learned."""
        learned = self.variance_type == "learned_range"
        needed = in_channels * (2 if learned else 1)
        if out_channels != needed:
            raise ConfigError(
                f"diffusion.variance_type = {self.variance_type}",
                f"does not fit a network of {out_channels} output channels: it needs {needed}, {in_channels} for noise"
                + (" and as many for variances" if learned else ""),
                "'learned_range' goes with a DiT's learn_sigma true, 'fixed_small' and 'fixed_large' with false",
            )

    @property
    def saved_tensors(self) -> int:
        """Number of float32 tensors of the size of a latent that the loss keeps for backward."""
        return 24 if self.variance_type == "learned_range" else 4
