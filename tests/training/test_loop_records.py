"""What the loop hands to engine and log: rates, batches, counts, times, and why it ends, by signals too."""

import itertools
import signal
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.errors import ConvergenceError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import SIGNALS
from mindspeed_mm_dit.training import log, loop, signals
from mindspeed_mm_dit.training.callbacks import lines
from mindspeed_mm_dit.training.callbacks.registry import Run, open_callbacks
from mindspeed_mm_dit.training.log import ValidationLoss
from mindspeed_mm_dit.training.loop import LearningRate
from mindspeed_mm_dit.training.signals import StopReason
from tests.conftest import run_config

FLAGS = {
    "train_iters": 5, "log_interval": 2, "eval_interval": 2, "eval_iters": 3, "save_interval": None,
    "global_batch_size": 8, "tensorboard_dir": "tb", "lr": 1.0, "min_lr": 0.25, "lr_warmup_init": 0.5,
    "lr_warmup_iters": 2,
}  # fmt: skip
RATES = [0.5, 0.75, 1.0, 0.75, 0.5]  # two steps of warm-up, then down by 0.25 a step: 0.25 would be that of step 6


class Recorder:
    """Stands for engine, log, progress and clock, and notes what each is told."""

    def __init__(self, iteration=0, stop_at=None, losses=None):
        self.iteration, self.consumed_samples, self.stop_at = iteration, 100 + 8 * iteration, stop_at
        self.losses = losses or [float(n) for n in range(1, 6)]
        self.steps, self.validations, self.records, self.said, self.opened = [], [], [], [], None
        self.saves = self.closed = 0

    def train_step(self, forward_step, batches, lr):
        self.steps.append((forward_step, next(batches), lr))
        return SimpleNamespace(loss=self.losses[len(self.steps) - 1], grad_norm=10.0 * len(self.steps))

    def eval_step(self, forward_step, batches):
        numbers = next(batches)["labels"]
        self.validations.append((forward_step, *numbers))
        return torch.tensor(numbers)

    def advance(self):
        self.iteration += 1
        self.consumed_samples += 8

    def try_save(self, check=lambda: None):
        check()
        self.saves += 1

    finish = try_save

    def agree(self):
        return StopReason("asked to stop by SIGTERM", 143) if self.iteration == self.stop_at else None

    def note(self, error):
        raise error

    def log(self, **opened):
        self.opened = opened
        return SimpleNamespace(
            echo=self.said.append, record=self.records.append, step=lambda: None, close=lambda: None,
            validation=lambda iteration, loss: self.said.append((iteration, loss)),
        )  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    def run(recorder=None, rank=0, ranks=1, waits=0.0, is_idle=True, **flags):
        recorder = recorder or Recorder()
        clock, waiting = iter(range(100)), itertools.cycle([0.0, waits])
        monkeypatch.setattr(log, "RunLog", recorder.log)
        monkeypatch.setattr(log, "mfu_meter", lambda args: ("meter", args))
        monkeypatch.setattr(log, "open_metrics_loggers", lambda args, step: (args.parts["tensorboard_dir"], step))
        monkeypatch.setattr(lines.time, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(loop.time, "monotonic", lambda: next(waiting))
        monkeypatch.setattr(runtime, "num_microbatches", lambda: 1)
        monkeypatch.setattr(runtime, "rank", lambda: rank)
        monkeypatch.setattr(runtime, "world_size", lambda: ranks)
        read_later = lambda values: SimpleNamespace(is_ready=lambda: is_idle, wait=lambda: values)  # noqa: E731
        monkeypatch.setattr(runtime, "read_later", read_later)
        monkeypatch.setattr(runtime, "mean_over_ranks_on_cpu", lambda values: values / 2)
        args = run_config(**{**FLAGS, **flags})
        noise_levels = np.array([0.0, 0.25, 0.5, 0.99])
        held_out = [{"labels": 100.0 * n + np.arange(4), "noise_level": noise_levels} for n in range(5)]
        recorder.args = args
        opened = log.open_log(args, recorder.iteration)
        parts = Run(args, recorder, "forward", held_out, recorder, recorder, opened)
        parts.callbacks = open_callbacks(parts)
        recorder.ended = loop.train(parts, iter(range(1000)))
        opened.close()
        return recorder

    return run


def test_every_step_gets_its_batch_and_the_rate_of_its_number(run):
    assert run().steps == [("forward", number, rate) for number, rate in enumerate(RATES)]
    resumed = run(Recorder(iteration=3))
    assert [rate for _, _, rate in resumed.steps] == RATES[3:]
    assert [rate for *_, rate in run(lr_decay_iters=4).steps] == [0.5, 0.75, 1.0, 0.625, 0.25]


def test_every_record_says_what_its_interval_was_like(run):
    """The clock of this test ticks once each time it is asked: when the loop begins, and once an interval."""
    assert [vars(record) for record in run().records] == [
        {
            "iteration": iteration, "train_iters": 5, "consumed_samples": 100 + 8 * iteration,
            "ms_per_iteration": 1000 / steps, "learning_rate": RATES[iteration - 1], "global_batch_size": 8,
            "loss": loss, "grad_norm": 10.0 * iteration, "nan_iterations": 0,
        }
        for iteration, steps, loss in ((2, 2, 1.5), (4, 2, 3.5), (5, 1, 5.0))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("waits", "is_idle", "share"), [(0.3, True, "30%"), (2.0, True, "100%"), (0.2, True, None), (0.3, False, None)]
)
def test_it_is_said_once_that_steps_wait_for_data_unless_the_device_is_busy_meanwhile(run, waits, is_idle, share):
    """A step and an interval take a second by this clock; the third interval is the last that is judged."""
    recorder = run(waits=waits, is_idle=is_idle, log_interval=1, eval_interval=None)
    said = [line for line in recorder.said if "waits for its data" in line]
    assert [line.partition(" of the time")[0] for line in said] == ([f"note: {share}"] if share else [])


@pytest.mark.parametrize(("rank", "ranks", "prints"), [(0, 1, True), (0, 2, False), (1, 2, True), (1, 3, False)])
def test_the_last_rank_prints(run, rank, ranks, prints):
    recorder = run(Recorder(iteration=1), rank, ranks)
    assert recorder.opened == {
        "prints": prints, "metrics_loggers": ("tb", 1) if prints else (), "train_iters": 5, "iteration": 1,
        "mfu": ("meter", recorder.args),
    }  # fmt: skip


def test_each_validation_is_the_mean_of_its_first_batches_and_of_their_quarters(run):
    recorder = run()
    assert recorder.validations == [("forward", *(100.0 * n + np.arange(4))) for n in range(3)] * 2
    quarters = {"0-25": 100.0, "25-50": 101.0, "50-75": 102.0, "75-100": 103.0}
    assert recorder.said == [(step, ValidationLoss(101.5, quarters)) for step in (2, 4)]
    assert run(eval_iters=0).said == [] and run(eval_interval=None).validations == []


@pytest.mark.parametrize("save", ["folder", None])
def test_a_run_that_is_asked_to_stop_says_so_and_ends_as_any_other(run, save):
    recorder = run(Recorder(stop_at=3), save=save, eval_interval=None)
    words = "saving it" if save else "nothing is saved without --save"
    assert recorder.said == [f"asked to stop by SIGTERM at iteration 3: {words}"]
    assert len(recorder.steps) == 3 and recorder.saves == 1 and recorder.ended.code == 143


@pytest.mark.parametrize(("iteration", "words"), [
    (4, []), (5, ["iteration 5 is reached already: nothing to train up to 5"]),
    (7, ["iteration 7 is reached already: nothing to train up to 5"]),
])  # fmt: skip
def test_a_run_that_is_done_says_so(run, iteration, words):
    recorder = run(Recorder(iteration=iteration), eval_interval=None)
    assert recorder.said == words and len(recorder.steps) == max(0, 5 - iteration)


def test_a_lost_step_is_named_by_its_own_loss(run):
    """No loss of the interval is finite: the last of them is said."""
    nan, inf = float("nan"), float("inf")
    with pytest.raises(ConvergenceError, match=r"Iteration 3 .*loss = inf and grad norm = 30\.0") as caught:
        run(Recorder(losses=[nan, nan, inf, 1.0, 1.0]), log_interval=3)
    assert "replay" not in str(caught.value)  # (nothing is saved that could be replayed)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_every_step_has_megatrons_learning_rate(style, warmup_steps):
    megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    ours = LearningRate(peak=1e-3, minimum=1e-5, init=1e-6, warmup_steps=warmup_steps, decay_steps=40, style=style)
    reference = types.SimpleNamespace(
        max_lr=1e-3, min_lr=1e-5, init_lr=1e-6, lr_warmup_steps=warmup_steps, lr_decay_steps=40, lr_decay_style=style
    )
    for step in range(60):
        reference.num_steps = step
        expected = megatron.OptimizerParamScheduler.get_lr(reference, {})
        assert ours.at(step) == pytest.approx(expected, rel=1e-12)


def test_a_ctrl_c_that_a_launcher_passes_on_is_one_request_and_a_later_one_interrupts(framework, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(signals, "time", clock)
    before = signal.getsignal(signal.SIGINT)
    with signals.StopRequest() as stop:
        assert stop.agree() is None
        for clock.now in (10.0, 10.1):
            signal.raise_signal(signal.SIGINT)
        assert stop.agree().code == 130
        clock.now = 12.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_another_rank_has_died_of_is_the_reason_until_the_ranks_have_agreed(framework):
    with pytest.raises(KeyboardInterrupt), signals.StopRequest():
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError), signals.StopRequest() as stop:
        stop.agree()
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("a fault of the step")


def test_the_first_of_several_reasons_gives_the_code(framework):
    with signals.StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert stop.agree().code == 143
        stop.note(OSError("gone"))
        assert stop.agree().code == 2


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_that_asks_politely_is_kept_until_the_ranks_agree(framework, number):
    assert signal.SIGQUIT in SIGNALS
    before = signal.getsignal(number)
    with signals.StopRequest() as stop:
        signal.raise_signal(number)
        assert stop.agree() == signals.StopReason(f"asked to stop by {number.name}", 128 + number)
    assert signal.getsignal(number) is before


def test_a_run_ends_well_when_its_minutes_are_over_unless_something_else_ends_it(framework, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(signals, "time", clock)
    with signals.StopRequest(minutes=2) as stop:
        clock.now = 219.9
        assert stop.agree() is None
        clock.now = 220.0
        assert stop.agree() == signals.StopReason("the 2 minutes of --exit-duration-in-mins are over", 0)
        signal.raise_signal(signal.SIGTERM)
        assert stop.agree().code == 143


def test_nohup_keeps_a_run_beyond_its_shell(framework):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.agree() is None
    finally:
        signal.signal(signal.SIGHUP, before)
