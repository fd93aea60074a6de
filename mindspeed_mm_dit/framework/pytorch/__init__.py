"""PyTorch's side of the framework interface."""

import torch  # activation must fail here, by name, when it is not installed

from mindspeed_mm_dit.framework.pytorch.cpu_tuning import avoid_compiler_import

avoid_compiler_import()
torch.backends.cudnn.allow_tf32 = False  # float32 is float32, in convolutions as in products; --tf32 allows both
