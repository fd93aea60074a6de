"""PyTorch's side of the seam."""

import torch  # noqa: F401  (activation must fail here, by name, when it is not installed)
