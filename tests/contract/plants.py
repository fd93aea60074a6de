"""A process of ``mm-dit prove`` inside MindSpeed-MM, in which the average of the weights never moves."""

import sys
from contextlib import nullcontext
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from mindspeed_mm_dit.framework import activate

    activate("pytorch")

from tests.tools.verify.plants import REPLICATED, Fault, planted

AVERAGE = Fault(
    REPLICATED, "training.pytorch.stepper:ExponentialMovingAverage.update", "self.move(1 - self.decay)", "pass",
    "average/", "the average",
)  # fmt: skip

if __name__ == "__main__":
    from mindspeed_mm_dit.tools.verify.processes import read_tasks
    from mindspeed_mm_dit.tools.verify.worker import main

    is_reference = read_tasks(sys.argv[-1])[0].host == "standalone"
    with nullcontext() if is_reference else planted(AVERAGE):
        main(sys.argv[1:])
