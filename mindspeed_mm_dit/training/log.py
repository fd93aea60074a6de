"""The output of a run while it trains.

MindSpeed-MM's log line, a progress bar, scalars; the loss on held-out images; and reading such logs again.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.files import UnusableFile, check_file, is_folder, lines_of
from mindspeed_mm_dit.configs.limits import MAX_INT64, shorten_repr
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.planning import model_flop_utilization, peak_tflops
from mindspeed_mm_dit.terminal import plain, print_nowhere
from mindspeed_mm_dit.training.loggers.registry import MetricsLogger, open_metrics_loggers

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
"""The quarters of the noise level, in percent; the level is t / T of a Gaussian process, 1 - t of a flow."""


@dataclass(frozen=True)
class ValidationLoss:
    """The result of one validation: the loss on held-out images, and its mean in each quarter of the noise levels.

    The loss of a training step depends mostly on the timesteps it sampled. A validation covers the noise levels evenly
    and always in the same way, so its mean can be compared with earlier ones; the quarters show at which noise levels a
    model gets better or worse.
    """

    mean: float
    """Over all samples."""
    quarters: dict[str, float]
    """Mean over the samples of each of QUARTERS; quarters without samples are left out."""

    @classmethod
    def from_sums(cls, sums: np.ndarray) -> ValidationLoss:
        """Divide the sums of losses by their numbers of samples; ``sums`` (2, 4) is a sum of ``sums_by_quarter``."""
        total, count = sums.sum(1).tolist()
        quarters = {name: loss / samples for name, loss, samples in zip(QUARTERS, *sums.tolist()) if samples}
        return cls(total / count, quarters)

    def line(self, iteration: int) -> str:
        """Return the log line, in Megatron's form for several losses."""
        values = {"loss": self.mean, **{quarter_name(name): loss for name, loss in self.quarters.items()}}
        columns = "".join(f" {name} value: {value:.6E} |" for name, value in values.items())
        return f" validation loss at iteration {iteration} |{columns}"

    def scalars(self) -> dict[str, float]:
        """Return the values by their names in TensorBoard."""
        return {"valid/loss": self.mean, **{quarter_scalar(name): loss for name, loss in self.quarters.items()}}


def quarter_name(quarter: str) -> str:
    """Return the name in the log of the loss in one of QUARTERS."""
    return f"noise {quarter}%"


def quarter_scalar(quarter: str) -> str:
    """Return the name in TensorBoard of the loss in one of QUARTERS."""
    return f"valid/loss_noise_{quarter}"


def sums_by_quarter(losses: np.ndarray, noise_levels: np.ndarray) -> np.ndarray:
    """Return sum and number of the ``losses`` (B,) in each quarter of ``noise_levels`` (B,), 0 to 1: (2, 4)."""
    quarters = np.minimum(4 * noise_levels, 3).astype(np.int64)
    return np.stack([np.bincount(quarters, losses, 4), np.bincount(quarters, minlength=4)])


def mfu_meter(args: RunConfig) -> Callable[[float], float | None]:
    """Return MFU as a function of the images per second of all ranks; None if the peak is unknown."""
    precision = args.mm.precision
    assert precision is not None
    peak = args.peak_tflops or peak_tflops(framework.runtime.device_name(), precision.compute)
    if peak is None:
        return lambda images_per_second: None
    flop, devices = args.mm.data_set.flop_per_sample(), framework.runtime.world_size()
    return lambda images_per_second: model_flop_utilization(images_per_second, flop, peak, devices)


@dataclass(frozen=True)
class StepRecord:
    """One log interval, as it is printed."""

    iteration: int
    train_iters: int
    consumed_samples: int
    ms_per_iteration: float
    learning_rate: float
    global_batch_size: int
    loss: float
    """Mean over the interval."""
    grad_norm: float
    """Of the interval's last step."""
    nan_iterations: int

    @property
    def images_per_second(self) -> float:
        """Training images per second, over all ranks."""
        return self.global_batch_size * 1000 / self.ms_per_iteration

    @property
    def seconds_left(self) -> int:
        """Seconds that the other iterations take at the pace of this interval."""
        return round((self.train_iters - self.iteration) * self.ms_per_iteration / 1000)


def format_line(record: StepRecord, now: datetime) -> str:
    """Return exactly the log line of Megatron and MindSpeed-MM.

    The loss scale is 1 without fp16, no step is ever skipped, and zeros are counted only with a flag of Megatron's
    that defaults to off. The fields stay for the programs that parse the line.
    """
    return (
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {record.iteration:8d}/{record.train_iters:8d} |"
        f" consumed samples: {record.consumed_samples:12d} |"
        f" elapsed time per iteration (ms): {record.ms_per_iteration:.1f} |"
        f" learning rate: {record.learning_rate:.6E} |"
        f" global batch size: {record.global_batch_size:5d} |"
        f" loss: {record.loss:.6E} |"
        f" loss scale: 1.0 |"
        f" grad norm: {record.grad_norm:.3f} |"
        f" num zeros: 0.0 |"
        f" number of skipped iterations: {0:3d} |"
        f" number of nan iterations: {record.nan_iterations:3d} |"
    )


def format_row(record: StepRecord, smoothed: float) -> str:
    """Return a shorter line for a terminal: without the constant columns, and with the time that is left."""
    wide = len(str(record.train_iters))
    nan = f"  {record.nan_iterations} not finite" if record.nan_iterations else ""
    return (
        f"step {record.iteration:{wide}d}/{record.train_iters}  loss {record.loss:.4f}  smoothed {smoothed:.4f}"
        f"  grad {record.grad_norm:.3f}  lr {record.learning_rate:.2e}  {record.images_per_second:,.0f} images/s"
        f"  {time_left(record)} left{nan}"
    )


def time_left(record: StepRecord) -> str:
    """Return the time that is left at the pace of the last interval, e.g. 0:12:30 or "2 days, 1:00:00"."""
    return str(timedelta(seconds=record.seconds_left))


SMOOTHING = 0.9
"""Weight of the earlier rows in the smoothed loss on a terminal."""
SECONDS_BETWEEN_ESTIMATES = 60
"""Between the lines of a log file with the time left."""


class RunLog:
    """Writes records to standard output, to a progress bar on a terminal, and to metrics loggers.

    A terminal gets short rows; a file or pipe gets Megatron's lines and the time that is left: after the first line, if
    that is a minute or more, and then every minute.
    """

    def __init__(
        self,
        *,
        prints: bool,
        train_iters: int,
        iteration: int,
        metrics_loggers: Sequence[MetricsLogger] = (),
        mfu: Callable[[float], float | None] = lambda images_per_second: None,
    ) -> None:
        self.prints, self._mfu = prints, mfu
        on_terminal = prints and sys.stderr.isatty()
        self._bar = tqdm(
            total=train_iters,
            initial=iteration,
            unit="step",
            disable=not on_terminal,
            dynamic_ncols=True,
            smoothing=0.05,
        )
        self._metrics_loggers = metrics_loggers
        self._is_terminal = prints and sys.stdout.isatty()
        self._smoothed, self._estimated = math.nan, -math.inf

    def step(self) -> None:
        """Count one optimizer step."""
        self._bar.update()

    def record(self, record: StepRecord) -> None:
        """Report a log interval."""
        if not self.prints:
            return
        if self._is_terminal:
            before = record.loss if math.isnan(self._smoothed) else self._smoothed
            self._smoothed = SMOOTHING * before + (1 - SMOOTHING) * record.loss
            self.echo(format_row(record, self._smoothed))
        else:
            self.echo(format_line(record, datetime.now()))
            self._estimate(record)
        mfu = self._mfu(record.images_per_second)
        mfu_text = "" if mfu is None else f", MFU {mfu:.1%}"
        self._bar.set_postfix_str(f"loss {record.loss:.4f}, {record.images_per_second:.0f} images/s{mfu_text}")
        scalars = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/learning_rate": record.learning_rate,
            "train/images_per_second": record.images_per_second,
        }
        self._scalars(record.iteration, scalars if mfu is None else {**scalars, "train/mfu": mfu})

    def validation(self, iteration: int, loss: ValidationLoss) -> None:
        """Report the loss on the held-out images."""
        self.echo(loss.line(iteration))
        self._scalars(iteration, loss.scalars())

    def picture(self, iteration: int, name: str, pixels: np.ndarray) -> None:
        """Pass a picture (H, W, 3) uint8 to the metrics loggers."""
        for metrics_logger in self._metrics_loggers:
            metrics_logger.add_picture(iteration, name, pixels)

    def echo(self, text: str) -> None:
        """Print a line without breaking the progress bar; if the reader is gone, the run continues."""
        if not self.prints:
            return
        try:
            tqdm.write(plain(text), file=sys.stdout)
            sys.stdout.flush()
        except OSError:  # a pipe whose reader has ended, a terminal that is closed
            print_nowhere(sys.stdout.fileno())

    def close(self) -> None:
        """Finish the bar and the metrics loggers."""
        self._bar.close()
        for metrics_logger in self._metrics_loggers:
            metrics_logger.close()

    def _estimate(self, record: StepRecord) -> None:
        is_first, now = self._estimated == -math.inf, time.monotonic()
        if now - self._estimated < SECONDS_BETWEEN_ESTIMATES:
            return
        self._estimated = now
        if record.seconds_left >= (SECONDS_BETWEEN_ESTIMATES if is_first else 1):
            self.echo(f" about {time_left(record)} left of {record.train_iters:,} iterations")

    def _scalars(self, iteration: int, values: dict[str, float]) -> None:
        for metrics_logger in self._metrics_loggers:
            metrics_logger.add(iteration, values)


def open_log(args: RunConfig, iteration: int) -> RunLog:
    """Return the log of a run that starts after ``iteration``; the last rank prints and has the metrics loggers."""

    prints = framework.runtime.rank() == framework.runtime.world_size() - 1
    metrics_loggers = open_metrics_loggers(args, iteration) if prints else ()
    return RunLog(
        prints=prints,
        train_iters=args.train_iters,
        iteration=iteration,
        metrics_loggers=metrics_loggers,
        mfu=mfu_meter(args),
    )


Parsed = TypeVar("Parsed")

NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
_LOSS = re.compile(rf"\biteration +(\d+)/ *\d+ \|.*?\| *(?:lm )?loss: *{NUMBER}", re.I)
_GRAD_NORM = re.compile(rf"\biteration +(\d+)/.*?\| *grad norm: *{NUMBER}", re.I)

TRAINING_SCALARS = ("train/loss", "lm loss", "loss")
"""Names of the loss in TensorBoard: ours, Megatron's, a common one."""
GRAD_NORM_SCALARS = ("train/grad_norm", "grad-norm")


def read_steps(path: str | Path) -> dict[int, tuple[float, float]]:
    """Read loss and gradient norm by step from a log or TensorBoard folder of this project or MindSpeed-MM.

    Raises:
        DataError: the log cannot be read, or holds none.
    """
    path = Path(path)
    if is_folder(path):
        scalars = read_folder(path)
        losses, norms = first_of_names(scalars, TRAINING_SCALARS), first_of_names(scalars, GRAD_NORM_SCALARS)
    else:
        losses, norms = read_text(path, parse_losses), read_text(path, _norms)
    if not losses.keys() & norms.keys():
        raise DataError(f"{path} holds no losses with gradient norms. Name a log of a run with --log-interval.")
    return {step: (losses[step], norms[step]) for step in sorted(losses.keys() & norms.keys())}


def parse_losses(lines: Iterable[str]) -> dict[int, float]:
    """Return step -> loss from the lines of a log; raises ValueError for a step that no run can have."""
    return _by_step(_LOSS, lines)


def _norms(lines: Iterable[str]) -> dict[int, float]:
    return _by_step(_GRAD_NORM, lines)


def _by_step(pattern: re.Pattern[str], lines: Iterable[str]) -> dict[int, float]:
    return {step_of(m[1]): float(m[2]) for m in map(pattern.search, lines) if m}


def read_text(path: Path, parse: Callable[[Iterable[str]], Parsed]) -> Parsed:
    """Return the result of ``parse`` on the lines of a text file; raises DataError if they cannot be read."""
    _check_regular(path)
    try:
        return parse(lines_of(path.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise DataError(f"{path} {error}. Correct the line, or leave it out.") from None


def _check_regular(path: Path) -> None:
    """Raise DataError for a pipe or a device, which would be read forever; the reader reports a missing file."""
    try:
        if os.path.lexists(path):
            check_file(path)
    except UnusableFile as problem:
        raise DataError(f"{path} {problem}. Name a log file or a TensorBoard folder.") from None


def step_of(text: str) -> int:
    """Return a step; raises ValueError unless it is a whole number up to 2**63 - 1."""
    if not text.isdecimal() or len(text) > 30 or int(text) > MAX_INT64:
        raise ValueError(f"holds a step that no run reaches: {shorten_repr(text)}")
    return int(text)


def read_folder(path: Path) -> dict[str, dict[int, float]]:
    """Return name -> step -> value of all scalars in a TensorBoard folder; raises DataError for a pipe or device."""
    for file in path.glob("*tfevents*"):
        _check_regular(file)
    return read_scalars(path)


def first_of_names(scalars: Mapping[str, dict[int, float]], names: Iterable[str]) -> dict[int, float]:
    """Return step -> value of the first of ``names`` that exists."""
    return next((scalars[name] for name in names if scalars.get(name)), {})


def read_scalars(folder: str | Path) -> dict[str, dict[int, float]]:
    """Return name -> step -> value of all scalars in a TensorBoard folder, steps ascending."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    by_name = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    return {name: dict(sorted(by_step.items())) for name, by_step in by_name.items()}
