"""The composite as the host wants it: a MegatronModule that can be sharded, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin
from torch import Tensor, nn

from mindspeed_mm_dit.checkpoint.weights import check_names
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.init import initial_weights

EMA = "ema."
"""Prefix of the moving average among the tensors of a saved model."""


class HostedDiT(DiTModel, MultiModalModule, FSDP2Mixin):
    """A DiTModel with Megatron's surface; checkpoints hold the predictor under its own names.

    ``averages`` gives the moving average to save beside it, by name.
    """

    share_embeddings_and_output_weights = False  # there are none for Megatron to keep equal

    def __init__(self, model: DiTModel, averages: Callable[[], Mapping[str, Tensor]]) -> None:
        MultiModalModule.__init__(self, core_transformer_config_from_args(get_args()))
        self.ae, self.diffusion, self.predictor = model.ae, model.diffusion, model.predictor
        self._averages = averages

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the predictor's tensors under the names of the published checkpoints."""
        return dict(self.predictor.state_dict(*args, **kwargs))

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """Return what a checkpoint keeps: the predictor and, beside it, its moving average."""
        averages = {f"{prefix}{EMA}{name}": value for name, value in self._averages().items()}
        return {**self.predictor.state_dict(prefix=prefix, keep_vars=keep_vars), **averages}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load the predictor; the names must be exactly its own.

        Raises:
            CheckpointError: the checkpoint is of another architecture; the tensors are named.
        """
        weights = {name: value for name, value in state_dict.items() if not name.startswith(EMA)}
        wanted = {name: tuple(value.shape) for name, value in self.predictor.state_dict().items()}
        check_names(wanted, {name: tuple(value.shape) for name, value in weights.items()}, "--load")
        return self.predictor.load_state_dict(weights, strict, assign)

    def init_weights(self) -> None:
        """Leave the weights to :meth:`post_meta_init` (the host would draw all of them at random)."""

    def post_meta_init(self) -> None:
        """Fill a model that was built without memory: weights, positions and constants."""
        set_initial_weights(self.predictor, get_args().seed)


def set_initial_weights(predictor: nn.Module, seed: int) -> None:
    """Set the trained weights of a predictor from the seed, sharded or not."""
    parameters = predictor.state_dict(keep_vars=True)
    shapes = {name: tuple(p.shape) for name, p in parameters.items() if p.requires_grad}
    runtime.load_arrays(predictor, initial_weights(shapes, seed))


__all__ = ["EMA", "HostedDiT", "set_initial_weights", "torch"]
