"""PyTorch's side of the framework interface."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # How often OpenMP's threads look for work before they sleep, read when PyTorch is loaded. By its default they spin
    # on, and a step beside other processes takes 3 to 40 times as long (benchmarks/results/2026-11-28-cpu_tuning.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch  # activation must fail here, by name, when it is not installed

from mindspeed_mm_dit.framework.pytorch.optim import avoid_compiler_import

avoid_compiler_import()
torch.backends.cudnn.allow_tf32 = False  # float32 is float32, in convolutions as in products; --tf32 allows both
