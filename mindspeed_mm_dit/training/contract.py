"""The interface of an engine and its checkpoints, for either framework.

``training/<framework>/engine.py`` implements :class:`EngineModule`. Its engine differentiates the loss of the training
script: in either framework, the forward step and the loss function decide it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.mm_args import MultiModalArguments
from mindspeed_mm_dit.configs.precision import Precision
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import active

Tensor = Any  # a tensor of the active framework

LossFunc = Callable[[Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""The model's output -> (the loss to minimise, {"loss": the one to report, a mean over the ranks})."""
ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, LossFunc]]
"""(micro-batches, model) -> (the model's output for the next one, the loss function); model(**batch) -> (B,)."""


class StepResult(NamedTuple):
    """Scalars on the device; reading them waits for the device."""

    loss: Tensor
    """Mean loss over the global batch."""
    grad_norm: Tensor
    """Norm of the gradient before clipping."""


class AveragedModel(NamedTuple):
    """A composite whose predictor uses the EMA weights, for ``sampling.generate``."""

    ae: Any
    diffusion: Any
    predictor: Callable[..., Tensor]
    """(x_t, t, *condition) -> output, float32, in the precision of a step."""
    text_encoders: tuple[Any, ...]
    """Encoders of captions; empty for a class-conditional model."""
    frames: Callable[..., Tensor] | None = None
    image_features: Callable[..., Tensor] | None = None
    """The composite's, which encode the first frames of clips."""

    @classmethod
    def of(cls, composite: Any, predictor: Callable[..., Tensor]) -> AveragedModel:
        """Return a model of ``predictor`` and the other parts of a composite."""
        parts = (composite.text_encoders, composite.frames, composite.image_features)
        return cls(composite.ae, composite.diffusion, predictor, *parts)


class RunState(Protocol):
    """The state of a run that a checkpoint stores."""

    def state(self, with_optimizer: bool = True) -> dict[str, Any]:
        """Return all that a resumed run needs, for ``Checkpoints.Writer``; every rank must call this."""

    def load(self, path: Path, with_optimizer: bool) -> None:
        """Continue from the checkpoint ``path``; its architecture must be this model's."""


class Engine(RunState, Protocol):
    """The composite spread over the ranks, its optimizer and its EMA."""

    def train_step(self, forward_step: ForwardStep, batches: Iterator[Any], lr: float) -> StepResult:
        """Accumulate the gradients of a global batch, clip, step, and update the EMA."""

    def move_power_emas(self, fractions: Sequence[float]) -> None:
        """Move each EMA of --power-ema-stds towards the weights, by its fraction in ``fractions``."""

    def eval_step(self, forward_step: ForwardStep, batches: Iterator[Any]) -> Tensor:
        """Return the loss of each sample in this rank's part of a global batch, (B,)."""

    def averaged(self, needs_model: bool) -> AbstractContextManager[AveragedModel | None]:
        """While entered, the EMA replaces the weights; afterwards both are bit for bit what they were.

        Every rank must enter it. It yields a model if ``needs_model``, or if ranks hold shards of one, else None. Every
        rank with a model must make the same calls.
        """

    def num_parameters(self) -> int:
        """Return the number of parameters of the predictor, over all shards."""


class Writer(Protocol):
    """Writes one checkpoint at a time."""

    def copied(self, state: Any) -> Any:
        """Return ``state``, to be written, on its way to the host."""

    def write(self, state: Any, path: Path, when_complete: Callable[[], object]) -> None:
        """Write the result of ``copied`` into the folder ``path``; every rank must call this."""

    def wait(self) -> Any:
        """Wait for the write under way; return its error on this rank, or None."""


class Checkpoints(Protocol):
    """The module that reads and writes a framework's checkpoints."""

    @property
    def Writer(self) -> Callable[[bool, Callable[[Any], object]], Writer]:
        """(in background, callback for an error) -> writer."""

    @property
    def problem_of(self) -> Callable[..., str | None]:
        """(path, rank=0, world_size=1) -> what is wrong with the part of a checkpoint that this rank reads, or None."""

    @property
    def has_optimizer(self) -> Callable[[Path], bool]:
        """Whether a checkpoint holds the optimizer's state."""

    @property
    def check_architecture(self) -> Callable[[Path, Mapping[str, tuple[int, ...]]], None]:
        """Raise CheckpointError unless a checkpoint holds the weights with these names and shapes."""

    @property
    def entries_for_mindspeed_mm(self) -> Callable[[Mapping[str, Any], Any], Mapping[str, Any]]:
        """(facts of the run, the predictor's config) -> what MindSpeed-MM expects in addition to the state."""


class EngineModule(Protocol):
    """The interface of ``training/<framework>/engine.py``."""

    @property
    def Engine(self) -> Callable[[Any, RunConfig, Fsdp2Config | None, Precision, Any], Engine]:
        """(composite, flags, fsdp2.yaml or None, precision, weights) -> engine.

        weights: the initial value of each parameter, by its name; None: the composite initialises them from --seed.
        """

    @property
    def checkpoints(self) -> Checkpoints:
        """The module of the framework's checkpoints."""

    @property
    def check_sharding(self) -> Callable[[MultiModalArguments], None]:
        """Raise ConfigError for a setting of fsdp2.yaml that does not fit the model or is not supported."""


def engine_module() -> EngineModule:
    """Return the engine module of the active framework."""
    module: EngineModule = importlib.import_module(f"mindspeed_mm_dit.training.{active()}.engine")
    return module
