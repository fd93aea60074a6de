from dataclasses import replace
from datetime import datetime

from mindspeed_mm_dit.training.log import RunLog, StepRecord, format_line

HOST_LINE = (
    " [2026-11-20 20:41:35] iteration        1/       5 | consumed samples:            4 | elapsed time per iteration "
    "(ms): 195.1 | learning rate: 1.000000E-03 | global batch size:     4 | loss: 1.098573E+00 | loss scale: 1.0 | "
    "grad norm: 0.627 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_the_log_line_is_mindspeed_mms_to_the_letter():
    record = StepRecord(
        iteration=1, train_iters=5, consumed_samples=4, ms_per_iteration=195.1, learning_rate=1e-3,
        global_batch_size=4, loss=1.098573, grad_norm=0.627, nan_iterations=0,
    )  # fmt: skip
    assert format_line(record, datetime(2026, 11, 20, 20, 41, 35)) == HOST_LINE


RECORD = StepRecord(
    iteration=50, train_iters=800, consumed_samples=6400, ms_per_iteration=100.0, learning_rate=1e-3,
    global_batch_size=128, loss=0.5, grad_norm=0.627, nan_iterations=0,
)  # fmt: skip


def test_a_file_hears_at_once_and_each_minute_what_is_left(capsys, monkeypatch):
    now = iter([0.0, 59.0, 61.0])
    monkeypatch.setattr("mindspeed_mm_dit.training.log.time.monotonic", lambda: next(now))
    log = RunLog(prints=True, train_iters=800, iteration=49)
    for _ in range(3):
        log.record(RECORD)
    said = capsys.readouterr().out.splitlines()
    estimate = " about 0:01:15 left of 800 iterations"
    assert [number for number, line in enumerate(said) if line == estimate] == [1, 4]
    assert len(said) == 5 and said[2].split("]")[1] == format_line(RECORD, datetime.now()).split("]")[1]


def test_a_run_of_seconds_needs_no_estimate(capsys):
    RunLog(prints=True, train_iters=800, iteration=0).record(replace(RECORD, ms_per_iteration=20))
    assert "left" not in capsys.readouterr().out
