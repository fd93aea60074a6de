"""The loss of a validation by noise level: its arithmetic, its log line, and the line read back."""

import numpy as np
import pytest

from mindspeed_mm_dit.tools.visualize.plot import parse_losses, parse_validation, read_validation
from mindspeed_mm_dit.training.log import QUARTERS, RunLog, ValidationLoss, sums_by_quarter
from mindspeed_mm_dit.training.loggers.boards import Scalars

LOSS = ValidationLoss(0.25, {"0-25": 0.4, "25-50": 0.3, "50-75": 0.2, "75-100": 0.1})
LINE = (
    " validation loss at iteration 200 | loss value: 2.500000E-01 | noise 0-25% value: 4.000000E-01 |"
    " noise 25-50% value: 3.000000E-01 | noise 50-75% value: 2.000000E-01 | noise 75-100% value: 1.000000E-01 |"
)
READ = {
    "held-out images": {200: 0.25}, "noise 0-25%": {200: 0.4}, "noise 25-50%": {200: 0.3}, "noise 50-75%": {200: 0.2},
    "noise 75-100%": {200: 0.1},
}  # fmt: skip
NOTHING: dict[str, dict[int, float]] = {name: {} for name in READ}
OLD = " validation loss at iteration 200 | loss value: 2.500000E-01 |"
MEGATRON = " validation loss at iteration 200 on validation set | lm loss value: 2.5E-01 | lm loss PPL: 1.284025E+00 | "


def test_every_sample_counts_in_the_quarter_its_share_lies_in():
    shares = np.array([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.9999, 1.0])
    sums = sums_by_quarter(2.0 ** np.arange(8), shares)
    np.testing.assert_array_equal(sums, [[1 + 2, 4, 8 + 16, 32 + 64 + 128], [2, 1, 2, 3]])


def test_the_quarters_weighted_by_their_samples_are_the_mean():
    draw = np.random.default_rng(0)
    losses, shares = draw.random(101), draw.random(101)
    parts = [sums_by_quarter(*part) for part in zip(np.split(losses, [7, 60]), np.split(shares, [7, 60]))]
    found = ValidationLoss.from_sums(sum(parts))
    counts = [((shares * 4).astype(int) == number).sum() for number in range(4)]
    assert found.mean == pytest.approx(losses.mean(), rel=1e-14)
    assert np.average([found.quarters[name] for name in QUARTERS], weights=counts) == pytest.approx(found.mean)
    for number, name in enumerate(QUARTERS):
        assert found.quarters[name] == pytest.approx(losses[(shares * 4).astype(int) == number].mean(), rel=1e-14)


def test_a_quarter_without_samples_is_left_out_and_one_lost_loss_is_not_hidden():
    found = ValidationLoss.from_sums(sums_by_quarter(np.array([1.0, np.nan]), np.array([0.1, 0.9])))
    assert list(found.quarters) == ["0-25", "75-100"] and found.quarters["0-25"] == 1.0
    assert np.isnan(found.mean) and np.isnan(found.quarters["75-100"])


def test_the_line_begins_as_megatrons():
    assert LOSS.line(200) == LINE and LINE.startswith(OLD)


@pytest.mark.parametrize(("line", "found"), [
    (LINE, READ),
    (OLD, {**NOTHING, "held-out images": {200: 0.25}}),
    (MEGATRON, {**NOTHING, "held-out images": {200: 0.25}}),
    (LINE.replace("200 |", "200 on validation set |"), READ),
    (MEGATRON.replace("validation set", "test set"), NOTHING),
])  # fmt: skip
def test_a_validation_is_read_from_its_line(line, found):
    assert parse_validation(["saved", line]) == found
    assert parse_losses([line]) == {}  # it is no loss of training


def test_a_validation_is_read_from_log_and_tensorboard_alike(tmp_path):
    log = RunLog(prints=True, metrics_loggers=[Scalars(str(tmp_path / "board"), 0)], train_iters=3, iteration=0)
    log.validation(200, LOSS)
    log.close()
    (tmp_path / "log.txt").write_text(f"{LINE}\n")
    for place in ("board", "log.txt"):
        curves = read_validation(tmp_path / place)
        assert {c.label: dict(zip(c.steps.tolist(), np.float32(c.losses))) for c in curves} == {
            name: {200: np.float32(loss[200])} for name, loss in READ.items()
        }
    (tmp_path / "log.txt").write_text("nothing\n")
    assert read_validation(tmp_path / "log.txt") == []
