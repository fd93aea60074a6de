"""Print the folder of a PyTorch, 2.7 or newer, that sees an accelerator; exit with 1 where there is none."""

import sys
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit(1)
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
    sys.exit(f"PyTorch {torch.__version__} is too old: 2.7 is needed")
npu = getattr(torch, "npu", None)  # there once torch_npu is installed
if not (torch.cuda.is_available() or (npu is not None and npu.is_available())):
    sys.exit(1)
print(Path(torch.__file__).parent.parent)
