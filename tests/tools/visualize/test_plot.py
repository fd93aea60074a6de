import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.tools.visualize.plot import Curve, draw_losses, parse_losses, read_curve
from mindspeed_mm_dit.training.log import RunLog, StepRecord
from mindspeed_mm_dit.training.loggers.boards import TensorBoardLogger

OURS = (
    " [2026-11-20 20:41:35] iteration        1/       5 | consumed samples:            4 | elapsed time per iteration "
    "(ms): 195.1 | learning rate: 1.000000E-03 | global batch size:     4 | loss: 1.098573E+00 | loss scale: 1.0 | "
    "grad norm: 0.627 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
LOGS = {
    "ours": ([OURS, "saved", OURS.replace(" 1/ ", " 2/ ").replace("1.098573E+00", "nan")], {1: 1.098573, 2: np.nan}),
    "megatron": ([OURS.replace("| loss:", "| lm loss:")], {1: 1.098573}),
    "published DiT": ([
        "[\x1b[34m2023-01-01 00:00:00\x1b[0m] Experiment directory created",
        "[\x1b[34m2023-01-01 00:00:01\x1b[0m] (step=0000100) Train Loss: 0.2000, Train Steps/Sec: 1.00",
        "[\x1b[34m2023-01-01 00:00:02\x1b[0m] (step=0000200) Train Loss: 0.1500, Train Steps/Sec: 1.00",
    ], {100: 0.2, 200: 0.15}),
}  # fmt: skip


def test_losses_are_read_from_logs(tmp_path):
    for lines, wanted in LOGS.values():
        found = parse_losses(lines)
        assert list(found) == list(wanted)
        np.testing.assert_equal(list(found.values()), list(wanted.values()))
    log = tmp_path / "log.txt"  # a later loss of a step counts
    log.write_text("(step=2) Train Loss: 3.0\n(step=1) Train Loss: 1.0\n(step=2) Train Loss: 2.0\n")
    curve = read_curve(log)
    assert curve.steps.tolist() == [1, 2] and curve.losses.tolist() == [1.0, 2.0]


def test_logs_and_flags_that_cannot_be_plotted_are_refused(tmp_path, capsys):
    log = tmp_path / "strange.log"
    for text, flags, named in (
        (None, "", "strange.log"), ("", "", "strange.log"), ("loss went down nicely\n", "", "strange.log"),
        ("a\tb\n1\t2\n", "", "strange.log"), ("", "--smooth 0", "--smooth = 0"), ("", "--output x.gif", "x.gif"),
    ):  # fmt: skip
        if text is not None:
            log.write_text(text)
        assert main(["plot", str(log), *flags.split()]) == 2
        assert named in capsys.readouterr().err


def test_runs_of_every_kind_are_drawn(tmp_path, capsys):
    board = tmp_path / "tensorboard"
    log = RunLog(prints=True, metrics_loggers=[TensorBoardLogger(str(board), 0)], train_iters=3, iteration=0)
    for step in (1, 2, 3):
        log.record(StepRecord(step, 3, step, 1.0, 1e-3, 1, 1.0 / step, 1.0, 0))
    log.close()
    (tmp_path / "dit.txt").write_text("\n".join(LOGS["published DiT"][0]))
    (tmp_path / "ours.txt").write_text(OURS)
    logs = [str(tmp_path / name) for name in ("tensorboard", "dit.txt", "ours.txt")]
    assert main(["plot", *logs, "--smooth", "2", "--output", str(tmp_path / "out" / "loss.png")]) == 0
    assert Image.open(tmp_path / "out" / "loss.png").size == (990, 550)
    assert "tensorboard: 3 losses, step 1 to 3, last 0.333333" in capsys.readouterr().out


@pytest.mark.filterwarnings("error")
def test_name_of_other_letters_is_drawn(tmp_path):
    curves = [Curve(name, np.arange(4), np.full(4, 0.5)) for name in ("\u5bfa\u5e99", "\u00e9t\u00e9", "plain")]
    draw_losses(tmp_path / "loss.png", curves, [()] * 3)
    assert (tmp_path / "loss.png").is_file()
