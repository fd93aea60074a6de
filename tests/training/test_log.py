from __future__ import annotations

from datetime import datetime

from mindspeed_mm_dit.training.log import StepRecord, format_line

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
