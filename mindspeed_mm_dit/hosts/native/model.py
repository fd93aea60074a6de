"""The predictor as the engine wants a model: given a whole batch it answers with the loss.

The trained module is the predictor itself, so that its tensors have the published names in every checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mindspeed.fsdp.utils.str_match import module_name_match
from mindspeed_mm.fsdp.models.base_model import BaseModel
from torch import Tensor, nn
from transformers.utils import ModelOutput

from mindspeed_mm_dit.configs.mm_args import MultiModalArguments
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.ending import end
from mindspeed_mm_dit.hosts.native import checkpoints
from mindspeed_mm_dit.hosts.native.average import SavedAverage
from mindspeed_mm_dit.hosts.native.bits import unpacked
from mindspeed_mm_dit.hosts.native.run import Run, current
from mindspeed_mm_dit.models import registry
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.init import initial_weights

_register_parameter = nn.Module.register_parameter  # before the engine replaces it to build without memory


class NativeModel(BaseModel):
    """What the engine is given under our model id; it builds the model that yaml and model.json describe."""

    @classmethod
    def _from_config(cls, config: Any) -> nn.Module:
        """Return the model without its weights, which :meth:`TrainedPredictor.init_weights` or a checkpoint bring."""
        current().meeting.close()
        try:
            checkpoints.check(current())
            return build(current())
        except UserError as error:
            end(error)

    @classmethod
    def from_pretrained(cls, config: Any) -> nn.Module:
        """Return the model with its initial weights."""
        model = cls._from_config(config)
        fill_from_seed(model, current().flags.seed)
        return model


@dataclass
class Scored(ModelOutput):
    """What a forward pass answers."""

    loss: Tensor | None = None
    """Mean over the micro-batch."""


class TrainedPredictor(nn.Module):
    """What a predictor learns in order to be trained by the engine; the class of the model is this and its own."""

    run: Run
    average: SavedAverage | None
    composite: tuple[DiTModel]
    """Around this model, and outside of the tree of its modules."""

    def forward(self, use_cache: bool = False, **batch: Tensor) -> Scored:
        """Return the mean loss of a micro-batch, its floats given as bits (``bits``); ``use_cache`` means nothing."""
        with torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16, enabled=self.run.autocast):
            losses = self.composite[0](**unpacked(batch))  # (B,)
        return Scored(loss=losses.mean())

    def init_weights(self) -> None:
        """Fill a model that was built without memory (the engine calls this once it is sharded)."""
        fill_from_seed(self, self.run.flags.seed)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return weights and their moving average: what the engine saves, and loads into."""
        self.moving_average()
        return super().state_dict(*args, **kwargs)

    def averages(self) -> Mapping[str, Tensor]:
        """Return the average of each weight, by its name."""
        return self.moving_average().averages

    def moving_average(self) -> SavedAverage:
        """Return the average of the weights; the first call, which finds them sharded, begins it."""
        if self.average is None:
            self.average = SavedAverage(self, self.run.flags.ema_decay)
        return self.average


def build(run: Run) -> nn.Module:
    """Return the predictor of ``run``, taught to answer with its loss; on the meta device if the engine says so."""
    mm = run.flags.mm
    composite = DiTModel(mm.model, *load_encoders(mm))
    model, kind = composite.predictor, type(composite.predictor)
    del composite.predictor  # the module tree begins at the predictor
    composite.predictor = functools.partial(kind.forward, model)
    runtime.to_runtime_device(composite)
    model.__class__ = type(f"Trained{kind.__name__}", (TrainedPredictor, kind), {})
    model.run, model.average, model.composite = run, None, (composite,)
    run.model = model
    for name, module in model.named_modules():
        if any(module_name_match(pattern, name) for pattern in run.recomputed):
            module.forward = _without_cache(module.forward)
    return model


def load_encoders(mm: MultiModalArguments) -> tuple[Any, Any]:
    """Load what encodes for a run, in real memory even while the engine builds a model without any."""
    with _real_memory():
        return registry.load_encoders(mm.model, mm.encodes)


def _without_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` for the engine's recomputation, which hands every module a cache of keys and values."""

    def answer(*args: Any, past_key_values: None = None) -> Any:
        return forward(*args)

    return answer


def fill_from_seed(model: nn.Module, seed: int) -> None:
    """Set every parameter, sharded or not, from the seed."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, array in initial_weights(current().flags.mm.model.predictor.parameters(), seed).items():
            _own_part(parameters[name]).copy_(_part_of(torch.as_tensor(array), parameters[name]))


def _own_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "device_mesh") else parameter


def _part_of(whole: Tensor, parameter: Any) -> Tensor:
    """Return what this rank keeps of ``whole``, the value of ``parameter``."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(runtime.device())
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


@contextmanager
def _real_memory() -> Iterator[None]:
    """Undo ``init_model_with_meta_device`` for modules that are loaded rather than initialised."""
    replaced = nn.Module.register_parameter
    nn.Module.register_parameter = _register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = replaced
