"""PyTorch and MindSpore in one process: prove each against the other, with one GELU and with two.

python both_frameworks.py FOLDER    (of the packages of PyTorch; MindSpore is the interpreter's own)
"""

import sys

import numpy as np

sys.path.append(sys.argv[1])

import torch
from mindspore import nn

import mindspeed_mm_dit as dit

X = [np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)]
for approximate in (False, True):
    there = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    here = nn.SequentialCell(nn.Dense(6, 8), nn.GELU(approximate=approximate), nn.Dense(8, 3))
    for mine, theirs in ((here, there), (there, here)):
        print(dit.prove(mine, theirs, X).where or "right")
