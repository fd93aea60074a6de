import signal
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.framework.exits import SIGNALS
from mindspeed_mm_dit.training import signals


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
        assert stop.agree() == signals.Stop(f"asked to stop by {number.name}", 128 + number)
    assert signal.getsignal(number) is before


def test_a_run_ends_well_when_its_minutes_are_over_unless_something_else_ends_it(framework, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(signals, "time", clock)
    with signals.StopRequest(minutes=2) as stop:
        clock.now = 219.9
        assert stop.agree() is None
        clock.now = 220.0
        assert stop.agree() == signals.Stop("the 2 minutes of --exit-duration-in-mins are over", 0)
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
