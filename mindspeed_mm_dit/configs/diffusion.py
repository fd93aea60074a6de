"""Section ``diffusion`` of model.json: Gaussian diffusion, flow matching, MeanFlow, and flow matching as trains Wan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np

from mindspeed_mm_dit.configs.limits import Between, Positive, Probability, Section
from mindspeed_mm_dit.errors import ConfigError, nearest

SCHEDULES = ("flux", "flux2", "qwen_image", "sd3", "sd3_dynamic")
"""The published tables of sampling times (``objectives/flow/timesteps.py``)."""
PathName = Literal["linear", "gvp", "vp"]
PredictionType = Literal["velocity", "noise", "score", "data"]
LossWeight = Literal["velocity", "likelihood", "sigma_sqrt", "cosmap", "data"]
SIT_WEIGHTS = ("velocity", "likelihood")
_WEIGHTS = {"velocity": ("sigma_sqrt", "cosmap", "data"), "data": ()}
"""Loss weights that each prediction allows; noise and score allow the two of SiT."""
_MU = {"flux": (4096, 1.15), "qwen_image": (8192, 0.9)}
"""Name -> tokens of an image, and the logarithm of its shift; it is 0.5 at 256 tokens, on a line."""
MAX_TIMESTEPS = 1_000_000
"""Most steps of a chain, and rows of a table of times: float64 tables of this length take 0.1 GB and seconds."""
_MIN_EPS = 1e-6
"""Smallest distance from the ends of the times; float32 resolves it with some margin."""

# Beyond these bounds float32 rounds all times to the ends, or noise or data is negligible next to the other.
_ENDS = "Beyond that, all times would be at one end."
LogitMean = Annotated[float, Between(-20.0, 20.0, _ENDS)]
LogitStd = Annotated[float, Between(1e-6, 20.0, _ENDS)]
Shift = Annotated[float, Between(1e-4, 1e4, _ENDS)]
_Eps = Annotated[float, Between(0, 0.5, "The published value is null.", below=True)]


@dataclass(frozen=True)
class GaussianDiffusionConfig(Section):
    """Section ``diffusion`` with ``model_id`` "gaussian_diffusion"."""

    num_train_timesteps: Annotated[int, Between(2, MAX_TIMESTEPS, "The published DiT has 1000.")] = 1000
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

    section = "diffusion"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_schedule == "linear" and (steps := self.num_train_timesteps) <= 20:
            raise self.error(
                "num_train_timesteps",
                f"is too few for the linear schedule, which would end at beta = 20 / {steps} and must stay below 1. "
                "Use more than 20, or noise_schedule squaredcos_cap_v2.",
            )

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError unless ``out_channels`` is ``in_channels``, or twice as many if the variance is learned."""
        learned = self.variance_type == "learned_range"
        needed = in_channels * (2 if learned else 1)
        if out_channels != needed:
            parts = f" ({in_channels} for noise, and as many for variances)" if learned else ""
            raise self.error(
                "variance_type",
                f"needs {needed} output channels{parts}, but the network has {out_channels}. 'learned_range' goes with "
                "a DiT's learn_sigma true, 'fixed_small' and 'fixed_large' with false.",
            )

    @property
    def saved_tensors(self) -> int:
        """Number of float32 tensors of the size of a latent that the loss keeps for backward."""
        return 24 if self.variance_type == "learned_range" else 4


@dataclass(frozen=True)
class FlowMatchingConfig(Section):
    """Section ``diffusion`` with ``model_id`` "flow_matching" (Ma et al. 2024).

    t = 0 is noise and t = 1 is data. Only the time that the network sees is reversed with ``data_time`` 0.
    """

    path: PathName = "linear"
    """How data and noise are mixed: linearly, variance-preserving by sine and cosine ("gvp"), or score SDE's VP."""
    prediction_type: PredictionType = "velocity"
    """What the network predicts: dx/dt, the noise, the score, or the data. With "data" the loss is that of the velocity
    that the prediction implies (JiT; Li & He 2025)."""
    loss_weight: LossWeight | None = None
    """Weight of the squared error: null for 1, or one of the published weights. For noise and score: "velocity" or
    "likelihood" (SiT). For a velocity, as in diffusers' training scripts: "sigma_sqrt" (sigma^-2), "cosmap" (Esser et
    al. 2024), or "data" (sigma^2), which is the error of the data that the velocity implies. Must be null for data."""
    data_time: Literal[0, 1] = 1
    """Time of clean data as the network sees it. 1: its velocity points from noise at 0 to data at 1. 0: it points from
    data at 0 to noise at 1 (REPA; Yu et al. 2024)."""
    t_eps: Annotated[float, Between(_MIN_EPS, 1.0)] = 0.05
    """With prediction_type "data": lower bound of 1 - t, by which the prediction is divided to get a velocity, in
    training and in sampling. 1e-6 to 1."""
    noise_scale: Annotated[float, Between(1e-3, 1e3)] = 1.0
    """Standard deviation of the noise, in training and in sampling; above 1 for large images (JiT). 0.001 to 1000."""
    cosine_loss: bool = False
    """Add 1 - cos of the angle between predicted and true velocity, over channels, to the squared error (LightningDiT;
    Yao & Wang 2025)."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """Distribution of the training times: uniform as published, logit-normal, or with heavy tails ("mode"; Esser et
    al. 2024, eqs. 19 and 20)."""
    logit_mean: LogitMean = 0.0
    """Mean of the logit of t with "logit_normal", -20 to 20; above 0 times are nearer to the data."""
    logit_std: LogitStd = 1.0
    """Standard deviation of the logit of t with "logit_normal", 1e-6 to 20."""
    mode_scale: Annotated[float, Between(-1.0, 1.75)] = 1.29
    """With "mode": from -1 to 1.75; above 0 times are nearer to the middle, below to the ends."""
    shift: Shift = 1.0
    """Shift of training and sampling times; above 1 moves them towards noise (Esser et al. 2024, eq. 23). 0.0001 to
    10000."""
    shift_base: Positive | None = None
    """Elements C H W of a latent for which the shift is 1. The shift is then sqrt(C H W / shift_base), so it grows with
    the number of tokens (Esser et al. 2024, section 5.3.2; RAE has 4096). null: use ``shift``."""
    dynamic_shift: Literal["flux", "qwen_image"] | None = None
    """Shift by the number of tokens (2 x 2 latent pixels) of each image, as FLUX.1 and SD3 ("flux") or Qwen-Image are
    sampled: e^mu, with mu on a line from 0.5 at 256 tokens to 1.15 at 4,096, or 0.9 at 8,192. null: use ``shift``."""
    sample_shift: Shift | None = None
    """Shift of the sampling times, 0.0001 to 10000; null: that of training. LightningDiT trains with 1 and samples with
    1 / 0.3."""
    sample_schedule: str | None = None
    """Published sampling times: "flux", "flux2", "qwen_image", "sd3" or "sd3_dynamic" (for shapes that differ); "sd3"
    uses the shift, the others have their own. null: even times, shifted."""
    train_eps: _Eps | None = None
    """Distance of the training times from the singular ends of the path, in [0, 0.5); null: as published."""
    sample_eps: _Eps | None = None
    """Distance of the sampling times from the singular ends of the path, in [0, 0.5); null: as published."""
    model_id: str = "flow_matching"
    """Kind of objective."""

    section = "diffusion"
    saved_tensors = 6
    """Number of float32 tensors of the size of a latent that the loss keeps for backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_weight()
        if self.prediction_type == "data" and self.path != "linear":
            raise self.error("prediction_type", f"needs path 'linear', not {self.path!r}. Set path to 'linear'.")
        if self.cosine_loss and self.prediction_type != "velocity":
            raise self.error(
                "cosine_loss",
                f"compares velocities, but prediction_type is {self.prediction_type!r}. Predict 'velocity', or drop "
                "it.",
            )
        if (name := self.sample_schedule) is not None:
            if name not in SCHEDULES:
                raise self.error(
                    "sample_schedule",
                    f"is not a published table of times. {nearest(name, SCHEDULES)}Use one of {', '.join(SCHEDULES)}.",
                )
            if (self.path, self.prediction_type) != ("linear", "velocity"):
                raise self.error("sample_schedule", "needs path 'linear' and prediction_type 'velocity'. Drop it.")
        shifts = {"shift": self.shift != 1, "shift_base": self.shift_base, "dynamic_shift": self.dynamic_shift}
        first, *others = [name for name, is_set in shifts.items() if is_set] or [""]
        if others:
            raise self.error(first, f"contradicts {others[0]} = {getattr(self, others[0])}. Drop one of them.")
        self._check_ends()

    def _check_weight(self) -> None:
        """Raise ConfigError for a weight of the loss that the prediction does not have."""
        known = _WEIGHTS.get(self.prediction_type, SIT_WEIGHTS)
        if self.loss_weight in (None, *known):
            if self.loss_weight is not None and known is not SIT_WEIGHTS and self.path != "linear":
                raise self.error("loss_weight", f"needs path 'linear', not {self.path!r}. Set it to null.")
        elif self.loss_weight in SIT_WEIGHTS or not known:
            raise self.error(
                "loss_weight",
                f"has no effect on prediction_type {self.prediction_type!r}, whose loss is that of the velocity. Set "
                "it to null, or predict 'noise' or 'score'.",
            )
        else:
            raise self.error(
                "loss_weight",
                f"is for predicted velocities, but prediction_type is {self.prediction_type!r}. Use "
                f"{' or '.join(known)}, or null.",
            )

    def shift_of(self, shape: tuple[int, ...], sampling: bool = False) -> float:
        """Return the time shift for latents of ``shape`` (C, ...); above 1 moves times towards noise."""
        if sampling and self.sample_shift is not None:
            return self.sample_shift
        if self.dynamic_shift is not None:
            return math.exp(mu_of(self.dynamic_shift, math.prod(shape[1:]) / 4))
        return self.shift if self.shift_base is None else math.sqrt(math.prod(shape) / self.shift_base)

    def _check_ends(self) -> None:
        """Raise ConfigError if loss or velocity would be infinite at an end of the times."""
        train, sample = self.eps
        infinite_loss = self.loss_weight in (*SIT_WEIGHTS, "sigma_sqrt")
        infinite_loss |= self.path == "vp" and self.prediction_type == "velocity"
        infinite_velocity = self.prediction_type == "noise" or (self.path != "vp" and self.prediction_type == "score")
        for name, eps, is_infinite, quantity in (
            ("train_eps", train, infinite_loss, "the loss"),
            ("sample_eps", sample, infinite_velocity, "the velocity computed from the network's output"),
        ):
            if is_infinite and eps < _MIN_EPS:
                raise ConfigError(
                    f"diffusion.{name} = {eps:g} makes {quantity} infinite at an end of the times, with path "
                    f"{self.path!r}, prediction_type {self.prediction_type!r} and loss_weight {self.loss_weight!r}. "
                    f"Set it to null, the published value, or to {_MIN_EPS:g} or more."
                )

    @property
    def eps(self) -> tuple[float, float]:
        """Distance from singular ends in (training, sampling): as configured, or as published."""
        train = 1e-3 if self.train_eps is None and self.loss_weight == "sigma_sqrt" else self.train_eps
        return self._eps(train, vp=1e-5), self._eps(self.sample_eps, vp=1e-3)

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError if the network has too few output channels; extra channels are ignored (SiT)."""
        if out_channels < in_channels:
            raise ConfigError(
                f"The predictor has {out_channels} output channels, but flow matching predicts each of the "
                f"{in_channels} channels of a latent. Give it {in_channels} output channels."
            )

    def train_interval(self) -> tuple[float, float]:
        """Return the first and last time of training."""
        eps, _ = self.eps
        return self._start(eps), 1.0 - eps

    def sample_interval(self, last_step: float = 0.0) -> tuple[float, float]:
        """Return the times at which sampling starts and at which its even steps end.

        ``last_step``: length of a final step of another kind; 0 for none.
        """
        _, eps = self.eps
        return self._start(eps), 1.0 - (last_step or eps)

    def reversed_interval(self) -> tuple[float, float]:
        """Return the times at which sampling in reverse, from data to noise, starts and ends."""
        _, eps = self.eps
        return 1.0 - self._start(eps), eps

    def _eps(self, eps: float | None, vp: float) -> float:
        if eps is not None:
            return eps
        if self.path == "vp":
            return vp
        return 0.0 if self.prediction_type in ("velocity", "data") else 1e-3

    def _start(self, eps: float) -> float:
        return 0.0 if self.path == "vp" else eps  # (only VP's end is singular)


def mu_of(name: str, tokens: float) -> float:
    """Return the logarithm of the shift that the networks of ``name`` have for an image of ``tokens``."""
    most_tokens, most = _MU[name]
    return 0.5 + (most - 0.5) * (tokens - 256) / (most_tokens - 256)


@dataclass(frozen=True)
class MeanFlowConfig(Section):
    """MeanFlow: learn the average velocity from time t down to r, to sample in one to four steps (Geng et al. 2025).

    t = 1 is noise. ``omega`` and ``kappa`` build guidance of scale omega / (1 - kappa) into what is learned, so sample
    without guidance.
    """

    logit_mean: LogitMean = -0.4
    """Mean of the logit of the times, -20 to 20; published as P_mean."""
    logit_std: LogitStd = 1.0
    """Standard deviation of the logit of the times, 1e-6 to 20; published as P_std."""
    data_proportion: Probability = 0.75
    """Probability that r = t, where the target is the velocity at a single time."""
    omega: Annotated[float, Between(0.0, 100.0)] = 1.0
    """Weight of the sample's own velocity in the target, 0 to 100."""
    kappa: Annotated[float, Between(0.0, 0.999)] = 0.5
    """Weight in the target of the network's prediction with the label, 0 to 0.999. The prediction without a label gets
    the rest, up to a total of 1."""
    t_start: float = 0.0
    """Times before this have no guidance; 0 to 1."""
    t_end: float = 1.0
    """Times after this have no guidance; 0 to 1."""
    norm_p: Annotated[float, Between(0.0, 4.0)] = 1.0
    """Power p of a sample's weight 1 / (error + c)^p, 0 to 4; 0 for no weighting."""
    norm_eps: Annotated[float, Between(1e-12, 1e6)] = 0.01
    """Constant c of that weight, added to the squared error summed over a latent; 1e-12 to 1e6."""
    model_id: str = "mean_flow"
    """Kind of objective."""

    section = "diffusion"
    saved_tensors = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.t_start <= self.t_end <= 1.0:
            raise ConfigError(
                f"diffusion.t_start = {self.t_start}, t_end = {self.t_end} must satisfy 0 <= t_start <= t_end <= 1."
            )

    @property
    def is_guided(self) -> bool:
        """Whether guidance is part of the target."""
        return (self.omega, self.kappa) != (1.0, 0.0)

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError unless the network outputs a velocity and no variance."""
        if out_channels != in_channels:
            raise ConfigError(
                f"The predictor has {out_channels} output channels, but MeanFlow learns only a velocity for each of "
                f"the {in_channels} channels of a latent. Set predictor.learn_sigma to false."
            )

    def check_predictor(self, predictor: Any) -> None:
        """Raise ConfigError for a network that takes one timestep, or lacks the unconditional class guidance needs."""
        name, conditions = f"predictor {predictor.model_id!r}", predictor.conditions
        if predictor.num_time_inputs != 2:
            raise ConfigError(
                f"{name} takes one timestep, but MeanFlow needs two, r and t. Set predictor.h_embedder to true."
            )
        if conditions.items != ("label",):
            raise self.error(
                "model_id",
                f"supports only labels, but {name} is conditioned on {' and '.join(conditions.items)}. Use "
                "flow_matching.",
            )
        if self.is_guided and not conditions.has_unconditional:
            raise ConfigError(
                f"diffusion.omega = {self.omega}, kappa = {self.kappa} need the prediction for the unconditional "
                "class, which this network does not learn. Set predictor.class_dropout_prob to 0.1, or omega to 1 and "
                "kappa to 0."
            )


@dataclass(frozen=True)
class WanFlowConfig(Section):
    """Flow matching as MindSpeed-MM trains Wan, with its keys and defaults; sigma = 0 is data, sigma = 1 is noise."""

    num_train_timesteps: Annotated[int, Between(3, MAX_TIMESTEPS)] = 1000
    """T, the rows of the table that training times are sampled from, 3 to 1,000,000; the network gets the time
    T sigma."""
    shift: Annotated[float, Between(1e-3, 1e3)] = 3.0
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

    section = "diffusion"
    saved_tensors = 4
    """Number of float32 tensors of the size of a latent that the loss keeps for backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sigma_min < self.sigma_max <= 1:
            raise ConfigError(
                f"diffusion.sigma_min = {self.sigma_min}, sigma_max = {self.sigma_max} must satisfy 0 <= sigma_min < "
                "sigma_max <= 1. The tutorial has 0 and 1."
            )
        low, high = self.window
        if not 0 <= low < high <= 1:
            raise self.error(
                "timestep_window",
                f"must be two noise levels 0 <= low < high <= 1, or times up to {self.num_train_timesteps}. Wan 2.2's "
                "experts have [0.875, 1] and [0, 0.875].",
            )
        low, high = self.min_timestep_boundary, self.max_timestep_boundary
        is_range = 0 <= low < high <= 1
        first, end = self.trained_rows if is_range else (0, 0)
        if first < end:
            return
        limits = f"min_timestep_boundary = {low}, max_timestep_boundary = {high}"
        none = f"none of {self.num_train_timesteps} timesteps to train on"
        if is_range and self.window != (0, 1):
            raise self.error("timestep_window", f"leaves {none}, with {limits}. Widen it.")
        raise ConfigError(
            f"diffusion.{limits} leave {none}. They must satisfy 0 <= min < max <= 1. Leave both out to train on all."
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
                f"The predictor has {out_channels} output channels, but the velocity has the {in_channels} channels of "
                f"a latent. Give it {in_channels} output channels."
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
