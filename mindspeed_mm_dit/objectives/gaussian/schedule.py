"""Noise schedules and the tables made from them, in float64 NumPy. No framework."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from mindspeed_mm_dit.errors import ConfigError


def make_betas(noise_schedule: str, num_train_timesteps: int) -> np.ndarray:
    """Return beta_t for t = 0 ... T-1, (T,) float64.

    "linear": Ho et al. 2020, section 4, scaled so that any T ends at the same noise.
    "squaredcos_cap_v2": Nichol & Dhariwal 2021, eq. 17, capped at 0.999.
    """
    if noise_schedule == "linear":
        scale = 1000 / num_train_timesteps
        return np.linspace(scale * 1e-4, scale * 0.02, num_train_timesteps, dtype=np.float64)
    if noise_schedule == "squaredcos_cap_v2":
        alpha_bar = [
            math.cos((step / num_train_timesteps + 0.008) / 1.008 * math.pi / 2) ** 2
            for step in range(num_train_timesteps + 1)
        ]
        return np.array([min(1 - after / before, 0.999) for before, after in pairwise(alpha_bar)])
    raise ConfigError(f"diffusion.noise_schedule = {noise_schedule!r} is unknown. Use linear or squaredcos_cap_v2.")


@dataclass(frozen=True)
class Schedule:
    """A chain of S diffusion steps and the tables derived from it; every table is (S,) float64.

    A chain over all T training steps has ``timestep_map`` 0 ... T-1; :meth:`respaced` makes shorter ones.
    """

    betas: np.ndarray
    """Variance added in each step."""
    timestep_map: np.ndarray
    """(S,) int64: the training timestep that the network gets at each step."""

    @classmethod
    def create(cls, noise_schedule: str, num_train_timesteps: int) -> Schedule:
        """Return the full chain of ``num_train_timesteps`` steps."""
        return cls(make_betas(noise_schedule, num_train_timesteps), np.arange(num_train_timesteps))

    def respaced(self, steps: np.ndarray) -> Schedule:
        """Return the chain that visits only ``steps`` (ascending) with the same marginals (Nichol & Dhariwal, 4)."""
        alphas_cumprod = self.alphas_cumprod[steps]
        before = np.append(1.0, alphas_cumprod[:-1])
        return Schedule(1 - alphas_cumprod / before, self.timestep_map[steps])

    def __len__(self) -> int:
        return len(self.betas)

    @cached_property
    def alphas_cumprod(self) -> np.ndarray:
        """Product of (1 - beta) up to and including t: alpha-bar_t."""
        return np.cumprod(1.0 - self.betas)

    @cached_property
    def alphas_cumprod_prev(self) -> np.ndarray:
        """alpha-bar_{t-1}, with 1 before the first step."""
        return np.append(1.0, self.alphas_cumprod[:-1])

    @cached_property
    def sqrt_alphas_cumprod(self) -> np.ndarray:
        """Signal scale of x_t."""
        return np.sqrt(self.alphas_cumprod)

    @cached_property
    def sqrt_one_minus_alphas_cumprod(self) -> np.ndarray:
        """Noise scale of x_t."""
        return np.sqrt(1.0 - self.alphas_cumprod)

    @cached_property
    def sqrt_recip_alphas_cumprod(self) -> np.ndarray:
        """1 / sqrt(alpha-bar_t)."""
        return np.sqrt(1.0 / self.alphas_cumprod)

    @cached_property
    def sqrt_recipm1_alphas_cumprod(self) -> np.ndarray:
        """sqrt(1 / alpha-bar_t - 1)."""
        return np.sqrt(1.0 / self.alphas_cumprod - 1.0)

    @cached_property
    def posterior_variance(self) -> np.ndarray:
        """Variance of q(x_{t-1} | x_t, x_0) (Ho et al. 2020, eq. 7)."""
        return self.betas * (1.0 - self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)

    @cached_property
    def posterior_log_variance_clipped(self) -> np.ndarray:
        """Logarithm of the posterior variance; the first entry, which would be log 0, repeats the second."""
        variance = self.posterior_variance
        return np.log(np.append(variance[1], variance[1:]) if len(variance) > 1 else self.betas)

    @cached_property
    def log_betas(self) -> np.ndarray:
        """Logarithm of beta, the upper bound of a learned variance."""
        return np.log(self.betas)

    @cached_property
    def fixed_large_log_variance(self) -> np.ndarray:
        """Logarithm of the fixed variance beta, with the posterior's second entry in place of the first."""
        variance = np.append(self.posterior_variance[1], self.betas[1:]) if len(self) > 1 else self.betas
        return np.log(variance)

    @cached_property
    def posterior_mean_coef1(self) -> np.ndarray:
        """Weight of x_0 in the mean of q(x_{t-1} | x_t, x_0) (Ho et al. 2020, eq. 7)."""
        return self.betas * np.sqrt(self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)

    @cached_property
    def posterior_mean_coef2(self) -> np.ndarray:
        """Weight of x_t in the same mean."""
        return (1.0 - self.alphas_cumprod_prev) * np.sqrt(1.0 - self.betas) / (1.0 - self.alphas_cumprod)

    def solution_weights(self, index: int) -> tuple[float, float, float]:
        """Solve the probability-flow ODE from step ``index`` to the one before it for a constant x_0.

        Returns (keep, gain, h) of x_{t-1} = keep x_t + gain x_0, with h the growth of the half log-SNR
        lambda = log(alpha / sigma) (Lu et al. 2022, eq. 9); h is infinite for the step to clean latents.
        """
        here, after = self.alphas_cumprod[index], self.alphas_cumprod_prev[index]
        alpha, sigma = math.sqrt(after), math.sqrt(1.0 - after)
        keep = sigma / math.sqrt(1.0 - here)
        gain = alpha - keep * math.sqrt(here)
        growth = after * (1.0 - here) / (here * (1.0 - after)) if after < 1.0 else math.inf
        return keep, gain, 0.5 * math.log(growth)


def respaced_steps(num_train_timesteps: int, respacing: str) -> np.ndarray:
    """Choose the timesteps of a shorter chain, ascending, (S,) int64.

    respacing: "ddim50" takes every k-th timestep from the first, with the whole number k that gives 50 (Song et
    al. 2021). "250" takes 250 evenly spaced ones from first to last. "10,20,30" cuts the chain into three equal
    sections and takes 10, 20 and 30 of them (Nichol & Dhariwal 2021, section 4).
    Raises ConfigError if no such chain exists.
    """
    counts = respacing.removeprefix("ddim").split(",")
    if not all(count.isdigit() and int(count) > 0 for count in counts):
        raise ConfigError(f"respacing = {respacing!r} has an unknown format. Write 250, ddim50 or 10,20,30.")
    if respacing.startswith("ddim"):
        return _strided(num_train_timesteps, int(counts[0]))
    sections = np.array_split(np.arange(num_train_timesteps), len(counts))
    return np.concatenate([_evenly(section, int(count)) for section, count in zip(sections, counts)])


def _strided(num_train_timesteps: int, steps: int) -> np.ndarray:
    _check_at_most(num_train_timesteps, steps)
    for stride in range(1, num_train_timesteps + 1):
        chosen = np.arange(0, num_train_timesteps, stride)
        if len(chosen) == steps:
            return chosen
    raise ConfigError(
        f"--steps = {steps} is not possible: no whole stride visits {steps} of {num_train_timesteps} timesteps. Use a "
        f"divisor of {num_train_timesteps}, or the ddpm sampler."
    )


def _check_at_most(timesteps: int, steps: int) -> None:
    if steps > timesteps:
        raise ConfigError(f"--steps = {steps} is more than the {timesteps} timesteps there are. Use fewer.")


def _evenly(section: np.ndarray, steps: int) -> np.ndarray:
    _check_at_most(len(section), steps)
    stride = (len(section) - 1) / (steps - 1) if steps > 1 else 1.0
    positions, position = [], 0.0
    for _ in range(steps):  # summed, not multiplied, to round as published
        positions.append(round(position))
        position += stride
    return section[positions]
