"""Section ``diffusion`` of model.json with ``model_id`` "flow_matching"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mindspeed_mm_dit.configs.limits import check_between, require_positive
from mindspeed_mm_dit.errors import ConfigError

PathName = Literal["linear", "gvp", "vp"]
PredictionType = Literal["velocity", "noise", "score", "data"]
LossWeight = Literal["velocity", "likelihood"]


_LEAST_EPS = 1e-6
"""Distance from the end of the times that float32 still tells from none, with some to spare."""
_BOUNDS = {"logit_mean": (-20.0, 20.0), "logit_std": (1e-6, 20.0), "shift": (1e-4, 1e4), "sample_shift": (1e-4, 1e4)}
"""Beyond these float32 has no times between the ends."""
_NOISE_SCALES = (1e-3, 1e3)
"""Beyond these either noise or data is lost beside the other."""


@dataclass(frozen=True)
class FlowMatchingConfig:
    """What is learned and at which times (Ma et al. 2024); t = 0 is noise, t = 1 is data, but for what the network is
    told with ``data_time`` 0."""

    path: PathName = "linear"
    """How data and noise are mixed: a straight line, variance-preserving by sine and cosine, or score SDE's VP."""
    prediction_type: PredictionType = "velocity"
    """What the network predicts: dx/dt, the noise, the score, or the data, whose loss is that of the velocity it means
    (JiT; Li & He 2025)."""
    loss_weight: LossWeight | None = None
    """Weight of the error of noise and score: null for 1, or as published; velocity has none."""
    data_time: Literal[0, 1] = 1
    """The time that the network is told of clean data, to which its velocity points from 0, or, where it is 0, from
    which it points to noise at 1 (REPA; Yu et al. 2024)."""
    t_eps: float = 0.05
    """Of "data": the least 1 - t by which a prediction is divided to be a velocity, in training and in sampling."""
    noise_scale: float = 1.0
    """Standard deviation of the noise, in training and in sampling; above 1 for large images (JiT)."""
    cosine_loss: bool = False
    """Add to the squared error of a velocity 1 - the cosine of its angle to the true one, over channels
    (LightningDiT; Yao & Wang 2025)."""
    timestep_sampling: Literal["uniform", "logit_normal"] = "uniform"
    """Law of the training times: uniform as published, or logit-normal (Esser et al. 2024, eq. 19)."""
    logit_mean: float = 0.0
    """Mean of the logit of t with "logit_normal"; above 0 nearer to the data."""
    logit_std: float = 1.0
    """Standard deviation of the logit of t with "logit_normal"."""
    shift: float = 1.0
    """Moves training and sampling times towards noise where above 1 (Esser et al. 2024, eq. 23)."""
    shift_base: int | None = None
    """Elements C H W of a latent that need no shift; ``shift`` is then sqrt(C H W / shift_base), so by the number of
    tokens (Esser et al. 2024, section 5.3.2; RAE has 4096). null: as ``shift`` says."""
    sample_shift: float | None = None
    """Shift of the sampling times; null: that of training. LightningDiT trains with 1 and samples with 1 / 0.3."""
    train_eps: float | None = None
    """Distance of the training times from the ends of the path that are singular; null: as published."""
    sample_eps: float | None = None
    """The same for the sampling times."""
    model_id: str = "flow_matching"
    """Key in OBJECTIVES."""

    def __post_init__(self) -> None:
        for name in ("logit_std", "shift"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"diffusion.{name} = {getattr(self, name)}", "must be a positive number")
        for name, (low, high) in _BOUNDS.items():
            if getattr(self, name) is not None:
                check_between(f"diffusion.{name}", getattr(self, name), low, high, "all times would be at one end")
        for name in ("train_eps", "sample_eps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 0.5:
                raise ConfigError(f"diffusion.{name} = {value}", "must lie in [0, 0.5), or be null")
        if self.loss_weight is not None and self.prediction_type in ("velocity", "data"):
            raise ConfigError(
                f"diffusion.loss_weight = {self.loss_weight!r}",
                f"has no effect on prediction_type {self.prediction_type!r}, whose loss is that of the velocity",
                "set it to null, or predict 'noise' or 'score'",
            )
        self._check_recipes()
        self._check_ends()

    def _check_recipes(self) -> None:
        """Raise ConfigError for settings of later recipes that do not go together with the others."""
        if self.prediction_type == "data" and self.path != "linear":
            raise ConfigError(
                "diffusion.prediction_type = 'data'", f"is defined on the path 'linear', and this one is {self.path!r}",
                "set path to 'linear'",
            )  # fmt: skip
        if self.cosine_loss and self.prediction_type != "velocity":
            raise ConfigError(
                "diffusion.cosine_loss = true", f"compares velocities, and prediction_type is {self.prediction_type!r}",
                "predict 'velocity', or drop it",
            )  # fmt: skip
        check_between("diffusion.t_eps", self.t_eps, _LEAST_EPS, 1.0)
        check_between("diffusion.noise_scale", self.noise_scale, *_NOISE_SCALES)
        if self.shift_base is not None:
            require_positive(self, "diffusion", "shift_base")
            if self.shift != 1.0:
                raise ConfigError(
                    f"diffusion.shift = {self.shift}", f"contradicts shift_base = {self.shift_base}", "drop one of them"
                )

    def shift_of(self, shape: tuple[int, ...], sampling: bool = False) -> float:
        """Return the shift of the times of latents of ``shape`` (C, ...), towards noise where above 1."""
        if sampling and self.sample_shift is not None:
            return self.sample_shift
        return self.shift if self.shift_base is None else math.sqrt(math.prod(shape) / self.shift_base)

    def _check_ends(self) -> None:
        """Raise ConfigError where training or sampling would meet an infinite value at an end of the times."""
        train, sample = self.eps
        infinite_loss = self.loss_weight is not None or (self.path == "vp" and self.prediction_type == "velocity")
        infinite_velocity = self.prediction_type == "noise" or (self.path != "vp" and self.prediction_type == "score")
        for name, eps, is_infinite, what in (
            ("train_eps", train, infinite_loss, "the loss"),
            ("sample_eps", sample, infinite_velocity, "the velocity that is read off the network"),
        ):
            if is_infinite and eps < _LEAST_EPS:
                raise ConfigError(
                    f"diffusion.{name} = {eps:g}",
                    f"{what} is infinite at an end of the times, with path {self.path!r}, prediction_type "
                    f"{self.prediction_type!r} and loss_weight {self.loss_weight!r}",
                    f"set it to null, which is as published, or to {_LEAST_EPS:g} or more",
                )

    @property
    def eps(self) -> tuple[float, float]:
        """Distance from singular ends in training and in sampling: as given, or as published."""
        return self._eps(self.train_eps, vp=1e-5), self._eps(self.sample_eps, vp=1e-3)

    def check_output(self, in_channels: int, out_channels: int) -> None:
        """Raise ConfigError unless a network puts out at least the prediction; further channels are not used (SiT)."""
        if out_channels < in_channels:
            raise ConfigError(
                f"predictor: {out_channels} channels of output",
                f"flow matching predicts each of the {in_channels} channels of a latent",
                f"let the predictor put out {in_channels}",
            )

    kept_tensors = 6
    """Float32 tensors of the size of a latent that the loss keeps for backward."""

    def train_interval(self) -> tuple[float, float]:
        """Return the first and last time a network is trained at."""
        eps, _ = self.eps
        return self._start(eps), 1.0 - eps

    def sample_interval(self, last_step: float = 0.0) -> tuple[float, float]:
        """Return where a chain starts and where its even steps end.

        ``last_step``: length of a step of another kind that follows them; 0 for none.
        """
        _, eps = self.eps
        return self._start(eps), 1.0 - (last_step or eps)

    def reversed_interval(self) -> tuple[float, float]:
        """Return where a chain from data to noise starts and ends."""
        _, eps = self.eps
        return 1.0 - self._start(eps), eps

    def _eps(self, given: float | None, vp: float) -> float:
        if given is not None:
            return given
        if self.path == "vp":
            return vp
        return 0.0 if self.prediction_type in ("velocity", "data") else 1e-3

    def _start(self, eps: float) -> float:
        return 0.0 if self.path == "vp" else eps  # (only VP's end is singular)
