"""What a run asks of an engine and of its checkpoints, whatever the framework.

``training/<framework>/engine.py`` is a module with these names (:class:`EngineModule`). Its engine differentiates what
the training script computes: forward step and loss function decide the loss, in either framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.mm_args import MultiModalArguments
from mindspeed_mm_dit.configs.precision import Precision
from mindspeed_mm_dit.configs.run import RunConfig

Tensor = Any  # a tensor of the active framework

LossFunc = Callable[[Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""What the model returned -> (the loss to minimise, {"loss": the one to report, a mean over the ranks})."""
ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, LossFunc]]
"""(micro-batches, model) -> (what the model returns of the next one, the loss function); model(**batch) -> (B,)."""


class StepResult(NamedTuple):
    """Scalars on the device; reading them waits for it."""

    loss: Tensor
    """Mean loss over the global batch."""
    grad_norm: Tensor
    """Norm of the gradient before clipping."""


class AveragedModel(NamedTuple):
    """A composite whose predictor answers by the moving average, for ``sampling.generate``."""

    ae: Any
    diffusion: Any
    predictor: Callable[..., Tensor]
    """(x_t, t, *condition) -> output, float32, in the precision of a step."""
    text_encoders: tuple[Any, ...]
    """What reads captions; none where labels steer the model."""


class Kept(Protocol):
    """What a checkpoint holds of a run."""

    def state(self, with_optimizer: bool = True) -> dict[str, Any]:
        """Return all that a resumed run needs, for ``Checkpoints.Writer``; every rank must call this."""

    def load(self, path: Path, with_optimizer: bool) -> None:
        """Continue from the checkpoint ``path``; its architecture must be this model's."""


class Engine(Kept, Protocol):
    """The composite spread over the ranks, its optimizer and its moving average."""

    def train_step(self, forward_step: ForwardStep, batches: Iterator[Any], lr: float) -> StepResult:
        """Accumulate the gradients of a global batch, clip, step, and update the moving average."""

    def move_power_emas(self, shares: Sequence[float]) -> None:
        """Move the average of each of --power-ema-stds this share of the way to the weights."""

    def eval_step(self, forward_step: ForwardStep, batches: Iterator[Any]) -> Tensor:
        """Return the loss of each sample of this rank's part of a global batch, (B,)."""

    def averaged(self, wanted: bool) -> AbstractContextManager[AveragedModel | None]:
        """While entered, the averages stand in for the weights; no bit of either has changed afterwards.

        Every rank must enter it, and give what it is given the same to do: a model, where it is ``wanted`` or
        where ranks hold shards of one; or None.
        """

    def num_parameters(self) -> int:
        """Return the number of parameters of the predictor, over all shards."""


class Writer(Protocol):
    """Writes one checkpoint at a time."""

    def write(self, state: Any, path: Path, when_complete: Callable[[], object]) -> None:
        """Write ``state`` into the folder ``path``; every rank must call this."""

    def wait(self) -> Any:
        """Wait for the write under way; return what went wrong with it on this rank, or None."""


class Checkpoints(Protocol):
    """The module that reads and writes a framework's checkpoints."""

    @property
    def Writer(self) -> Callable[[bool, Callable[[Any], object]], Writer]:
        """(in background, what is called with an error) -> writer."""

    @property
    def problem_of(self) -> Callable[..., str | None]:
        """(path, rank=0, world_size=1) -> what is wrong with a checkpoint, as far as this rank reads it."""

    @property
    def has_optimizer(self) -> Callable[[Path], bool]:
        """Whether a checkpoint holds the optimizer's state."""

    @property
    def check_architecture(self) -> Callable[[Path, Mapping[str, tuple[int, ...]]], None]:
        """Raise CheckpointError unless a checkpoint holds the weights with these names and shapes."""

    @property
    def entries_for_mindspeed_mm(self) -> Callable[[Mapping[str, Any], Any], Mapping[str, Any]]:
        """(facts of the run, the predictor's config) -> what MindSpeed-MM wants to find beside the state."""


class EngineModule(Protocol):
    """What ``training/<framework>/engine.py`` offers."""

    @property
    def Engine(self) -> Callable[[Any, RunConfig, Fsdp2Config | None, Precision, Any], Engine]:
        """(composite, flags, fsdp2.yaml or None, precision, weights) -> engine.

        weights: what each parameter begins as, an array by its name; None: what the composite draws from --seed.
        """

    @property
    def checkpoints(self) -> Checkpoints:
        """The module of the framework's checkpoints."""

    @property
    def check_sharding(self) -> Callable[[MultiModalArguments], None]:
        """Raise ConfigError for what in fsdp2.yaml does not fit the model, or is not offered."""
