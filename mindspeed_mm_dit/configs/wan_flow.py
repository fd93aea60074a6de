"""Section ``diffusion`` of model.json with ``model_id`` "wan_flow_match_scheduler"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError

MOST_TIMESTEPS = 1_000_000
"""Most rows of the table of training times."""


@dataclass(frozen=True)
class WanFlowConfig:
    """Flow matching as MindSpeed-MM trains Wan, with its keys and defaults; sigma = 0 is data, sigma = 1 is noise."""

    num_train_timesteps: int = 1000
    """T, the rows of the table that training times are sampled from, 3 to 1,000,000; the network gets the time
    T sigma."""
    shift: float = 3.0
    """Shift of training and sampling times, 0.001 to 1000; above 1 moves them towards noise (Esser et al. 2024,
    eq. 23). The tutorial has 5."""
    sigma_max: float = 1.0
    """First sigma of the table, before the shift, at most 1."""
    sigma_min: float = 0.003 / 1.002
    """Last sigma of the table, before the shift, at least 0 and below ``sigma_max``; the tutorial has 0."""
    extra_one_step: bool = False
    """Make the table one row longer and drop the last row, so that ``sigma_min`` itself is left out."""
    min_timestep_boundary: float = 0.0
    """Start of the rows to train on, as a fraction of the table, 0 to 1; rows run from noise to data."""
    max_timestep_boundary: float = 1.0
    """End of the rows to train on, as a fraction of the table, 0 to 1."""
    timestep_window: tuple[float, float] = (0.0, 1.0)
    """[low, high]: train at noise levels low <= sigma < high, and at 1 if the window ends there; numbers above 1 are
    times, up to T. One expert of Wan 2.2 has [0.875, 1], the other [0, 0.875]. Our own key."""
    timestep_per: Literal["sample", "micro_batch"] = "sample"
    """Sample a time for each sample, or one for the whole micro-batch as MindSpeed-MM does; then the micro-batch size
    changes training. Our own key, unknown to MindSpeed-MM."""
    model_id: str = "wan_flow_match_scheduler"
    """Kind of objective."""

    saved_tensors = 4
    """Number of float32 tensors of the size of a latent that the loss keeps for backward."""

    def __post_init__(self) -> None:
        check_between("diffusion.num_train_timesteps", self.num_train_timesteps, 3, MOST_TIMESTEPS)
        check_between("diffusion.shift", self.shift, 1e-3, 1e3)
        if not 0 <= self.sigma_min < self.sigma_max <= 1:
            raise ConfigError(
                f"diffusion.sigma_min = {self.sigma_min}, sigma_max = {self.sigma_max}",
                "must satisfy 0 <= sigma_min < sigma_max <= 1",
                "the tutorial has 0 and 1",
            )
        low, high = self.window
        if not 0 <= low < high <= 1:
            raise ConfigError(
                f"diffusion.timestep_window = {list(self.timestep_window)}",
                f"must be two noise levels 0 <= low < high <= 1, or times up to {self.num_train_timesteps}",
                "Wan 2.2's experts have [0.875, 1] and [0, 0.875]",
            )
        low, high = self.min_timestep_boundary, self.max_timestep_boundary
        first, end = self.trained_rows
        if 0 <= low < high <= 1 and first >= end and self.window != (0, 1):
            raise ConfigError(
                f"diffusion.timestep_window = {list(self.timestep_window)}",
                f"leaves none of {self.num_train_timesteps} timesteps to train on, between min_timestep_boundary = "
                f"{low} and max_timestep_boundary = {high}",
                "widen it",
            )
        if not (0 <= low < high <= 1 and first < end):
            raise ConfigError(
                f"diffusion.min_timestep_boundary = {low}, max_timestep_boundary = {high}",
                f"leave none of {self.num_train_timesteps} timesteps to train on: must satisfy 0 <= min < max <= 1",
                "leave both out to train on all",
            )

    @property
    def window(self) -> tuple[float, float]:
        """``timestep_window`` as noise levels."""
        low, high = self.timestep_window
        return (low, high) if high <= 1 else (low / self.num_train_timesteps, high / self.num_train_timesteps)

    @property
    def trained_rows(self) -> tuple[int, int]:
        """First row of the table to train on, and the one after the last."""
        return _trained_rows(self)

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError unless the network outputs exactly one velocity per channel of a latent."""
        if out_channels != in_channels:
            raise ConfigError(
                f"predictor: {out_channels} channels of output",
                f"the velocity has the {in_channels} channels of a latent",
                f"give the predictor {in_channels} output channels",
            )


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Move sigmas towards noise with ``shift`` > 1 (Esser et al. 2024, eq. 23); 0 and 1 stay."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def table_sigmas(config: WanFlowConfig, rows: int) -> np.ndarray:
    """Return MindSpeed-MM's table of ``rows`` sigmas, from noise to data, even before the shift, (rows,) float64."""
    even = np.linspace(config.sigma_max, config.sigma_min, rows + config.extra_one_step)[:rows]
    return shifted(even, config.shift)


@lru_cache(maxsize=16)
def _trained_rows(config: WanFlowConfig) -> tuple[int, int]:
    boundaries = (config.min_timestep_boundary, config.max_timestep_boundary)
    first, end = (int(boundary * config.num_train_timesteps) for boundary in boundaries)
    low, high = config.window
    if (low, high) == (0, 1):
        return first, end
    sigmas = table_sigmas(config, config.num_train_timesteps)
    above = 0 if high == 1 else int((sigmas >= high).sum())
    return max(first, above), min(end, int((sigmas >= low).sum()))
