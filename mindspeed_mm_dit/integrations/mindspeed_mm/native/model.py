"""The predictor in the form of the engine's models: given a whole batch, it returns the loss.

The module tree begins at the predictor, so its tensors have the published names in every checkpoint. Adapters are the
same as in every host: when the engine asks peft for adapters, it gets ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mindspeed.fsdp.utils.str_match import module_name_match
from mindspeed_mm.fsdp.models.base_model import BaseModel
from torch import Tensor, nn
from transformers.utils import ModelOutput

from mindspeed_mm_dit.configs.run import MultiModalArguments
from mindspeed_mm_dit.errors import PlatformError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.framework.exits import end
from mindspeed_mm_dit.integrations.mindspeed_mm.native.data import unpack_bits
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import Run, current
from mindspeed_mm_dit.integrations.mindspeed_mm.real_memory import real_memory
from mindspeed_mm_dit.models import registry
from mindspeed_mm_dit.models.composite import DiTModel


class NativeModel(BaseModel):
    """The class registered under our model id; it builds the model that yaml and model.json describe."""

    @classmethod
    def _from_config(cls, config: Any) -> nn.Module:
        """Return the model without weights; :meth:`TrainedPredictor.init_weights` or a checkpoint supplies them."""
        try:
            current().join_ranks()
            return build(current())
        except UserError as error:
            end(error)

    @classmethod
    def from_pretrained(cls, config: Any) -> nn.Module:
        """Return the model with its initial weights."""
        model = cls._from_config(config)
        model.init_weights()
        return model


@dataclass
class LossOutput(ModelOutput):
    """The output of a forward pass."""

    loss: Tensor | None = None
    """Mean over the micro-batch."""


class TrainedPredictor(nn.Module):
    """A predictor that returns its loss; it has the predictor's own parameters and modules, under the same names."""

    def __init__(self, composite: DiTModel, run: Run) -> None:
        super().__init__()
        predictor = composite.predictor
        del composite.predictor  # encoders are neither trained nor saved: they stay outside of the tree
        composite.predictor = predictor.forward
        for tree in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[tree] = predictor.__dict__[tree]
        self.composite, self.run = (composite,), run

    def forward(self, use_cache: bool = False, **batch: Tensor) -> LossOutput:
        """Return the mean loss of a micro-batch that was packed by ``data.packed``; ``use_cache`` has no effect."""
        with torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16, enabled=self.run.autocast):
            losses = self.composite[0](**unpack_bits(batch))  # (B,)
        return LossOutput(loss=losses.mean())

    def init_weights(self) -> None:
        """Fill the model, sharded or not (the engine calls this for a model that it built on the meta device)."""
        weights = self.run.first.weights
        runtime.load_arrays(
            self, self.composite[0].initial_weights(self.run.flags.seed) if weights is None else weights
        )

    def averages(self) -> Mapping[str, Tensor]:
        """Return the EMA of each trained weight, by its name."""
        return self.run.trained.ema.averages

    def choose_trained(self) -> None:
        """Train the parameters that model.json and the flags name, and freeze the rest."""
        declared = self.composite[0].declared
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(declared[name].trained)


def build(run: Run) -> nn.Module:
    """Return the predictor of ``run`` as a model that returns its loss; without memory if the engine uses meta init."""
    mm = run.flags.mm
    composite = DiTModel(mm.model, *load_encoders(mm))
    model = TrainedPredictor(composite, run)
    runtime.to_runtime_device(composite)
    run.model = model
    for name, module in model.named_modules():
        if any(module_name_match(pattern, name) for pattern in run.recomputed):
            module.forward = _without_cache(module.forward)
    return model


def load_encoders(mm: MultiModalArguments) -> tuple[Any, Any]:
    """Load the encoders of a run, in real memory even while the engine builds a model on the meta device."""
    with real_memory():
        return registry.load_encoders(mm.model, mm.encodes)


def _without_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` for the engine's recomputation, which passes every module a cache of keys and values."""

    def forward_without_cache(*args: Any, past_key_values: None = None, **named: Any) -> Any:
        return forward(*args, **named)

    return forward_without_cache


def inject_our_adapters() -> None:
    """Replace peft's ``inject_adapter_in_model``, which the engine calls, so that it uses our adapters.

    Raises:
        PlatformError: peft, which the engine imports, is not installed.
    """
    try:
        import peft
    except ImportError:
        raise PlatformError(
            "training.lora.enable = true needs peft, which is not installed. Run: pip install peft"
        ) from None
    theirs = peft.inject_adapter_in_model

    def inject(config: Any, model: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(model, TrainedPredictor):
            return theirs(config, model, *rest, **named)
        model.choose_trained()
        return model

    vars(peft)["inject_adapter_in_model"] = inject
