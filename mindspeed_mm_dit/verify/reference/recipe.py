"""What files of reference values of later recipes have in common: a ``.pt`` that says how they were made.

The numbers of ``config`` in the ``.npz`` are sizes. Flags, learning rate and constants stand in the ``.pt``, as the
recipe's own code saves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from mindspeed_mm_dit.checkpoint.published import plain
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.verify.reference.file import FORMAT, Given, Tensor, Weights
from mindspeed_mm_dit.verify.reference.images import Arrays, LabelledImages
from mindspeed_mm_dit.verify.step import Step


class RecipeFile(LabelledImages, ABC):
    """The arrays of a file, what its ``.pt`` says, and networks with the weights in it.

    Raises CheckpointError for a file or ``.pt`` that lacks what the values were made with, for sizes that no network
    has, and for inputs that the network cannot be given.
    """

    def __init__(self, given: Given, weights: Weights) -> None:
        content = read_torch_file(weights["--checkpoint"])
        self._content, self._checkpoint = content if isinstance(content, Mapping) else {}, "--checkpoint"
        super().__init__(given, weights)
        lr, betas = self.adamw
        self.step = Step(self.fresh_network, self.losses, lr, betas)

    @property
    @abstractmethod
    def adamw(self) -> tuple[float, tuple[float, float]]:
        """Learning rate and betas of the one optimizer step."""

    @abstractmethod
    def losses(self, network: DiT) -> Tensor:
        """Return what the optimizer step lowers, a loss a sample (B,)."""

    @cached_property
    def weights(self) -> Arrays:
        """The weights in the ``.pt``."""
        return plain(self.said("model"))

    def fresh_network(self, config: Any = None, weights: Any = None) -> DiT:
        """Return the network with the weights of the file, or another one with others of the ``.pt``."""
        return super().fresh_network(config, None if weights is None else plain(weights))

    def said(self, *keys: str) -> Any:
        """Return the entry at ``keys`` of the nested ``.pt``; raises CheckpointError where there is none."""
        found: Any = self._content
        for key in keys:
            if not isinstance(found, Mapping) or key not in found:
                raise CheckpointError(
                    self._checkpoint, f"lacks {'/'.join(keys)}, which the values were made with", FORMAT
                )
            found = found[key]
        return found

    def number(self, *keys: str) -> float:
        """Return a number of the ``.pt``."""
        found = self.said(*keys)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise CheckpointError(self._checkpoint, f"{'/'.join(keys)} = {shown(found)} is no number", FORMAT)
        return float(found)

    def stepped(self) -> DiT:
        """Return the network after the optimizer step."""
        assert self.step.weights_after  # (taken when it is asked for)
        network: DiT = self.step.network
        return network
