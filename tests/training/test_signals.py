from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.training import signals


def test_a_ctrl_c_that_a_launcher_passes_on_is_one_request_and_a_later_one_interrupts(framework, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(signals, "time", clock)
    before = signal.getsignal(signal.SIGINT)
    with signals.StopRequest() as stop:
        assert not stop.on_any_rank()
        for clock.now in (10.0, 10.1):
            signal.raise_signal(signal.SIGINT)
        assert stop.on_any_rank()
        clock.now = 12.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
