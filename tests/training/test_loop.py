"""The loop does not wait for the device between steps, and says everything in order all the same."""

import itertools
import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.errors import ConvergenceError, DataError, StepError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.training import log, loop
from mindspeed_mm_dit.training.callbacks import lines
from mindspeed_mm_dit.training.callbacks.registry import Callback, Run, open_callbacks
from mindspeed_mm_dit.training.signals import StopRequest
from tests.conftest import run_config

FLAGS = dict(
    train_iters=5, log_interval=2, eval_interval=4, eval_iters=1, save_interval=3, global_batch_size=8, save="here",
    lr=1e-3, lr_decay_style="constant",
)  # fmt: skip
HELD_OUT = [{"noise_level": np.zeros(1)}]


class Device:
    """A device that works through its queue only when it is waited for, and notes what happens in which order."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.events, self.launched = losses, [], 0

    def train_step(self, forward_step, batches, lr):
        next(batches)
        self.launched += 1
        self.events.append(f"step {self.launched}")
        return SimpleNamespace(loss=self.losses[self.launched - 1], grad_norm=float(self.launched))

    def eval_step(self, forward_step, batches):
        self.events.append("validate")
        return torch.tensor([0.5])

    def read_later(self, values):
        self.events.append(f"copy {len(values)}")
        return SimpleNamespace(is_ready=lambda: False, wait=lambda: self.events.append("wait") or values)


class Progress:
    def __init__(self, device: Device) -> None:
        self.device, self.iteration, self.consumed_samples = device, 0, 0

    def advance(self) -> None:
        self.iteration += 1
        self.consumed_samples += 8

    def try_save(self, check=lambda: None) -> None:
        check()
        self.device.events.append("save")

    finish = try_save


@pytest.fixture
def run(monkeypatch):
    def run(losses: list[float], train=None, valid=HELD_OUT, stop=None, callbacks=None) -> tuple[Device, list]:
        device, records = Device(losses), []
        run.device = device
        monkeypatch.setattr(runtime, "read_later", device.read_later)
        monkeypatch.setattr(log, "mfu_meter", lambda args: None)
        monkeypatch.setattr(log.RunLog, "record", lambda self, record: records.append(record))
        monkeypatch.setattr(runtime, "num_microbatches", lambda: 1)
        train = itertools.repeat(0) if train is None else train
        args, stop = run_config(**FLAGS), stop or StopRequest()
        parts = Run(args, device, None, valid, Progress(device), stop, log.open_log(args, 0))
        parts.callbacks = callbacks or open_callbacks(parts)
        run.ended = loop.train(parts, train)
        return device, records

    return run


def test_results_are_waited_for_only_while_the_next_step_is_under_way(run):
    device, _ = run([1.0] * 5)
    assert device.events == [
        "step 1", "step 2", "copy 3", "step 3", "wait",  # log interval 2: read beneath step 3
        "copy 2", "wait", "save",  # a step is looked at before it is saved
        "step 4", "copy 3", "validate", "wait",  # the line is read beneath the validation, and comes before its
        "step 5", "copy 2", "wait", "copy 2", "wait", "save",
    ]  # fmt: skip


def test_records_say_what_their_own_interval_was_like(run):
    _, records = run([1.0, 2.0, 3.0, math.nan, 5.0])
    assert [(r.iteration, r.consumed_samples, r.loss, r.grad_norm, r.nan_iterations) for r in records] == [
        (2, 16, 1.5, 2.0, 0),
        (4, 32, 3.0, 4.0, 1),
        (5, 40, 5.0, 5.0, 1),
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_not_saved_over_a_good_one(monkeypatch, run, bad):
    left = []
    monkeypatch.setattr(lines, "record_not_finite", lambda *said: left.append(said))
    with pytest.raises(ConvergenceError, match=f"Iteration 3 is not saved: its loss = {bad}") as caught:
        run([1.0, 1.0, bad, 1.0, 1.0])  # iteration 3 is saved, and no line is due
    assert str(left) == f"[('here', 3, {bad}, 3.0)]"  # (for mm-dit replay)
    assert "save" not in run.device.events
    assert "mm-dit replay --checkpoint here" in str(caught.value)


def test_a_validation_is_weighed_for_the_best_checkpoint_unless_the_step_before_it_is_not_finite(monkeypatch, run):
    weighed = []
    monkeypatch.setitem(FLAGS, "keep_best", True)
    weigh = lambda self, loss, check: check() or weighed.append((self.iteration, loss))  # noqa: E731
    monkeypatch.setattr(Progress, "keep_if_best", weigh, False)
    run([1.0] * 5)
    assert weighed == [(4, 0.5)]
    with pytest.raises(ConvergenceError, match="Iteration 4"):
        run([1.0, 1.0, 1.0, math.inf, 1.0])
    assert weighed == [(4, 0.5)]


def test_an_interval_without_a_finite_loss_ends_the_run_before_it_is_saved(monkeypatch, run):
    monkeypatch.setitem(FLAGS, "save_interval", 2)
    with pytest.raises(ConvergenceError, match="Iteration 2 is not saved: its loss = nan"):
        run([math.inf, math.nan, 1.0, 1.0, 1.0])
    assert "save" not in run.device.events


def broken_after(count: int, error: Exception):
    yield from range(count)
    raise error


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("odd"), DataError("0.png is gone.")])
def test_whatever_a_reader_raises_saves_the_steps_before_it_and_ends_with_code_2(run, error):
    device, _ = run([1.0] * 5, train=broken_after(2, error))
    assert device.launched == 2 and device.events[-1] == "save"
    assert run.ended.code == 2 and str(error).split("] ")[-1] in str(run.ended.error)


def test_batches_that_come_to_an_end_save_too(run):
    device, _ = run([1.0] * 5, train=iter([0, 0]))
    assert device.events[-1] == "save" and "have come to an end" in str(run.ended.error)


def test_an_error_of_the_validation_saves_and_ends(run, monkeypatch):
    device, _ = run([1.0] * 5, valid=broken_after(0, OSError("gone")))
    assert device.launched == 4 and device.events[-1] == "save" and run.ended.code == 2
    monkeypatch.setattr(Device, "eval_step", lambda *given: 1 / 0)
    device, _ = run([1.0] * 5)
    assert device.launched == 4 and device.events[-1] == "save"
    assert str(run.ended.error).startswith("The validation failed") and "ZeroDivisionError" in str(run.ended.error)
    of_two = lambda *given: monkeypatch.setattr(runtime, "world_size", lambda: 2) or 1 / 0  # noqa: E731
    monkeypatch.setattr(Device, "eval_step", of_two)  # (the other rank may be in the middle of it)
    with pytest.raises(StepError, match="The validation failed"):
        run([1.0] * 5)


def test_an_error_of_the_last_validation_is_not_lost(run, monkeypatch):
    monkeypatch.setitem(FLAGS, "eval_interval", 5)
    device, _ = run([1.0] * 5, valid=broken_after(0, OSError("gone")))
    assert device.launched == 5 and device.events[-1] == "save" and run.ended.code == 2


def test_a_step_that_fails_is_named_and_saves_nothing(run, monkeypatch):
    monkeypatch.setattr(Device, "train_step", lambda *given: 1 / 0)
    with pytest.raises(StepError, match=r"Iteration 1 failed.*ZeroDivisionError"):
        run([1.0] * 5)
    assert "save" not in run.device.events


def test_a_watcher_is_told_each_moment_with_its_run(run, monkeypatch):
    told = []
    moments = (name for name in vars(Callback) if not name.startswith("_"))
    notes = {name: lambda self, run, *_, name=name: told.append((name, run.progress.iteration)) for name in moments}
    monkeypatch.setitem(FLAGS, "train_iters", 1)
    run([1.0], callbacks=[type("Noting", (Callback,), notes)()])
    assert told == [
        ("before_step", 0), ("flush", 0), ("after_step", 1), ("at_end", 1), ("flush", 1), ("check", 1)
    ]  # fmt: skip


def test_a_signal_ends_before_the_next_step(run):
    def batches():
        yield 0
        signal.raise_signal(signal.SIGTERM)
        yield 0

    with StopRequest() as stop:
        device, _ = run([1.0] * 5, train=batches(), stop=stop)
    assert device.launched == 1 and device.events[-1] == "save" and run.ended.code == 143
