"""The composite in the form the host needs: a MegatronModule that can be sharded, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin
from torch import Tensor, nn

from mindspeed_mm_dit.checkpoint.state import check_names
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel

EMA = "ema."
"""Prefix of the EMA among the tensors of a saved model."""


class HostedDiT(MultiModalModule, FSDP2Mixin):
    """A DiTModel with Megatron's interface; checkpoints hold the predictor under its own names.

    Its children are those of the composite, so the paths of fsdp2.yaml begin with ``predictor`` here too. ``averages``
    returns the EMA to save with it, by name.
    """

    share_embeddings_and_output_weights = False  # (a DiT has neither)

    def __init__(self, model: DiTModel, averages: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(core_transformer_config_from_args(get_args()))
        FSDP2Mixin.__init__(self)  # (Megatron's classes do not call it)
        self._composite = (model,)  # in a tuple: as a child module it would lengthen every name
        self.diffusion, self.predictor = model.diffusion, model.predictor
        self.averages = averages
        self._constants = {name: buffer.clone() for name, buffer in self.named_buffers()}
        self.loaded_averages: dict[str, Tensor] = {}
        """EMA that came with the model's own tensors (--ckpt-format torch)."""

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the training loss of each sample, (B,) float32, as the composite does."""
        (composite,) = self._composite
        composite.predictor = self.predictor  # the host may have replaced it by a wrapper, e.g. for recomputation
        return composite(**batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the predictor's tensors under the names of the published checkpoints."""
        return dict(self.predictor.state_dict(*args, **kwargs))

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: the predictor and its EMA."""
        averages = {f"{prefix}{EMA}{name}": value for name, value in self.averages().items()}
        return {**self.predictor.state_dict(prefix=prefix, keep_vars=keep_vars), **averages}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load the predictor; the names must match exactly.

        Raises:
            CheckpointError: the checkpoint has another architecture; the tensors are named.
        """
        weights = {name: value for name, value in state_dict.items() if not name.startswith(EMA)}
        self.loaded_averages = {n[len(EMA) :]: value for n, value in state_dict.items() if n.startswith(EMA)}
        expected = {name: tuple(value.shape) for name, value in self.predictor.state_dict().items()}
        check_names(expected, {name: tuple(value.shape) for name, value in weights.items()}, "--load")
        return self.predictor.load_state_dict(weights, strict, assign)

    def restore_constants(self) -> None:
        """Restore the float32 values of the constants: Megatron's --bf16 casts them with the weights."""
        restore(self, self._constants)

    def init_weights(self) -> None:
        """Do nothing: :meth:`post_meta_init` sets the weights (the host would initialise all of them at random)."""

    def post_meta_init(self) -> None:
        """Fill a model that was built on the meta device: weights, frozen positional embeddings and constants."""
        runtime.load_arrays(self.predictor, self._composite[0].initial_weights(get_args().seed))
        self.restore_constants()


def restore(module: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Put the buffers ``constants`` back by name, on the device where the module is now."""
    for name, value in constants.items():
        owner, _, leaf = name.rpartition(".")
        submodule = module.get_submodule(owner)
        setattr(submodule, leaf, value.to(getattr(submodule, leaf).device))
