"""What files of reference values of later recipes have in common: a ``.pt`` that says how they were made.

The numbers of ``config`` in the ``.npz`` are sizes. Flags, learning rate and constants stand in the ``.pt``, as the
recipe's own code saves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.published import plain
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import shown
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.framework.torch_file import read_torch_file
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.verify.reference.file import (
    FORMAT,
    Given,
    Tensor,
    Weights,
    check_fits,
    check_range,
    check_shape,
    config_of,
    loaded,
    sizes_in,
)
from mindspeed_mm_dit.verify.step import Step

Arrays = Mapping[str, np.ndarray]
FLOATS, WHOLE = "f", "iu"


class RecipeFile(ABC):
    """The arrays of a file, what its ``.pt`` says, and networks with the weights in it.

    Raises CheckpointError for a file or ``.pt`` that lacks what the values were made with, for sizes that no network
    has, and for inputs that the network cannot be given.
    """

    sizes: tuple[str, ...]
    """What the numbers of ``config`` are, as settings of a section ``predictor``."""

    def __init__(self, given: Given, weights: Weights) -> None:
        self.given, self._checkpoint = given, f"--checkpoint = {weights['--checkpoint']}"
        content = read_torch_file(weights["--checkpoint"])
        self._content = content if isinstance(content, Mapping) else {}
        self.config = self.network_of(self.flags)
        lr, betas = self.adamw
        self.step = Step(self.fresh_network, self.losses, lr, betas)
        self._check_inputs()

    @property
    @abstractmethod
    def flags(self) -> Mapping[str, Any]:
        """Settings of the network beside its sizes."""

    @property
    @abstractmethod
    def adamw(self) -> tuple[float, tuple[float, float]]:
        """Learning rate and betas of the one optimizer step."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int | None, ...]]:
        """Shape of each input; None is any size."""

    @abstractmethod
    def losses(self, network: DiT) -> Tensor:
        """Return what the optimizer step lowers, a loss a sample (B,)."""

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

    def network_of(self, flags: Mapping[str, Any]) -> DiTConfig:
        """Return the network of ``config`` with ``flags``."""
        what = f"--reference: config = {shown(self.given['config'].tolist())}"
        config: DiTConfig = config_of(DiTConfig, {**sizes_in(self.given, self.sizes), **flags}, what)
        return config

    def fresh_network(self, config: DiTConfig | None = None, weights: Arrays | None = None) -> DiT:
        """Return the network with the weights of the file, or another one with others."""
        config = config or self.config
        weights = plain(self.said("model") if weights is None else weights)
        check_fits(config, weights, "--reference: config", self._checkpoint)
        network: DiT = loaded(DiT, config, weights)
        return network

    @cached_property
    def network(self) -> DiT:
        """The network that is asked; its weights never change."""
        return self.fresh_network()

    def stepped(self) -> DiT:
        """Return the network after the optimizer step."""
        assert self.step.weights_after  # (taken when it is asked for)
        network: DiT = self.step.network
        return network

    def tensor(self, name: str) -> Tensor:
        """Return an input as a tensor, in the kind of number that networks take."""
        array = self.given[name]
        return ops.tensor(array.astype(np.int64 if array.dtype.kind in WHOLE else np.float32))

    def _check_inputs(self) -> None:
        for name, shape in self.shapes.items():
            if name in self.given:
                check_shape(self.given, name, shape)
        for name in {"y", "sample/y"} & self.given.keys():
            check_range(self.given, name, self.config.num_classes, why=": the null class is the last")
