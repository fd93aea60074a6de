"""The interface of an engine and its checkpoints, for either framework, and the batches that it is given."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config, Precision, load_fsdp2_config
from mindspeed_mm_dit.configs.run import MultiModalArguments, RunConfig
from mindspeed_mm_dit.data.loader import load_batches, load_batches_in_process
from mindspeed_mm_dit.data.order import VALIDATION_START
from mindspeed_mm_dit.data.samples import Batch, SampleReader
from mindspeed_mm_dit.errors import CheckpointError, DataError
from mindspeed_mm_dit.objectives.registry import training_draw, validation_draw
from mindspeed_mm_dit.training.signals import StopRequest

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


class EmaModel(NamedTuple):
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
    def of(cls, composite: Any, predictor: Callable[..., Tensor]) -> EmaModel:
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

    def update_power_emas(self, fractions: Sequence[float]) -> None:
        """Move each EMA of --power-ema-stds towards the weights, by its fraction in ``fractions``."""

    def eval_step(self, forward_step: ForwardStep, batches: Iterator[Any]) -> Tensor:
        """Return the loss of each sample in this rank's part of a global batch, (B,)."""

    def ema_weights(self, needs_model: bool) -> AbstractContextManager[EmaModel | None]:
        """While entered, the EMA replaces the weights; afterwards both are bit for bit what they were.

        Every rank must enter it. It yields a model if ``needs_model``, or if ranks hold shards of one, else None. Every
        rank with a model must make the same calls.
        """

    def num_parameters(self) -> int:
        """Return the number of parameters of the predictor, over all shards."""


class Writer(Protocol):
    """Writes one checkpoint at a time."""

    def copy_to_host(self, state: Any) -> Any:
        """Return ``state``, to be written, on its way to the host."""

    def write(self, state: Any, path: Path, when_complete: Callable[[], object]) -> None:
        """Write the result of ``copy_to_host`` into the folder ``path``; every rank must call this."""

    def wait(self) -> Any:
        """Wait for the write under way; return its error on this rank, or None."""


class Checkpoints(Protocol):
    """Reads and writes a framework's checkpoints: the module ``checkpoint/torch_dcp.py`` or ``mindspore_ckpt.py``."""

    def Writer(self, in_background: bool, when_failed: Callable[[CheckpointError], object], /) -> Writer:
        """Return a writer; ``when_failed`` is called, in any thread, with the error of a write that failed."""

    def find_damage(self, path: Path, rank: int = 0, world_size: int = 1) -> str | None:
        """Return what is wrong with the part of a checkpoint that this rank reads, or None."""

    def has_optimizer(self, path: Path) -> bool:
        """Return whether a checkpoint holds the optimizer's state."""

    def check_architecture(self, path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless a checkpoint holds the weights with these names and shapes."""

    def entries_for_mindspeed_mm(self, facts: Mapping[str, Any], predictor: Any) -> Mapping[str, Any]:
        """Return what MindSpeed-MM expects in addition to the state; ``predictor``: its config."""


class EngineModule(Protocol):
    """The interface of ``training/<framework>/engine.py``."""

    checkpoints: Checkpoints
    """The framework's checkpoints."""

    def Engine(
        self,
        model: Any,
        args: RunConfig,
        fsdp2: Fsdp2Config | None,
        precision: Precision,
        weights: Mapping[str, np.ndarray] | None,
        /,
    ) -> Engine:
        """Spread a composite over the ranks; return its engine.

        weights: the initial value of each parameter, by its name; None: the composite initialises them from --seed.
        """

    def check_sharding(self, mm: MultiModalArguments) -> None:
        """Raise ConfigError for a setting of fsdp2.yaml that does not fit the model or is not supported."""


def next_batches(batches: Iterator[Any], stop: StopRequest) -> list[Any]:
    """Return this rank's micro-batches for one optimizer step.

    All are read before the step, so an error while reading leaves the weights unchanged. ``stop`` records the error.
    """
    count, micro_batches = framework.runtime.num_microbatches(), []
    try:
        micro_batches = list(itertools.islice(batches, count))
        if len(micro_batches) < count:
            raise DataError("The batches of this run have come to an end.")
    except Exception as error:  # (a reader may raise any kind)
        stop.note(error)
    return micro_batches


class TokenWeightedSamples:
    """Samples whose losses are weighted by their tokens: each batch has ``loss_weights`` (B,), with mean 1 over a step.

    So the mean over a step's samples is a mean over its tokens, however ranks and micro-batches split the step.

    tokens: (N,), of each training sample; start: a sample index at which a step begins; size: samples per step.
    """

    def __init__(self, samples: SampleReader, tokens: np.ndarray, start: int, size: int) -> None:
        self._samples, self._tokens, self._start, self._size = samples, tokens, start, size
        self.order = samples.order

    def batch(self, sample_indices: np.ndarray) -> Batch:
        """Return the samples at ``sample_indices`` (B,) int64, all of one step."""
        first = sample_indices[0] - (sample_indices[0] - self._start) % self._size
        step = self._tokens[self.order.images(np.arange(first, first + self._size))]
        tokens = self._tokens[self.order.images(sample_indices)]
        return {**self._samples.batch(sample_indices), "loss_weights": (tokens / step.mean()).astype(np.float32)}


class BatchStream:
    """This rank's micro-batches from one sample index on; every ``iter`` starts there again."""

    def __init__(
        self, args: RunConfig, samples: SampleReader | TokenWeightedSamples, start: int, num_workers: int
    ) -> None:
        self._args, self._samples, self._start, self._num_workers = args, samples, start, num_workers

    def __iter__(self) -> Generator[Batch, None, None]:
        rank, ranks, size = (
            framework.runtime.data_parallel_rank(),
            framework.runtime.data_parallel_size(),
            self._args.micro_batch_size,
        )
        num_microbatches = self._args.global_batch_size // (size * ranks)
        sample_indices = self._samples.order.micro_batches(self._start, size, rank, ranks, num_microbatches)
        # A step takes all its micro-batches at once, so that many are prefetched in the step before; no thread idles.
        prefetch = max(self._args.mm.data.dataloader_param.prefetch_batches, num_microbatches, self._num_workers)
        apart = self._num_workers > 0 and framework.runtime.device_type() != "cpu" and sys.platform == "linux"
        apart = apart and not _offloads(self._args)
        load = load_batches_in_process if apart else load_batches
        return load(self._samples, sample_indices, self._num_workers, prefetch)


def _offloads(args: RunConfig) -> bool:
    """Return whether the state is in host memory: a forked process would copy every page that a step changes."""
    return args.use_torch_fsdp2 and load_fsdp2_config(args.fsdp2_config_path).offload_to_cpu


def train_valid_batches(args: RunConfig) -> tuple[Iterator[Batch], BatchStream | None]:
    """Return the training micro-batches, from ``args.consumed_train_samples`` on, and the held-out ones."""
    training, held_out = train_valid_streams(args)
    return iter(training), held_out


def train_valid_streams(args: RunConfig) -> tuple[BatchStream, BatchStream | None]:
    """Return both as streams that have not started."""
    data, diffusion = args.mm.data_set, args.mm.model.diffusion
    plain = data.samples(training_draw(diffusion))
    samples: SampleReader | TokenWeightedSamples = plain
    samples.order.check(args.micro_batch_size, args.consumed_train_samples)
    if args.loss_by == "token":
        samples = TokenWeightedSamples(plain, data.tokens(), args.consumed_train_samples, args.global_batch_size)
    training = BatchStream(args, samples, args.consumed_train_samples, args.num_workers)
    if not data.num_valid:
        return training, None
    # Validation repeats its samples if there are few: a batch may be larger than the held-out part.
    held_out = data.samples(validation_draw(diffusion), held_out=True)
    return training, BatchStream(args, held_out, VALIDATION_START, 0)
