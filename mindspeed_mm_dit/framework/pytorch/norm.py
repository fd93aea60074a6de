"""A layer norm that computes in the precision of its weights, on every device."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerNorm(torch.nn.LayerNorm):
    """PyTorch's. Autocast lets it compute in float32 on a GPU, but not on a CPU, whose kernel then adds the gradients
    of its weights up in bfloat16: where many cancel, a quarter of the sum is lost."""

    def forward(self, input: Tensor) -> Tensor:
        """Norm ``input`` over its last axis."""
        return super().forward(input if self.weight is None else input.to(self.weight.dtype))
